"""The counters of all workers, added up: whoever asks one of them for /stats is told of all.

Each worker tells its own on a Unix socket in a directory they share; whichever is asked asks the others. A worker that
does not answer at once is left out rather than waited for.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from ratelimit_rls.telemetry.metrics import Metrics

ANSWER_S = 1.0
MOST_BYTES = 64 * 2**20


class Siblings:
    def __init__(self, metrics: Metrics, directory: Path | None = None) -> None:
        """Without a directory this process is alone, and tells of itself."""
        self._metrics = metrics
        self._directory = directory
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        if self._directory is not None:
            self._server = await asyncio.start_unix_server(self._tell, self._own_path(self._directory))

    async def close(self) -> None:
        if self._server is not None and self._directory is not None:
            self._server.close()
            self._own_path(self._directory).unlink(missing_ok=True)

    async def stats(self) -> Iterable[tuple[str, int]]:
        """Every counter by name, sorted."""
        totals = Counter(dict(self._metrics.names()))
        if self._directory is not None:
            own = self._own_path(self._directory)
            others = [path for path in self._directory.glob("*.stats") if path != own]
            for told in await asyncio.gather(*map(_ask, others)):
                totals.update(told)
        return sorted(totals.items())

    async def _tell(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps(dict(self._metrics.names())).encode())
        writer.close()
        await writer.wait_closed()

    @staticmethod
    def _own_path(directory: Path) -> Path:
        return directory / f"{os.getpid()}.stats"


async def _ask(path: Path) -> dict[str, int]:
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_unix_connection(path, limit=MOST_BYTES)
            told = await reader.read()
            writer.close()
    except (OSError, TimeoutError):  # it has ended, or is too busy to say
        return {}
    counters: dict[str, int] = json.loads(told)
    return counters
