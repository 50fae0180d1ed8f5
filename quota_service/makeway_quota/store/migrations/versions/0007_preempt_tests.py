"""Call the test of a preemption by one name: "rehearsal" becomes "preempt_test".

Revision ID: 0007
Revises: 0006
"""

from alembic import op

revision = '0007'
down_revision = '0006'
branch_labels = None
depends_on = None


def upgrade() -> None:
    _rename('rehearsal', 'preempt_test')


def downgrade() -> None:
    _rename('preempt_test', 'rehearsal')


def _rename(old: str, new: str) -> None:
    # A quote inside the notice's sentence is escaped, so only the key itself matches.
    op.execute(
        f"""UPDATE workloads SET notice = replace(notice, '"kind":"{old}"', '"kind":"{new}"')
        WHERE notice LIKE '%"kind":"{old}"%'"""
    )
    op.execute(f"UPDATE workloads SET reason_code = '{new}' WHERE reason_code = '{old}'")
    op.execute(f"UPDATE decisions SET code = '{new}' WHERE code = '{old}'")
