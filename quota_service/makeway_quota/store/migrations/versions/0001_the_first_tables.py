"""The first tables.

Revision ID: 0001
Revises: nothing
"""

import sqlalchemy as sa
from alembic import op

revision = '0001'
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table('blobs',
    sa.Column('digest', sa.Text(), nullable=False, comment='SHA-256: clones share their files'),
    sa.Column('data', sa.LargeBinary(), nullable=False),
    sa.PrimaryKeyConstraint('digest', name=op.f('pk_blobs'))
    )
    op.create_table('decisions',
    sa.Column('id', sa.BigInteger().with_variant(sa.Integer(), 'sqlite'), autoincrement=True, nullable=False),
    sa.Column('at', sa.Double(), nullable=False),
    sa.Column('verb', sa.Text(), nullable=False),
    sa.Column('workload', sa.Text(), nullable=True),
    sa.Column('team', sa.Text(), nullable=True),
    sa.Column('owner', sa.Text(), nullable=True),
    sa.Column('code', sa.Text(), nullable=False),
    sa.Column('message', sa.Text(), nullable=False),
    sa.Column('numbers', sa.Text(), nullable=False),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_decisions')),
    sqlite_autoincrement=True
    )
    with op.batch_alter_table('decisions', schema=None) as batch_op:
        batch_op.create_index('ix_decisions_at', ['at'], unique=False)
        batch_op.create_index('ix_decisions_team_id', ['team', 'id'], unique=False)
        batch_op.create_index('ix_decisions_workload_id', ['workload', 'id'], unique=False)

    op.create_table('events',
    sa.Column('id', sa.BigInteger().with_variant(sa.Integer(), 'sqlite'), autoincrement=True, nullable=False),
    sa.Column('at', sa.Double(), nullable=False),
    sa.Column('kind', sa.Text(), nullable=False),
    sa.Column('team', sa.Text(), nullable=True),
    sa.Column('owner', sa.Text(), nullable=True),
    sa.Column('workload', sa.Text(), nullable=True),
    sa.Column('data', sa.Text(), nullable=False),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_events')),
    sqlite_autoincrement=True
    )
    with op.batch_alter_table('events', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_events_at'), ['at'], unique=False)

    op.create_table('policies',
    sa.Column('version', sa.Integer(), autoincrement=False, nullable=False),
    sa.Column('at', sa.Double(), nullable=False),
    sa.Column('author', sa.Text(), nullable=False),
    sa.Column('comment', sa.Text(), nullable=False),
    sa.Column('document', sa.Text(), nullable=False),
    sa.PrimaryKeyConstraint('version', name=op.f('pk_policies'))
    )
    op.create_table('terms',
    sa.Column('term', sa.Integer(), autoincrement=False, nullable=False),
    sa.Column('holder', sa.Text(), nullable=False),
    sa.Column('at', sa.Double(), nullable=False),
    sa.PrimaryKeyConstraint('term', name=op.f('pk_terms'))
    )
    op.create_table('workloads',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('kind', sa.Text(), nullable=False),
    sa.Column('team', sa.Text(), nullable=True),
    sa.Column('profile', sa.Text(), nullable=False),
    sa.Column('owner', sa.Text(), nullable=False),
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('priority', sa.Text(), nullable=False),
    sa.Column('preemptible', sa.Boolean(), nullable=False),
    sa.Column('state', sa.Text(), nullable=False),
    sa.Column('attempt', sa.Integer(), nullable=False),
    sa.Column('preemptions', sa.Integer(), nullable=False),
    sa.Column('failures', sa.Integer(), nullable=False),
    sa.Column('infra_failures', sa.Integer(), nullable=False),
    sa.Column('max_failures', sa.Integer(), nullable=False),
    sa.Column('submitted_at', sa.Double(), nullable=False),
    sa.Column('started_at', sa.Double(), nullable=True),
    sa.Column('ended_at', sa.Double(), nullable=True),
    sa.Column('gpus', sa.BigInteger(), nullable=False),
    sa.Column('workers', sa.Integer(), nullable=False),
    sa.Column('min_workers', sa.Integer(), nullable=False),
    sa.Column('cpu', sa.BigInteger(), nullable=False),
    sa.Column('memory', sa.BigInteger(), nullable=False),
    sa.Column('time_limit', sa.Double(), nullable=True),
    sa.Column('grace', sa.Double(), nullable=False),
    sa.Column('signal', sa.Text(), nullable=False),
    sa.Column('image', sa.Text(), nullable=True),
    sa.Column('reason_code', sa.Text(), nullable=False),
    sa.Column('reason_message', sa.Text(), nullable=False),
    sa.Column('reason_numbers', sa.Text(), nullable=False),
    sa.Column('not_before', sa.Double(), nullable=True),
    sa.Column('over_quota', sa.Boolean(), nullable=False),
    sa.Column('borrowed_from', sa.Text(), nullable=False),
    sa.Column('placement', sa.Text(), nullable=False),
    sa.Column('claim', sa.Text(), nullable=False),
    sa.Column('failed_node', sa.Text(), nullable=True),
    sa.Column('exit_code', sa.BigInteger(), nullable=True),
    sa.Column('message', sa.Text(), nullable=False),
    sa.Column('checkpoint_step', sa.BigInteger(), nullable=True),
    sa.Column('checkpoint_at', sa.Double(), nullable=True),
    sa.Column('notice', sa.Text(), nullable=True),
    sa.Column('promised_to', sa.Text(), nullable=True),
    sa.Column('cancel_requested', sa.Boolean(), nullable=False),
    sa.Column('server', sa.Text(), nullable=False),
    sa.Column('expires_at', sa.Double(), nullable=True),
    sa.Column('server_started', sa.Boolean(), nullable=False),
    sa.Column('command', sa.Text(), nullable=False),
    sa.Column('env', sa.Text(), nullable=False),
    sa.Column('clone_of', sa.Text(), nullable=True),
    sa.Column('version', sa.Integer(), nullable=False),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_workloads'))
    )
    with op.batch_alter_table('workloads', schema=None) as batch_op:
        batch_op.create_index('ix_workloads_owner_submitted_at', ['owner', 'submitted_at'], unique=False)
        batch_op.create_index('ix_workloads_state', ['state'], unique=False)
        batch_op.create_index('ix_workloads_submitted_at_id', ['submitted_at', 'id'], unique=False)
        batch_op.create_index('ix_workloads_succeeded', ['team', 'profile', 'ended_at'], unique=False, sqlite_where=sa.text("state = 'succeeded'"), postgresql_where=sa.text("state = 'succeeded'"))
        batch_op.create_index('uq_workloads_live_session', ['owner', 'server'], unique=True, sqlite_where=sa.text("kind = 'session' AND state IN ('pending', 'starting', 'running', 'checkpointing')"), postgresql_where=sa.text("kind = 'session' AND state IN ('pending', 'starting', 'running', 'checkpointing')"))

    op.create_table('attempts',
    sa.Column('workload', sa.Text(), nullable=False),
    sa.Column('number', sa.Integer(), nullable=False),
    sa.Column('started_at', sa.Double(), nullable=False),
    sa.Column('ended_at', sa.Double(), nullable=True),
    sa.Column('placement', sa.Text(), nullable=False),
    sa.Column('outcome', sa.Text(), nullable=True),
    sa.Column('exit_code', sa.BigInteger(), nullable=True),
    sa.Column('message', sa.Text(), nullable=False),
    sa.Column('checkpoint_step', sa.BigInteger(), nullable=True),
    sa.Column('checkpoint_at', sa.Double(), nullable=True),
    sa.Column('lost_seconds', sa.Double(), nullable=True),
    sa.Column('evicted_for', sa.Text(), nullable=True),
    sa.Column('over_quota', sa.Boolean(), nullable=False),
    sa.ForeignKeyConstraint(['workload'], ['workloads.id'], name=op.f('fk_attempts_workload_workloads'), ondelete='CASCADE'),
    sa.PrimaryKeyConstraint('workload', 'number', name=op.f('pk_attempts'))
    )
    op.create_table('files',
    sa.Column('workload', sa.Text(), nullable=False),
    sa.Column('path', sa.Text(), nullable=False),
    sa.Column('executable', sa.Boolean(), nullable=False),
    sa.Column('blob', sa.Text(), nullable=False),
    sa.ForeignKeyConstraint(['blob'], ['blobs.digest'], name=op.f('fk_files_blob_blobs')),
    sa.ForeignKeyConstraint(['workload'], ['workloads.id'], name=op.f('fk_files_workload_workloads'), ondelete='CASCADE'),
    sa.PrimaryKeyConstraint('workload', 'path', name=op.f('pk_files'))
    )
    with op.batch_alter_table('files', schema=None) as batch_op:
        batch_op.create_index(batch_op.f('ix_files_blob'), ['blob'], unique=False)

    op.create_table('sources',
    sa.Column('workload', sa.Text(), nullable=False),
    sa.Column('source', sa.Text(), nullable=False),
    sa.ForeignKeyConstraint(['workload'], ['workloads.id'], name=op.f('fk_sources_workload_workloads'), ondelete='CASCADE'),
    sa.PrimaryKeyConstraint('workload', name=op.f('pk_sources'))
    )


def downgrade() -> None:
    op.drop_table('sources')
    with op.batch_alter_table('files', schema=None) as batch_op:
        batch_op.drop_index(batch_op.f('ix_files_blob'))

    op.drop_table('files')
    op.drop_table('attempts')
    with op.batch_alter_table('workloads', schema=None) as batch_op:
        batch_op.drop_index('uq_workloads_live_session', sqlite_where=sa.text("kind = 'session' AND state IN ('pending', 'starting', 'running', 'checkpointing')"), postgresql_where=sa.text("kind = 'session' AND state IN ('pending', 'starting', 'running', 'checkpointing')"))
        batch_op.drop_index('ix_workloads_succeeded', sqlite_where=sa.text("state = 'succeeded'"), postgresql_where=sa.text("state = 'succeeded'"))
        batch_op.drop_index('ix_workloads_submitted_at_id')
        batch_op.drop_index('ix_workloads_state')
        batch_op.drop_index('ix_workloads_owner_submitted_at')

    op.drop_table('workloads')
    op.drop_table('terms')
    op.drop_table('policies')
    with op.batch_alter_table('events', schema=None) as batch_op:
        batch_op.drop_index(batch_op.f('ix_events_at'))

    op.drop_table('events')
    with op.batch_alter_table('decisions', schema=None) as batch_op:
        batch_op.drop_index('ix_decisions_workload_id')
        batch_op.drop_index('ix_decisions_team_id')
        batch_op.drop_index('ix_decisions_at')

    op.drop_table('decisions')
    op.drop_table('blobs')
