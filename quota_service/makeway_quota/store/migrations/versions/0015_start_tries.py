"""Keep in the row of a job how often its start was tried in vain, and which nodes it avoids.

Revision ID: 0015
Revises: 0014
"""

import sqlalchemy as sa
from alembic import op

revision = '0015'
down_revision = '0014'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('workloads', sa.Column('start_tries', sa.Integer(), server_default=sa.text('0'), nullable=False))
    op.add_column('workloads', sa.Column('avoids', sa.Text(), server_default=sa.text("'[]'"), nullable=False))


def downgrade() -> None:
    op.drop_column('workloads', 'avoids')
    op.drop_column('workloads', 'start_tries')
