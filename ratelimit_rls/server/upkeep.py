"""What a database needs done every now and then: partitions made ahead, usage rolled up, old records archived.

Every process tries, and the database lets one do it: whichever lives does the work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from ratelimit_rls.errors import RateLimitRlsError
from ratelimit_rls.records.database import Database
from ratelimit_rls.settings import Settings

log = structlog.get_logger()

PARTITIONS_EVERY_S = 3600.0
ROLLUP_EVERY_S = 60.0
RETAIN_EVERY_S = 6 * 3600.0
AGAIN_AFTER_S = 30.0


class Upkeep:
    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        for name, job, every_s in (
            ("partitions", self._partitions, PARTITIONS_EVERY_S),
            ("rollup", self._rollup, ROLLUP_EVERY_S),
            ("retention", self._retain, RETAIN_EVERY_S),
        ):
            self._tasks.append(asyncio.create_task(_every(name, job, every_s), name=f"upkeep-{name}"))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _partitions(self) -> None:
        from ratelimit_rls.records.partitions import make_partitions

        await make_partitions(self._database, time.time())

    async def _rollup(self) -> None:
        from ratelimit_rls.records.rollup import roll_up

        await roll_up(self._database, time.time())

    async def _retain(self) -> None:
        if not self._settings.rls_archive:
            return
        from ratelimit_rls.records.retention import retain

        await retain(self._database, self._settings, time.time())


async def _every(name: str, job: Callable[[], Awaitable[Any]], every_s: float) -> None:
    told = False
    while True:
        try:
            await job()
            told = False
            pause_s = every_s
        except Exception as error:  # whatever it is, the next time may be better: nothing else does this work
            if not told:  # once: the follower tells of a database that is away, too
                is_known = isinstance(error, RateLimitRlsError)
                log.warning(f"{name} of the records must wait", error=str(error), exc_info=not is_known)
            told, pause_s = True, min(every_s, AGAIN_AFTER_S)
        await asyncio.sleep(pause_s)
