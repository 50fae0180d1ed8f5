"""Count the bytes that are kept for each person and team.

Revision ID: 0017
Revises: 0016
"""

import sqlalchemy as sa
from alembic import op

revision = '0017'
down_revision = '0016'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table('accounts',
    sa.Column('owner', sa.Text(), nullable=False),
    sa.Column('team', sa.Text(), nullable=False),
    sa.Column('kind', sa.Text(), nullable=False),
    sa.Column('bytes', sa.BigInteger(), nullable=False),
    sa.PrimaryKeyConstraint('owner', 'team', 'kind', name=op.f('pk_accounts'))
    )
    op.create_table('folders',
    sa.Column('workload', sa.Text(), nullable=False),
    sa.Column('bytes', sa.BigInteger(), nullable=False),
    sa.Column('at', sa.Double(), nullable=False, comment='when it was measured'),
    sa.ForeignKeyConstraint(['workload'], ['workloads.id'], name=op.f('fk_folders_workload_workloads'), ondelete='CASCADE'),
    sa.PrimaryKeyConstraint('workload', name=op.f('pk_folders'))
    )
    op.add_column('blobs', sa.Column('size', sa.BigInteger(), server_default=sa.text('0'), nullable=False))
    op.create_index('ix_workloads_owner', 'workloads', ['owner'], unique=False)
    op.execute("INSERT INTO accounts SELECT DISTINCT owner, '', 'jobs', 0 FROM workloads WHERE kind = 'job'")
    op.execute('UPDATE blobs SET size = length(data) WHERE NOT outside')


def downgrade() -> None:
    op.drop_index('ix_workloads_owner', 'workloads')
    op.drop_column('blobs', 'size')
    op.drop_table('folders')
    op.drop_table('accounts')
