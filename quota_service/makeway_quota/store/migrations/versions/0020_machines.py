"""Keep machines that are launched, their deployments, and what their agents report.

Revision ID: 0020
Revises: 0019
"""

import sqlalchemy as sa
from alembic import op

revision = '0020'
down_revision = '0019'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table('deployments',
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('document', sa.Text(), nullable=False),
    sa.Column('version', sa.Integer(), nullable=False, comment='grows with every change, also when the name is used again'),
    sa.Column('deleting', sa.Boolean(), nullable=False, comment='its machines are being ended'),
    sa.Column('updated_at', sa.Double(), nullable=False),
    sa.Column('updated_by', sa.Text(), nullable=False),
    sa.Column('deleted_at', sa.Double(), nullable=True, comment='when its last machine was gone; the row goes later'),
    sa.PrimaryKeyConstraint('name', name=op.f('pk_deployments'))
    )
    op.create_index('ix_deployments_deleted_at', 'deployments', ['deleted_at'], unique=False)
    op.create_table('launch_backoffs',
    sa.Column('deployment', sa.Text(), nullable=False),
    sa.Column('type', sa.Text(), nullable=False),
    sa.Column('zone', sa.Text(), nullable=False),
    sa.Column('market', sa.Text(), nullable=False),
    sa.Column('failure', sa.Text(), nullable=False),
    sa.Column('failures', sa.Integer(), nullable=False),
    sa.Column('since', sa.Double(), nullable=False),
    sa.Column('until', sa.Double(), nullable=False),
    sa.PrimaryKeyConstraint('deployment', 'type', 'zone', 'market', 'failure', name=op.f('pk_launch_backoffs'))
    )
    op.create_table('machine_events',
    sa.Column('id', sa.BigInteger().with_variant(sa.Integer(), 'sqlite'), autoincrement=True, nullable=False),
    sa.Column('at', sa.Double(), nullable=False),
    sa.Column('deployment', sa.Text(), nullable=False),
    sa.Column('machine', sa.Text(), nullable=False, comment='empty: of the deployment'),
    sa.Column('state', sa.Text(), nullable=False),
    sa.Column('reason', sa.Text(), nullable=False),
    sa.Column('message', sa.Text(), nullable=False),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_machine_events')),
    sqlite_autoincrement=True
    )
    op.create_index('ix_machine_events_deployment_id', 'machine_events', ['deployment', 'id'], unique=False)
    op.create_index('ix_machine_events_machine_id', 'machine_events', ['machine', 'id'], unique=False)
    op.create_table('machines',
    sa.Column('id', sa.Text(), nullable=False),
    sa.Column('deployment', sa.Text(), nullable=False),
    sa.Column('pool', sa.Text(), nullable=False),
    sa.Column('type', sa.Text(), nullable=False),
    sa.Column('zone', sa.Text(), nullable=False),
    sa.Column('market', sa.Text(), nullable=False),
    sa.Column('price', sa.BigInteger(), nullable=True, comment='millionths of the currency for an hour; null is unknown'),
    sa.Column('gpus', sa.BigInteger(), nullable=False),
    sa.Column('requested_at', sa.Double(), nullable=False),
    sa.Column('since', sa.Double(), nullable=False),
    sa.Column('state', sa.Text(), nullable=False),
    sa.Column('version', sa.Integer(), nullable=False),
    sa.Column('term', sa.Integer(), nullable=False, comment='of the leader that wrote the row'),
    sa.Column('calls', sa.Integer(), nullable=False),
    sa.Column('called_at', sa.Double(), nullable=True),
    sa.Column('end_called_at', sa.Double(), nullable=True),
    sa.Column('instance', sa.Text(), nullable=True),
    sa.Column('launched_at', sa.Double(), nullable=True),
    sa.Column('boot', sa.Text(), nullable=True),
    sa.Column('ready_at', sa.Double(), nullable=True),
    sa.Column('heard_at', sa.Double(), nullable=True),
    sa.Column('attempts', sa.Integer(), nullable=True),
    sa.Column('needed_at', sa.Double(), nullable=False),
    sa.Column('drain', sa.Text(), nullable=True),
    sa.Column('deadline', sa.Double(), nullable=True),
    sa.Column('absences', sa.Integer(), nullable=False),
    sa.Column('reason', sa.Text(), nullable=False),
    sa.Column('over_at', sa.Double(), nullable=True, comment='null while it may cost something'),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_machines'))
    )
    op.create_index('ix_machines_deployment', 'machines', ['deployment', 'requested_at', 'id'], unique=False)
    op.create_index('ix_machines_live', 'machines', ['deployment', 'id'], unique=False, sqlite_where=sa.text('over_at IS NULL'), postgresql_where=sa.text('over_at IS NULL'))
    op.create_index('ix_machines_over_at', 'machines', ['over_at'], unique=False, sqlite_where=sa.text('over_at IS NOT NULL'), postgresql_where=sa.text('over_at IS NOT NULL'))
    op.create_index('ix_machines_requested_at_id', 'machines', ['requested_at', 'id'], unique=False)
    op.create_index('ix_machines_state', 'machines', ['state', 'requested_at', 'id'], unique=False)
    op.create_table('spend_months',
    sa.Column('deployment', sa.Text(), nullable=False),
    sa.Column('month', sa.Text(), nullable=False, comment='such as 2026-11, in the time zone of the deployment'),
    sa.Column('amount', sa.BigInteger(), nullable=False, comment='millionths, of machines that are over'),
    sa.PrimaryKeyConstraint('deployment', 'month', name=op.f('pk_spend_months'))
    )
    op.create_table('unknown_instances',
    sa.Column('deployment', sa.Text(), nullable=False),
    sa.Column('instance', sa.Text(), nullable=False, comment='an instance at the provider without a machine'),
    sa.Column('first_seen', sa.Double(), nullable=False),
    sa.PrimaryKeyConstraint('deployment', 'instance', name=op.f('pk_unknown_instances'))
    )
    op.create_table('machine_outputs',
    sa.Column('machine', sa.Text(), nullable=False),
    sa.Column('kind', sa.Text(), nullable=False, comment='console, init'),
    sa.Column('at', sa.Double(), nullable=False),
    sa.Column('exit_code', sa.BigInteger(), nullable=True),
    sa.Column('text', sa.Text(), nullable=False),
    sa.Column('omitted', sa.BigInteger(), nullable=False, comment='characters in the middle that were not kept'),
    sa.ForeignKeyConstraint(['machine'], ['machines.id'], name=op.f('fk_machine_outputs_machine_machines'), ondelete='CASCADE'),
    sa.PrimaryKeyConstraint('machine', 'kind', name=op.f('pk_machine_outputs'))
    )
    op.create_index('ix_machine_outputs_at', 'machine_outputs', ['at'], unique=False)
    op.create_table('machine_reports',
    sa.Column('machine', sa.Text(), nullable=False),
    sa.Column('boot', sa.Text(), nullable=False, comment='the boot that joined; no other may'),
    sa.Column('number', sa.BigInteger(), nullable=False, comment='counts the reports of its agent'),
    sa.Column('serial', sa.BigInteger(), nullable=False, comment='counts the changes of this table'),
    sa.Column('joined_at', sa.Double(), nullable=False),
    sa.Column('heard_at', sa.Double(), nullable=False),
    sa.Column('report', sa.Text(), nullable=False),
    sa.ForeignKeyConstraint(['machine'], ['machines.id'], name=op.f('fk_machine_reports_machine_machines'), ondelete='CASCADE'),
    sa.PrimaryKeyConstraint('machine', name=op.f('pk_machine_reports'))
    )
    op.create_index('ix_machine_reports_serial', 'machine_reports', ['serial'], unique=False)
    op.create_table('machine_requests',
    sa.Column('machine', sa.Text(), nullable=False),
    sa.Column('request', sa.Text(), nullable=False, comment='what the provider is asked for; it never changes'),
    sa.ForeignKeyConstraint(['machine'], ['machines.id'], name=op.f('fk_machine_requests_machine_machines'), ondelete='CASCADE'),
    sa.PrimaryKeyConstraint('machine', name=op.f('pk_machine_requests'))
    )


def downgrade() -> None:
    op.execute("DELETE FROM serials WHERE name = 'machine_reports'")
    for table in ('machine_requests', 'machine_reports', 'machine_outputs', 'machines', 'machine_events', 'launch_backoffs', 'spend_months', 'unknown_instances', 'deployments'):
        op.drop_table(table)
