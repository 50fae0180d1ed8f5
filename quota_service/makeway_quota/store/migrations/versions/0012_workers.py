"""Keep what workers report and send that are no processes of the service.

Revision ID: 0012
Revises: 0011
"""

import sqlalchemy as sa
from alembic import op

revision = '0012'
down_revision = '0011'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table('worker_reports',
    sa.Column('workload', sa.Text(), nullable=False),
    sa.Column('attempt', sa.Integer(), autoincrement=False, nullable=False),
    sa.Column('worker', sa.Integer(), autoincrement=False, nullable=False),
    sa.Column('instance', sa.Text(), nullable=False, comment='the launcher that claimed this worker'),
    sa.Column('serial', sa.BigInteger(), nullable=False, comment='counts the changes of this table'),
    sa.Column('heard_at', sa.Double(), nullable=False),
    sa.Column('report', sa.Text(), nullable=False),
    sa.ForeignKeyConstraint(['workload'], ['workloads.id'], name=op.f('fk_worker_reports_workload_workloads'), ondelete='CASCADE'),
    sa.PrimaryKeyConstraint('workload', 'attempt', 'worker', name=op.f('pk_worker_reports'))
    )
    op.create_index('ix_worker_reports_serial', 'worker_reports', ['serial'], unique=False)
    op.create_table('serials',
    sa.Column('name', sa.Text(), nullable=False, comment='a table whose changes are counted'),
    sa.Column('value', sa.BigInteger(), nullable=False),
    sa.PrimaryKeyConstraint('name', name=op.f('pk_serials'))
    )
    op.create_table('outputs',
    sa.Column('workload', sa.Text(), nullable=False),
    sa.Column('attempt', sa.Integer(), autoincrement=False, nullable=False),
    sa.Column('kind', sa.Text(), nullable=False, comment='log, result, error, or dropped: how far a log was known'),
    sa.Column('worker', sa.Integer(), autoincrement=False, nullable=False),
    sa.Column('start', sa.BigInteger(), autoincrement=False, nullable=False, comment='offset in what this worker sent'),
    sa.Column('place', sa.BigInteger(), nullable=False, comment='offset in what all workers sent, as it arrived'),
    sa.Column('size', sa.Integer(), nullable=False),
    sa.Column('data', sa.LargeBinary(), nullable=False),
    sa.Column('blob', sa.Text(), nullable=True, comment='`data` is empty: the content is a blob'),
    sa.ForeignKeyConstraint(['blob'], ['blobs.digest'], name=op.f('fk_outputs_blob_blobs')),
    sa.ForeignKeyConstraint(['workload'], ['workloads.id'], name=op.f('fk_outputs_workload_workloads'), ondelete='CASCADE'),
    sa.PrimaryKeyConstraint('workload', 'attempt', 'kind', 'worker', 'start', name=op.f('pk_outputs'))
    )
    op.create_index(op.f('ix_outputs_blob'), 'outputs', ['blob'], unique=False)
    op.create_index('ix_outputs_place', 'outputs', ['workload', 'attempt', 'kind', 'place'], unique=False)


def downgrade() -> None:
    op.drop_index('ix_outputs_place', 'outputs')
    op.drop_index(op.f('ix_outputs_blob'), 'outputs')
    op.drop_table('outputs')
    op.drop_table('serials')
    op.drop_index('ix_worker_reports_serial', 'worker_reports')
    op.drop_table('worker_reports')
