"""Add a random name of the installation, so that its bucket can be told from those of others.

Revision ID: 0013
Revises: 0012
"""

import sqlalchemy as sa
from alembic import op

revision = '0013'
down_revision = '0012'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table('installation',
    sa.Column('id', sa.Integer(), autoincrement=False, nullable=False, comment='always 1'),
    sa.Column('name', sa.Text(), nullable=False, comment='random'),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_installation'))
    )


def downgrade() -> None:
    op.drop_table('installation')
