"""What all workers know, put together: whoever asks one of them for /stats or /hot is told of all.

Each worker tells its own on a Unix socket in a directory they share; whichever is asked asks the others, with one line
that says what for. A worker that does not answer at once is left out rather than waited for.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ratelimit_rls.telemetry.hot_keys import HOTTEST, OVER_THRESHOLD, HotKey, HotKeys, HotReport, together
from ratelimit_rls.telemetry.metrics import Metrics

ANSWER_S = 1.0
MOST_BYTES = 64 * 2**20

STATS = b"stats\n"
HOT = b"hot\n"

_OF_ONE_PROCESS = frozenset({HOTTEST, OVER_THRESHOLD})
"""Not to be added up: of several processes the most that one of them says. All may be speaking of the same counter."""


class Siblings:
    def __init__(self, metrics: Metrics, hot_keys: HotKeys, directory: Path | None = None) -> None:
        """Without a directory this process is alone, and tells of itself."""
        self._metrics = metrics
        self._hot_keys = hot_keys
        self._directory = directory
        self._own = directory / f"{os.getpid()}.stats" if directory is not None else None
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        if self._own is not None:
            self._server = await asyncio.start_unix_server(self._tell, self._own)

    async def close(self) -> None:
        if self._server is not None and self._own is not None:
            self._server.close()
            self._own.unlink(missing_ok=True)

    async def stats(self) -> Iterable[tuple[str, int]]:
        """Every counter by name, sorted."""
        totals = dict(self._metrics.names())
        for told in await self._others(STATS):
            for name, count in told.items():
                before = totals.get(name, 0)
                totals[name] = max(before, count) if name in _OF_ONE_PROCESS else before + count
        return sorted(totals.items())

    async def hot(self) -> HotReport:
        others = [_report(told) for told in await self._others(HOT)]
        return together([self._hot_keys.report(), *others])

    async def _others(self, question: bytes) -> list[Any]:
        """What each of them says that can say it."""
        if self._directory is None:
            return []
        others = [path for path in self._directory.glob("*.stats") if path != self._own]
        answers = await asyncio.gather(*(_ask(path, question) for path in others))
        return [answer for answer in answers if answer is not None]

    async def _tell(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                question = await reader.readline()
                told = self._hot_keys.report() if question == HOT else dict(self._metrics.names())
                writer.write(json.dumps(told).encode())
                await writer.drain()
        except (OSError, TimeoutError):  # whoever asked is gone, or wants nothing
            pass
        writer.close()


def _report(told: list[Any]) -> HotReport:
    """As it was before it was JSON, in which a tuple is a list."""
    seconds, calls_per_second, keys = told
    return HotReport(seconds, calls_per_second, tuple(HotKey(*row) for row in keys))


async def _ask(path: Path, question: bytes) -> Any:
    """None, if there is nobody any more, or somebody too busy to say."""
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_unix_connection(path, limit=MOST_BYTES)
            try:
                writer.write(question)
                return json.loads(await reader.read())
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError):  # half an answer, when it ended while it spoke
        return None
