"""Remember who the Hub's users are, by an identity that a rename keeps and a new user of the same name does not have.

Revision ID: 0016
Revises: 0015
"""

import sqlalchemy as sa
from alembic import op

revision = '0016'
down_revision = '0015'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table('people',
    sa.Column('name', sa.Text(), nullable=False, comment='a user of the Hub, or NAME/deleted-N'),
    sa.Column('identity', sa.Text(), nullable=False, comment='stays when the user is renamed'),
    sa.Column('groups', sa.Text(), nullable=False),
    sa.Column('present', sa.Boolean(), nullable=False),
    sa.PrimaryKeyConstraint('name', name=op.f('pk_people'))
    )


def downgrade() -> None:
    op.drop_table('people')
