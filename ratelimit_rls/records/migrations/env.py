"""What alembic runs: it is given a connection with a transaction, and never connects itself."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"])
with context.begin_transaction():
    context.run_migrations()
