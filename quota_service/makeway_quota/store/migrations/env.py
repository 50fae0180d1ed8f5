"""Run the migrations for alembic, on the connection that `migrate.py` opened."""

from alembic import context

from makeway_quota.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
