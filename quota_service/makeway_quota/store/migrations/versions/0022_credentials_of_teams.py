"""Key credentials by team and name: each team has names of its own, beside those of all teams.

Revision ID: 0022
Revises: 0021
"""

from alembic import op

revision = '0022'
down_revision = '0021'
branch_labels = None
depends_on = None


def upgrade() -> None:
    _rekey('team', 'name')


def downgrade() -> None:
    _rekey('name')


def _rekey(*columns: str) -> None:
    with op.batch_alter_table('sealed_secrets') as table:
        table.drop_constraint(op.f('pk_sealed_secrets'), type_='primary')
        table.create_primary_key(op.f('pk_sealed_secrets'), list(columns))
