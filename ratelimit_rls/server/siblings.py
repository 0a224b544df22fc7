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
from collections.abc import Iterable, Mapping
from pathlib import Path
from time import time_ns
from typing import Any

import structlog

from ratelimit_rls.telemetry.collect import Kept, Told, kept_by_others, lasting_of, tell, told_together
from ratelimit_rls.telemetry.collected import from_json, to_json
from ratelimit_rls.telemetry.hot_keys import HotKey, HotKeys, HotReport
from ratelimit_rls.telemetry.hot_keys import together as reports_together
from ratelimit_rls.telemetry.metrics import Metrics

ANSWER_S = 1.0
MOST_BYTES = 64 * 2**20

HOT = b"hot\n"
METRICS = b"metrics\n"

log = structlog.get_logger()


class Siblings:
    def __init__(self, metrics: Metrics, hot_keys: HotKeys, directory: Path | None = None) -> None:
        """Without a directory this process is alone, and tells of itself."""
        self._metrics = metrics
        self._hot_keys = hot_keys
        self._directory = directory
        # A pid comes again, and what was left in writing must not be written over.
        self._own = directory / f"{os.getpid()}-{time_ns()}.stats" if directory is not None else None
        self._turn = asyncio.Lock()
        self._has_failed = False
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        if self._own is not None:
            self._server = await asyncio.start_unix_server(self._tell, self._own)

    async def close(self) -> None:
        if self._server is not None and self._own is not None:
            self._server.close()
            self._own.unlink(missing_ok=True)
            await self.told_here()  # left in writing for those who go on

    async def stats(self) -> Iterable[tuple[str, int]]:
        """Every counter by name, sorted."""
        return (await self.told()).names.items()

    async def hot(self) -> HotReport:
        others = [_report(json.loads(told)) for told in (await self._told_by_others(HOT)).values()]
        return reports_together([self._hot_keys.report(), *others])

    async def told(self) -> Told:
        """By all workers, those that ended included."""
        own = await self.told_here()
        if self._directory is None:
            return own
        return await asyncio.to_thread(self._put_together, own, await self._told_by_others(METRICS))

    async def told_here(self) -> Told:
        """In a thread, like all that takes a tenth of a second with thousands of paths: calls must not wait for it."""
        kept = kept_by_others(self._metrics)
        async with self._turn:
            return await asyncio.to_thread(self._tell_here, kept)

    def _tell_here(self, kept: Kept) -> Told:
        told = tell(self._metrics, kept)
        if self._own is not None:
            self._leave_in_writing(self._own, _to_json(lasting_of(told)))
        return told

    def _leave_in_writing(self, own: Path, text: str) -> None:
        try:
            written = own.with_suffix(".writing")
            written.write_text(text)
            written.replace(own.with_suffix(".left"))
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                log.warning("metrics of this worker would be lost with it", error=str(error))
            self._has_failed = True

    def _put_together(self, own: Told, others: Mapping[Path, bytes]) -> Told:
        assert self._directory is not None
        assert self._own is not None
        absent = [
            path
            for path in self._directory.glob("*.left")
            if path.stem != self._own.stem and path.with_suffix(".stats") not in others
        ]
        return told_together(
            [own, *map(_from_json, others.values()), *(_from_json(path.read_bytes()) for path in absent)]
        )

    async def _told_by_others(self, question: bytes) -> dict[Path, bytes]:
        """What each of the others says that can say it, by its socket."""
        if self._directory is None:
            return {}
        others = [path for path in self._directory.glob("*.stats") if path != self._own]
        answers = await asyncio.gather(*(_ask(path, question) for path in others))
        return {path: answer for path, answer in zip(others, answers, strict=True) if answer is not None}

    async def _answer_to(self, question: bytes) -> str:
        if question == HOT:
            return json.dumps(self._hot_keys.report())
        return await asyncio.to_thread(_to_json, await self.told_here())

    async def _tell(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                question = await reader.readline()
                writer.write((await self._answer_to(question)).encode())
                await writer.drain()
        except (OSError, TimeoutError):  # whoever asked is gone, or wants nothing
            pass
        writer.close()


def _to_json(told: Told) -> str:
    return json.dumps([told.names, to_json(told.series)])


def _from_json(text: bytes) -> Told:
    names, rows = json.loads(text)
    return Told(names, from_json(rows))


def _report(told: list[Any]) -> HotReport:
    """As it was before it was JSON, in which a tuple is a list."""
    seconds, calls_per_second, keys = told
    return HotReport(seconds, calls_per_second, tuple(HotKey(*row) for row in keys))


async def _ask(path: Path, question: bytes) -> bytes | None:
    """None, if there is nobody any more, or somebody too busy to say."""
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_unix_connection(path, limit=MOST_BYTES)
            try:
                writer.write(question)
                answer = await reader.read()
                return answer if answer.endswith(b"]") else None  # half of one, when it ended while it spoke
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return None
