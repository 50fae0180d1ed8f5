"""Indexes for every read over long histories, and the tables of retention.

Revision ID: 0005
Revises: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = '0005'
down_revision = '0004'
branch_labels = None
depends_on = None

LIVE = sa.text("ended_at IS NULL")
ENDED = sa.text("ended_at IS NOT NULL")
ENDED_STATES = "('succeeded', 'failed', 'cancelled', 'stopped')"

WORKLOAD_INDEXES = {
    'ix_workloads_live': (['submitted_at', 'id'], LIVE),
    'ix_workloads_live_owner': (['owner', 'submitted_at'], LIVE),
    'ix_workloads_live_team': (['team', 'submitted_at'], LIVE),
    'ix_workloads_ended_state': (['state', 'submitted_at'], ENDED),
    'ix_workloads_ended_owner': (['owner', 'state', 'submitted_at'], ENDED),
    'ix_workloads_ended_team': (['team', 'state', 'submitted_at'], ENDED),
    'ix_workloads_ended_at': (['ended_at'], ENDED),
}


def upgrade() -> None:
    op.execute(
        "UPDATE workloads SET ended_at = COALESCE(started_at, submitted_at) "
        f"WHERE ended_at IS NULL AND state IN {ENDED_STATES}"
    )
    op.execute(f"UPDATE workloads SET ended_at = NULL WHERE ended_at IS NOT NULL AND state NOT IN {ENDED_STATES}")
    op.drop_index('ix_workloads_state', 'workloads')
    op.drop_index('ix_workloads_owner_submitted_at', 'workloads')
    for name, (columns, where) in WORKLOAD_INDEXES.items():
        op.create_index(name, 'workloads', columns, unique=False, sqlite_where=where, postgresql_where=where)
    op.drop_index('ix_decisions_at', 'decisions')
    op.drop_index('ix_events_at', 'events')
    op.create_index('ix_decisions_owner_id', 'decisions', ['owner', 'id'], unique=False)
    op.create_table('purges',
    sa.Column('workload', sa.Text(), nullable=False, comment='its rows are gone, its folder is still to be removed'),
    sa.Column('at', sa.Double(), nullable=False),
    sa.PrimaryKeyConstraint('workload', name=op.f('pk_purges'))
    )
    op.create_table('retention',
    sa.Column('id', sa.Integer(), autoincrement=False, nullable=False, comment='always 1'),
    sa.Column('at', sa.Double(), nullable=False, comment='when the last pass ended'),
    sa.Column('clock', sa.Double(), nullable=False, comment='the time that ages were counted to'),
    sa.Column('report', sa.Text(), nullable=False),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_retention'))
    )


def downgrade() -> None:
    op.drop_table('retention')
    op.drop_table('purges')
    op.drop_index('ix_decisions_owner_id', 'decisions')
    op.create_index('ix_events_at', 'events', ['at'], unique=False)
    op.create_index('ix_decisions_at', 'decisions', ['at'], unique=False)
    for name in reversed(WORKLOAD_INDEXES):
        op.drop_index(name, 'workloads')
    op.create_index('ix_workloads_owner_submitted_at', 'workloads', ['owner', 'submitted_at'], unique=False)
    op.create_index('ix_workloads_state', 'workloads', ['state'], unique=False)
