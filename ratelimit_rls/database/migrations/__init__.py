"""Schema migrations: one file per revision in versions/, named after it, run by alembic from the installed package.

Importing alembic takes half a second, so the check whether there is anything to do works without it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlalchemy import Connection

_HERE = Path(__file__).parent


@cache
def revisions() -> tuple[str, ...]:
    """Return all revisions that this version knows, oldest first: 0001, 0002, …, from the file names."""
    return tuple(sorted(file.name.partition("_")[0] for file in (_HERE / "versions").glob("[0-9]*.py")))


def latest_revision() -> str:
    return revisions()[-1]


def upgrade(connection: Connection, to: str = "head") -> None:
    """Upgrade the schema in the open transaction of the connection, so that all of it is applied or nothing."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_HERE).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, to)
