"""Remember when an attempt was ordered to start, and the nodes on which attempts of a job were lost.

Revision ID: 0006
Revises: 0005
"""

import sqlalchemy as sa
from alembic import op

revision = '0006'
down_revision = '0005'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('workloads', sa.Column('launched_at', sa.Double(), nullable=True))
    op.add_column('workloads', sa.Column('lost_on', sa.Text(), server_default=sa.text("'[]'"), nullable=False))


def downgrade() -> None:
    op.drop_column('workloads', 'lost_on')
    op.drop_column('workloads', 'launched_at')
