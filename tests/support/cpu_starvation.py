"""Measures how long processes were runnable without a core: the delay that a busy machine adds to timings."""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left, bisect_right
from contextlib import suppress
from typing import Self

_EVERY_S = 0.002

_Waits = dict[str, int]
"""Nanoseconds that each thread of a process has waited so far, by its path in /proc."""


class CpuStarvation:
    """Samples the kernel's scheduling statistics of all threads of some processes while a block runs.

    The sampling thread and the main thread of this process are left out: no call waits for them.
    """

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self._watching = {os.getpid()}
        self._at_s: list[float] = []
        self._waits: list[list[_Waits]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def between_s(self, since_s: float, until_s: float) -> float:
        """Return the sum over processes of the longest wait of a thread between two monotonic times."""
        first = max(0, bisect_right(self._at_s, since_s) - 1)
        last = min(len(self._at_s) - 1, bisect_left(self._at_s, until_s))
        return sum(map(_longest_s, self._waits[first], self._waits[last]))

    def _sample(self) -> None:
        self._watching.add(threading.get_native_id())
        while not self._over.wait(_EVERY_S):
            self._note()

    def _note(self) -> None:
        self._waits.append([self._of(f"/proc/{pid}/task") for pid in self._pids])
        self._at_s.append(time.monotonic())

    def _of(self, tasks: str) -> _Waits:
        waits: _Waits = {}
        for thread in os.listdir(tasks):
            path = f"{tasks}/{thread}/schedstat"
            if int(thread) not in self._watching:
                with suppress(OSError), open(path) as stat:  # the thread may have ended
                    waits[path] = int(stat.read().split()[1])
        return waits

    def __enter__(self) -> Self:
        self._note()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._note()


def _longest_s(before: _Waits, after: _Waits) -> float:
    return max((waited_ns - before[path] for path, waited_ns in after.items() if path in before), default=0) / 1e9
