"""Memory management of the process: garbage collection without long pauses, and an allocator that returns memory."""

from __future__ import annotations

import ctypes
import gc
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Parameters of glibc's mallopt."""

MMAP_BYTES = 128 * 2**10
TRIM_BYTES = 4 * 2**20
MAX_ARENAS = 2


def tune_gc() -> None:
    """Restrict garbage collection to young objects.

    Handling a call creates no reference cycles, but 100,000 cached requests are 100,000 objects to traverse: full
    collections took up to 0.4 s, during which every call waited. Older objects are freed by reference counting, or at
    exit. The young generations are small for the same reason: with thresholds of 10,000 and 10, a collection of the
    middle one took up to 140 ms under attack.
    """
    gc.set_threshold(5_000, 5, 1_000_000)


def freeze_gc() -> None:
    """Exclude all objects that exist after startup from garbage collection: they live until exit."""
    gc.collect()
    gc.freeze()


def tune_malloc() -> bool:
    """Have glibc return the memory of large blocks when they are freed. Return False if it was left as it is.

    By default glibc stops doing so for blocks of a size that was freed once, up to 32 MiB. They then leave holes
    between smaller ones: after minutes of large messages, the process had grown by tens of MiB that nothing used.
    Settings of the user (MALLOC_…, GLIBC_TUNABLES) and other C libraries are left alone.
    """
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    parameters = {M_MMAP_THRESHOLD: MMAP_BYTES, M_TRIM_THRESHOLD: TRIM_BYTES, M_ARENA_MAX: MAX_ARENAS}
    done = [mallopt(parameter, value) for parameter, value in parameters.items()]
    return all(done)
