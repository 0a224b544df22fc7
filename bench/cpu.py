"""CPU time from the kernel, of a process with all its threads and of a core; and memory.

The resolution is nanoseconds for processes and clock ticks (10 ms) for cores.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_IDLE, _IOWAIT = 3, 4  # fields of a core's line in /proc/stat
_PARENT = 1  # index of a field of /proc/<pid>/stat after the name, which may contain anything


def process_s(pid: int) -> float:
    """Return user and system time of a process, over all living threads: none ends under load."""
    total_ns = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            total_ns += int((thread / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and its descendants."""
    pages = [int(Path(f"/proc/{one}/statm").read_text().split()[1]) for one in family(pid)]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


def family(pid: int) -> list[int]:
    """Return the ids of a process and all its descendants."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                parents[int(entry.name)] = int(_stat(int(entry.name))[_PARENT])
    found = [pid]
    for member in found:
        found += [child for child, parent in parents.items() if parent == member]
    return found


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def core_busy_s(core: int) -> float:
    """Return the time since boot in which the core was not idle."""
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name == f"cpu{core}":
            return (sum(map(int, ticks[:8])) - int(ticks[_IDLE]) - int(ticks[_IOWAIT])) * TICK_S
    raise ValueError(f"this machine has no core {core}")


@dataclass(frozen=True, slots=True)
class CpuSample:
    """Seconds of CPU at one time; the difference of two is the usage in between."""

    service_s: float
    redis_s: float
    envoy_s: float
    load_s: float
    service_core_s: float
    load_core_s: float
    each_s: tuple[float, ...]  # per process of the service
    redis_each_s: tuple[float, ...]  # per Redis server

    def __sub__(self, earlier: CpuSample) -> CpuSample:
        return CpuSample(
            self.service_s - earlier.service_s,
            self.redis_s - earlier.redis_s,
            self.envoy_s - earlier.envoy_s,
            self.load_s - earlier.load_s,
            self.service_core_s - earlier.service_core_s,
            self.load_core_s - earlier.load_core_s,
            tuple(now - then for now, then in zip(self.each_s, earlier.each_s, strict=True)),
            tuple(now - then for now, then in zip(self.redis_each_s, earlier.redis_each_s, strict=True)),
        )


def read(
    service: Sequence[int], redis: Sequence[int], envoy: int | None, service_core: int, load_core: int
) -> CpuSample:
    """Read all counters; the load is this process."""
    each_s, redis_each_s = tuple(map(process_s, service)), tuple(map(process_s, redis))
    return CpuSample(
        service_s=sum(each_s),
        redis_s=sum(redis_each_s),
        envoy_s=process_s(envoy) if envoy is not None else 0.0,
        load_s=process_s(os.getpid()),
        service_core_s=core_busy_s(service_core),
        load_core_s=core_busy_s(load_core),
        each_s=each_s,
        redis_each_s=redis_each_s,
    )
