"""The schema's history: one file per revision in versions/, named by it, run by alembic from the package as it lies.

alembic takes half a second to import, so whether there is anything to do is found out without it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlalchemy import Connection

_HERE = Path(__file__).parent


@cache
def known() -> tuple[str, ...]:
    """Every revision of this version, oldest first: 0001, 0002, …, as the files are called."""
    return tuple(sorted(file.name.partition("_")[0] for file in (_HERE / "versions").glob("[0-9]*.py")))


def newest() -> str:
    return known()[-1]


def upgrade(connection: Connection, to: str = "head") -> None:
    """Within the transaction that has begun on the connection, which keeps all of it or nothing."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_HERE).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, to)
