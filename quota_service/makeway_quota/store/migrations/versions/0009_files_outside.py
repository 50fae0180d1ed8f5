"""Mark the file contents that are kept in a folder beside the database.

Revision ID: 0009
Revises: 0008
"""

import sqlalchemy as sa
from alembic import op

revision = '0009'
down_revision = '0008'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('blobs', sa.Column('outside', sa.Boolean(), server_default=sa.false(), nullable=False,
                                     comment='`data` is empty: the content is in the folder of artifacts'))


def downgrade() -> None:
    op.drop_column('blobs', 'outside')
