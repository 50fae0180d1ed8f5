"""One word per idea: a pending workload's GPUs are nominated, and a victim is evicted for a preemptor.

Revision ID: 0004
Revises: 0003
"""

from alembic import op

revision = '0004'
down_revision = '0003'
branch_labels = None
depends_on = None

RENAMED = {"claim": "nomination", "promised_to": "evicted_for"}


def upgrade() -> None:
    for old, new in RENAMED.items():
        op.alter_column('workloads', old, new_column_name=new)


def downgrade() -> None:
    for old, new in RENAMED.items():
        op.alter_column('workloads', new, new_column_name=old)
