"""What all workers know, put together: whoever asks one of them for /stats, /hot or metrics is told of all.

Each worker tells its own on a Unix socket in a directory they share; whichever is asked asks the others, with one line
that says what for. A worker that does not answer at once is left out rather than waited for.

Metrics must never go back when a worker ends: whoever computes rates would take the rest for new. So what a worker has
told of them it has left in writing beside its socket, and where it does not answer any more, that counts.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable
from pathlib import Path
from time import time_ns
from typing import Any

from ratelimit_rls.telemetry.collect import collect, kept_by_others
from ratelimit_rls.telemetry.collected import Collected, from_json, lasting, to_json, together
from ratelimit_rls.telemetry.hot_keys import HOTTEST, OVER_THRESHOLD, HotKey, HotKeys, HotReport
from ratelimit_rls.telemetry.hot_keys import together as reports_together
from ratelimit_rls.telemetry.metrics import Metrics

ANSWER_S = 1.0
MOST_BYTES = 64 * 2**20

STATS = b"stats\n"
HOT = b"hot\n"
METRICS = b"metrics\n"

_OF_ONE_PROCESS = frozenset({HOTTEST, OVER_THRESHOLD})
"""Not to be added up: of several processes the most that one of them says. All may be speaking of the same counter."""


class Siblings:
    def __init__(self, metrics: Metrics, hot_keys: HotKeys, directory: Path | None = None) -> None:
        """Without a directory this process is alone, and tells of itself."""
        self._metrics = metrics
        self._hot_keys = hot_keys
        self._directory = directory
        # A pid comes again, and what was left in writing must not be written over.
        self._own = directory / f"{os.getpid()}-{time_ns()}.stats" if directory is not None else None
        self._turn = asyncio.Lock()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        if self._own is not None:
            self._server = await asyncio.start_unix_server(self._tell, self._own)

    async def close(self) -> None:
        if self._server is not None and self._own is not None:
            self._server.close()
            self._own.unlink(missing_ok=True)
            await self.own_metrics()  # left in writing for those who go on

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
        return reports_together([self._hot_keys.report(), *others])

    async def metrics(self) -> Collected:
        """Of all workers, those that ended included."""
        own = await self.own_metrics()
        if self._directory is None or self._own is None:
            return own
        told = await self._told(METRICS)
        absent = [
            path
            for path in self._directory.glob("*.left")
            if path != self._own.with_suffix(".left") and path.with_suffix(".stats") not in told
        ]
        return together([own, *map(from_json, told.values()), *map(_left, absent)])

    async def own_metrics(self) -> Collected:
        """In a thread: with thousands of paths it takes a tenth of a second, and calls must not wait for it."""
        kept = kept_by_others(self._metrics)
        async with self._turn:
            return await asyncio.to_thread(self._collect, kept)

    def _collect(self, kept: Collected) -> Collected:
        collected = collect(self._metrics, kept)
        if self._own is not None:
            written = self._own.with_suffix(".writing")
            written.write_text(json.dumps(to_json(lasting(collected))))
            written.replace(self._own.with_suffix(".left"))
        return collected

    async def _others(self, question: bytes) -> list[Any]:
        return list((await self._told(question)).values())

    async def _told(self, question: bytes) -> dict[Path, Any]:
        """What each of the others says that can say it, by its socket."""
        if self._directory is None:
            return {}
        others = [path for path in self._directory.glob("*.stats") if path != self._own]
        answers = await asyncio.gather(*(_ask(path, question) for path in others))
        return {path: answer for path, answer in zip(others, answers, strict=True) if answer is not None}

    async def _answer_to(self, question: bytes) -> Any:
        if question == HOT:
            return self._hot_keys.report()
        if question == METRICS:
            return to_json(await self.own_metrics())
        return dict(self._metrics.names())

    async def _tell(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                question = await reader.readline()
                writer.write(json.dumps(await self._answer_to(question)).encode())
                await writer.drain()
        except (OSError, TimeoutError):  # whoever asked is gone, or wants nothing
            pass
        writer.close()


def _left(path: Path) -> Collected:
    """What a worker that does not answer had told last."""
    return from_json(json.loads(path.read_text()))


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
