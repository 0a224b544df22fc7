"""A probe that checks whether a database accepts writes when nothing has been written for a while."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratelimit_rls.database.bulk_upsert import insert
from ratelimit_rls.database.usage.tables import rollups_due

if TYPE_CHECKING:
    from ratelimit_rls.database.database import Database


async def probe_write(database: Database) -> None:
    """Write a row and roll it back; `database.write_health` has the outcome. Raises DatabaseUnavailable if it fails."""
    row = {"granularity": "probe", "timestamp": 0.0, "version": 0}
    async with database.begin(background=True) as connection:
        await connection.execute(insert(database.dialect, rollups_due).on_conflict_do_nothing(), [row])
        await connection.rollback()
