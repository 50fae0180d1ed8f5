"""Count the bytes of each workload's command, environment and source.

Revision ID: 0014
Revises: 0013
"""

import sqlalchemy as sa
from alembic import op

revision = '0014'
down_revision = '0013'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        'workloads',
        sa.Column(
            'weight',
            sa.BigInteger(),
            server_default=sa.text('0'),
            nullable=False,
            comment='bytes of command, env and source',
        ),
    )
    size = 'octet_length({})' if op.get_bind().dialect.name == 'postgresql' else 'length(CAST({} AS BLOB))'
    command, env, source = (size.format(column) for column in ('command', 'env', 'source'))
    op.execute(
        f'UPDATE workloads SET weight = {command} + {env} '
        f'+ COALESCE((SELECT {source} FROM sources WHERE sources.workload = workloads.id), 0)'
    )


def downgrade() -> None:
    op.drop_column('workloads', 'weight')
