"""Remember the keys of submissions, so that a request that is repeated submits nothing a second time.

Revision ID: 0008
Revises: 0007
"""

import sqlalchemy as sa
from alembic import op

revision = '0008'
down_revision = '0007'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table('submission_keys',
    sa.Column('key', sa.Text(), nullable=False, comment='the header Idempotency-Key'),
    sa.Column('sender', sa.Text(), nullable=False),
    sa.Column('number', sa.Integer(), autoincrement=False, nullable=False, comment='counts the copies of one request'),
    sa.Column('digest', sa.Text(), nullable=False, comment='SHA-256 of what was requested'),
    sa.Column('workload', sa.Text(), nullable=False, comment='what was submitted; it may be removed by now'),
    sa.Column('at', sa.Double(), nullable=False),
    sa.PrimaryKeyConstraint('key', 'sender', 'number', name=op.f('pk_submission_keys'))
    )
    op.create_index('ix_submission_keys_at', 'submission_keys', ['at'], unique=False)


def downgrade() -> None:
    op.drop_index('ix_submission_keys_at', 'submission_keys')
    op.drop_table('submission_keys')
