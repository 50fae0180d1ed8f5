"""Keep since when a credential is disabled: its team left the policy.

Revision ID: 0023
Revises: 0022
"""

import sqlalchemy as sa
from alembic import op

revision = '0023'
down_revision = '0022'
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table('sealed_secrets') as table:
        table.add_column(sa.Column('disabled_at', sa.Double(), nullable=True, comment='when its team left the policy; null: enabled'))


def downgrade() -> None:
    op.execute('DELETE FROM sealed_secrets WHERE disabled_at IS NOT NULL')
    with op.batch_alter_table('sealed_secrets') as table:
        table.drop_column('disabled_at')
