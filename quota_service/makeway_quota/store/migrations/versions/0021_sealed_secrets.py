"""Keep credentials, sealed with a key that is not in the database.

Revision ID: 0021
Revises: 0020
"""

import sqlalchemy as sa
from alembic import op

revision = '0021'
down_revision = '0020'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table('sealed_secrets',
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('kind', sa.Text(), nullable=False, comment='cloud, file, git'),
    sa.Column('team', sa.Text(), nullable=False, comment='empty: all teams'),
    sa.Column('sealed', sa.Text(), nullable=False, comment='a Fernet token of its values'),
    sa.Column('updated_at', sa.Double(), nullable=False),
    sa.Column('updated_by', sa.Text(), nullable=False),
    sa.PrimaryKeyConstraint('name', name=op.f('pk_sealed_secrets'))
    )


def downgrade() -> None:
    op.drop_table('sealed_secrets')
