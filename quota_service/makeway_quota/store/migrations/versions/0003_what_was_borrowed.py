"""What every policy borrowed of late.

Revision ID: 0003
Revises: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = '0003'
down_revision = '0002'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table('histories',
    sa.Column('policy', sa.Text(), nullable=False, comment='its decayed over-quota use'),
    sa.Column('milli', sa.Double(), nullable=False),
    sa.Column('at', sa.Double(), nullable=False),
    sa.PrimaryKeyConstraint('policy', name=op.f('pk_histories'))
    )


def downgrade() -> None:
    op.drop_table('histories')
