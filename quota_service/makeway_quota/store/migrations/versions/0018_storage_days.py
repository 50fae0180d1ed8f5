"""Remember what was kept each day, and contents outside the database whose last row was removed.

Revision ID: 0018
Revises: 0017
"""

import sqlalchemy as sa
from alembic import op

revision = '0018'
down_revision = '0017'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table('storage_days',
    sa.Column('day', sa.Integer(), autoincrement=False, nullable=False, comment='days since 1970 (UTC)'),
    sa.Column('scope', sa.Text(), nullable=False, comment='all, team, person; disk: what may still be written'),
    sa.Column('name', sa.Text(), nullable=False),
    sa.Column('bytes', sa.BigInteger(), nullable=False, comment='what was kept at the last pass of that day'),
    sa.PrimaryKeyConstraint('day', 'scope', 'name', name=op.f('pk_storage_days'))
    )
    op.create_table('dropped',
    sa.Column('digest', sa.Text(), nullable=False, comment='a content outside whose last row was removed'),
    sa.Column('at', sa.Double(), nullable=False),
    sa.PrimaryKeyConstraint('digest', name=op.f('pk_dropped'))
    )


def downgrade() -> None:
    op.drop_table('dropped')
    op.drop_table('storage_days')
