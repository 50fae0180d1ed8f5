"""Keep how far each job is.

Revision ID: 0019
Revises: 0018
"""

import sqlalchemy as sa
from alembic import op

revision = '0019'
down_revision = '0018'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table('progress',
    sa.Column('workload', sa.Text(), nullable=False),
    sa.Column('attempt', sa.Integer(), nullable=False),
    sa.Column('at', sa.Double(), nullable=False, comment='when it changed last'),
    sa.Column('reached', sa.BigInteger(), nullable=True, comment='the step of an earlier attempt, if this is not as far'),
    sa.Column('progress', sa.Text(), nullable=False, comment='as its process reported it'),
    sa.ForeignKeyConstraint(['workload'], ['workloads.id'], name=op.f('fk_progress_workload_workloads'), ondelete='CASCADE'),
    sa.PrimaryKeyConstraint('workload', name=op.f('pk_progress'))
    )


def downgrade() -> None:
    op.drop_table('progress')
