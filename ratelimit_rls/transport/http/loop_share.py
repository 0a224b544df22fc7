"""Limits the share of the event loop that HTTP requests use, by the number of reads in one iteration.

Without it, each of N flooding connections would have a request answered before a gRPC call is read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

MAX_READS_PER_ITERATION = 8
"""Reads on all HTTP ports of a process. A small request takes about 0.2 ms in total."""

BYTES_PER_READ = 8192
"""A larger request counts as several reads, because its body may have to be parsed."""


class Resumable(Protocol):
    """A connection whose reading was deferred."""

    def continue_reading(self) -> int:
        """Continue reading, and return how many reads that counts as."""
        ...


class LoopShare:
    """Budget of reads per event loop iteration, and the queue of connections that exceed it."""

    def __init__(self, max_reads: int = MAX_READS_PER_ITERATION) -> None:
        self._max_reads = max_reads
        self._left = max_reads
        self._queue: deque[Resumable] = deque()
        self._is_scheduled = False

    def take(self, reads: int) -> bool:
        """Return whether a connection may read now. Otherwise, or if others wait already, it must call `wait`."""
        if self._queue or self._left <= 0:
            return False
        self._left -= reads
        self._schedule()
        return True

    def wait(self, waiting: Resumable) -> None:
        """Resume a connection in a later iteration, after those that wait already."""
        self._queue.append(waiting)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._is_scheduled = False
        self._left = self._max_reads
        while self._queue and self._left > 0:
            self._left -= self._queue.popleft().continue_reading()
        if self._queue or self._left < self._max_reads:
            self._schedule()
