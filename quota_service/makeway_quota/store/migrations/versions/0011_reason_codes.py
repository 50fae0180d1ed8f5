"""Divide the reason code `held`: static quotas and nominations have codes of their own.

Revision ID: 0011
Revises: 0010
"""

import sqlalchemy as sa
from alembic import op

revision = '0011'
down_revision = '0010'
branch_labels = None
depends_on = None

WORKLOADS = sa.table('workloads', sa.column('reason_code', sa.Text()), sa.column('reason_numbers', sa.Text()))
NUMBER_OF = {'static_quota': 'kept', 'nominated': 'idle'}
"""Code to the number that only its reasons have."""


def upgrade() -> None:
    for code, number in NUMBER_OF.items():
        held = (WORKLOADS.c.reason_code == 'held') & WORKLOADS.c.reason_numbers.contains(f'"{number}":', autoescape=True)
        op.execute(WORKLOADS.update().where(held).values(reason_code=code))


def downgrade() -> None:
    op.execute(WORKLOADS.update().where(WORKLOADS.c.reason_code.in_([*NUMBER_OF])).values(reason_code='held'))
