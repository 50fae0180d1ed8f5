"""Remember which workloads were removed, so that a reader can be told so.

Revision ID: 0010
Revises: 0009
"""

import sqlalchemy as sa
from alembic import op

revision = '0010'
down_revision = '0009'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table('removals',
    sa.Column('workload', sa.Text(), nullable=False),
    sa.Column('kind', sa.Text(), nullable=False),
    sa.Column('owner', sa.Text(), nullable=False),
    sa.Column('team', sa.Text(), nullable=True),
    sa.Column('at', sa.Double(), nullable=False, comment='the end before which workloads were removed'),
    sa.PrimaryKeyConstraint('workload', name=op.f('pk_removals'))
    )
    op.create_index('ix_removals_at', 'removals', ['at'], unique=False)


def downgrade() -> None:
    op.drop_index('ix_removals_at', 'removals')
    op.drop_table('removals')
