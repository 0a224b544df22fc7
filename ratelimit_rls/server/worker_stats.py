"""Statistics of all workers: a request for /stats, /hot or metrics to any worker returns the merged values of all.

Each worker serves its own statistics on a Unix socket in a shared directory. The worker that receives a request queries
the others with one line that names the kind of statistics. A worker that does not respond in time is left out.

Counters must never decrease when a worker ends: rates would treat the remaining value as new. Each worker therefore
saves the counters it has reported to a file beside its socket, which is used when the worker no longer responds.
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

from ratelimit_rls.telemetry.collector import (
    ExternalValues,
    MetricsSnapshot,
    merge_snapshots,
    read_external,
    snapshot,
    snapshot_without_gauges,
)
from ratelimit_rls.telemetry.hot_keys import HotKey, HotKeys, HotReport
from ratelimit_rls.telemetry.hot_keys import merge_reports as reports_together
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.telemetry.series import from_json, to_json

RESPONSE_TIMEOUT_S = 1.0
MAX_RESPONSE_BYTES = 64 * 2**20

HOT = b"hot\n"
METRICS = b"metrics\n"

_log = structlog.get_logger()


class WorkerStats:
    def __init__(self, metrics: Metrics, hot_keys: HotKeys, directory: Path | None = None) -> None:
        """Without a directory this process is the only one."""
        self._metrics = metrics
        self._hot_keys = hot_keys
        self._directory = directory
        # Process ids are reused, and saved counters must not be overwritten.
        self._own_socket = directory / f"{os.getpid()}-{time_ns()}.stats" if directory is not None else None
        self._collect_lock = asyncio.Lock()
        self._save_failed = False
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        if self._own_socket is not None:
            self._server = await asyncio.start_unix_server(self._serve_client, self._own_socket)

    async def close(self) -> None:
        if self._server is not None and self._own_socket is not None:
            self._server.close()
            self._own_socket.unlink(missing_ok=True)
            await self.collect_own()  # saves the final counters for the other workers

    async def stats(self) -> Iterable[tuple[str, int]]:
        """Return every counter by name, sorted."""
        return (await self.collect_all()).names.items()

    async def hot(self) -> HotReport:
        others = [_report(json.loads(response)) for response in (await self._query_others(HOT)).values()]
        return reports_together([self._hot_keys.report(), *others])

    async def collect_all(self) -> MetricsSnapshot:
        """Collect the metrics of all workers, including those that ended."""
        own = await self.collect_own()
        if self._directory is None:
            return own
        return await asyncio.to_thread(self._merge, own, await self._query_others(METRICS))

    async def collect_own(self) -> MetricsSnapshot:
        """Collect the metrics of this worker, in a thread.

        With thousands of paths it takes 0.1 s, and calls must not wait.
        """
        kept = read_external(self._metrics)
        async with self._collect_lock:
            return await asyncio.to_thread(self._collect, kept)

    def _collect(self, kept: ExternalValues) -> MetricsSnapshot:
        collected = snapshot(self._metrics, kept)
        if self._own_socket is not None:
            self._save(self._own_socket, _to_json(snapshot_without_gauges(collected)))
        return collected

    def _save(self, own: Path, text: str) -> None:
        try:
            temporary = own.with_suffix(".writing")
            temporary.write_text(text)
            temporary.replace(own.with_suffix(".left"))
            self._save_failed = False
        except OSError as error:
            if not self._save_failed:
                _log.warning("worker_stats_write_failed", error=str(error))
            self._save_failed = True

    def _merge(self, own: MetricsSnapshot, others: Mapping[Path, bytes]) -> MetricsSnapshot:
        assert self._directory is not None
        assert self._own_socket is not None
        ended = [
            path
            for path in self._directory.glob("*.left")
            if path.stem != self._own_socket.stem and path.with_suffix(".stats") not in others
        ]
        return merge_snapshots(
            [own, *map(_from_json, others.values()), *(_from_json(path.read_bytes()) for path in ended)]
        )

    async def _query_others(self, query: bytes) -> dict[Path, bytes]:
        """Return the responses of the other workers by socket path; those that failed are left out."""
        if self._directory is None:
            return {}
        others = [path for path in self._directory.glob("*.stats") if path != self._own_socket]
        responses = await asyncio.gather(*(_query(path, query) for path in others))
        return {path: response for path, response in zip(others, responses, strict=True) if response is not None}

    async def _respond_to(self, query: bytes) -> str:
        if query == HOT:
            return json.dumps(self._hot_keys.report())
        return await asyncio.to_thread(_to_json, await self.collect_own())

    async def _serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(RESPONSE_TIMEOUT_S):
                query = await reader.readline()
                writer.write((await self._respond_to(query)).encode())
                await writer.drain()
        except (OSError, TimeoutError):  # the client disconnected or sent nothing
            pass
        writer.close()


def _to_json(metrics: MetricsSnapshot) -> str:
    return json.dumps([metrics.names, to_json(metrics.series)])


def _from_json(text: bytes) -> MetricsSnapshot:
    names, rows = json.loads(text)
    return MetricsSnapshot(names, from_json(rows))


def _report(fields: list[Any]) -> HotReport:
    """Restore a report from JSON, which turned its tuples into lists."""
    seconds, calls_per_second, keys = fields
    return HotReport(seconds, calls_per_second, tuple(HotKey(*row) for row in keys))


async def _query(path: Path, query: bytes) -> bytes | None:
    """Return the response of a worker, or None if it ended or did not respond in time."""
    try:
        async with asyncio.timeout(RESPONSE_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(path, limit=MAX_RESPONSE_BYTES)
            try:
                writer.write(query)
                response = await reader.read()
                return response if response.endswith(b"]") else None  # truncated if the worker ended while sending
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return None
