"""Periodic database maintenance: create partitions in advance, roll up usage, archive old decisions and usage.

Every process tries each job, and a lock in the database lets one of them run it, so that the work is done as long as
any process lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from ratelimit_rls.database.database import Database
from ratelimit_rls.errors import DatabaseUnavailable, RateLimitRlsError
from ratelimit_rls.settings import Settings

_log = structlog.get_logger()

PARTITIONS_EVERY_S = 3600.0
ROLLUP_EVERY_S = 60.0
WRITE_PROBE_EVERY_S = 10.0
RETAIN_EVERY_S = 6 * 3600.0
RETRY_AFTER_S = 30.0


class Maintenance:
    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        for name, job, every_s in (
            ("partitions", self._partitions, PARTITIONS_EVERY_S),
            ("rollup", self._rollup, ROLLUP_EVERY_S),
            ("retention", self._retain, RETAIN_EVERY_S),
            ("write_probe", self._probe_writes, WRITE_PROBE_EVERY_S),
        ):
            self._tasks.append(asyncio.create_task(_run_every(name, job, every_s), name=f"maintenance-{name}"))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _partitions(self) -> None:
        from ratelimit_rls.database.usage.partitions import create_partitions

        await create_partitions(self._database, time.time())

    async def _rollup(self) -> None:
        from ratelimit_rls.database.usage.rollup import roll_up

        await roll_up(self._database, time.time())

    async def _probe_writes(self) -> None:
        """Probe writes if nothing was written recently, so that failures show before an administrator meets them."""
        from ratelimit_rls.database.write_probe import probe_write

        if self._database.write_health.idle_s >= WRITE_PROBE_EVERY_S:
            with contextlib.suppress(DatabaseUnavailable):  # already logged by `writes`
                await probe_write(self._database)

    async def _retain(self) -> None:
        if not self._settings.rls_archive:
            return
        from ratelimit_rls.database.usage.retention import retain

        await retain(self._database, self._settings, time.time())


async def _run_every(name: str, job: Callable[[], Awaitable[Any]], every_s: float) -> None:
    logged = False
    while True:
        try:
            await job()
            logged = False
            pause_s = every_s
        except Exception as error:  # any error: nothing else does this work, so retry
            if not logged:  # once: the follower also logs an unavailable database
                is_known = isinstance(error, RateLimitRlsError)
                _log.warning("maintenance_deferred", job=name, error=str(error), exc_info=not is_known)
            logged, pause_s = True, min(every_s, RETRY_AFTER_S)
        await asyncio.sleep(pause_s)
