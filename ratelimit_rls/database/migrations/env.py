"""The script that alembic runs. It uses the connection and transaction that it is given, and never connects itself."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"])
with context.begin_transaction():
    context.run_migrations()
