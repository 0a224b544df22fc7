"""Prefilled logs of `sliding_log`, written to Redis in the format of the script.

Filling a log with a thousand hits by calls would take a thousand batches, since the hits of a batch are one element.
"""

from __future__ import annotations

from collections.abc import Sequence

from redis import Redis

from bench.connection import LoadError
from bench.workload import DOMAIN, TENANTS
from ratelimit_rls.core.model import Algorithm, Entry, Limit, Unit
from ratelimit_rls.core.storage_keys import encode_tag, key_suffix, storage_key

WINDOW_S = 3600
ONE_EXPIRES_EVERY_S = 0.5
"""Interval in which hits expire.

About that of the calls of one of several thousand callers, so that the length is stable.
"""


def key(number: int) -> bytes:
    """Return the key of the first limit that applies to the request of this number."""
    entries = (Entry("tenant", f"tenant-{number % TENANTS:02}"), Entry("user", f"user-{number:06}"))
    return storage_key(b"", encode_tag(DOMAIN, entries), key_suffix(Limit(1, Unit.HOUR, Algorithm.SLIDING_LOG)))


def fill(address: str, keys: Sequence[bytes], hits: int) -> int:
    """Fill every log with hits, the oldest of which is about to expire; return the bytes per log."""
    first, *others = keys
    with Redis.from_url(f"redis://{address}") as client:
        now_s, now_us = client.time()
        start_us = (now_s - WINDOW_S) * 1_000_000 + now_us
        step_us = round(ONE_EXPIRES_EVERY_S * 1e6)
        client.delete(first)
        client.rpush(first, "0 0", *(f"{start_us + step_us * number} {number}" for number in range(1, hits + 1)))
        client.expire(first, WINDOW_S)
        log = client.dump(first)
        with client.pipeline(transaction=False) as pipeline:
            for other in others:
                pipeline.restore(other, WINDOW_S * 1000, log, replace=True)
            pipeline.execute()
        return int(client.memory_usage(first, samples=0) or 0)


def check(address: str, keys: Sequence[bytes], hits: int) -> None:
    """Check that calls were added to the prefilled logs, and thus decided by them."""
    with Redis.from_url(f"redis://{address}") as client:
        newest = client.lindex(keys[0], -1)
    if newest is None or int(newest.split()[1]) <= hits:
        raise LoadError(f"no call was added to the log of {keys[0].decode()}, which was given {hits} hits")
