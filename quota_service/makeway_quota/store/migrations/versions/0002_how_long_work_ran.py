"""How long every workload ran, for forecasts.

Revision ID: 0002
Revises: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = '0002'
down_revision = '0001'
branch_labels = None
depends_on = None

SUCCEEDED = sa.text("state = 'succeeded'")


def upgrade() -> None:
    op.add_column('workloads', sa.Column('ran', sa.Double(), nullable=False, server_default=sa.text('0')))
    op.execute(
        "UPDATE workloads SET ran = COALESCE((SELECT SUM(attempts.ended_at - attempts.started_at) FROM attempts "
        "WHERE attempts.workload = workloads.id AND attempts.ended_at > attempts.started_at), 0)"
    )
    op.drop_index('ix_workloads_succeeded', 'workloads')


def downgrade() -> None:
    op.create_index('ix_workloads_succeeded', 'workloads', ['team', 'profile', 'ended_at'], unique=False, sqlite_where=SUCCEEDED, postgresql_where=SUCCEEDED)
    op.drop_column('workloads', 'ran')
