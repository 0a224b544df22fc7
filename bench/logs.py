"""Logs of `sliding_log` that hold many hits before they are measured, put into Redis as the script would leave them.

To come to a thousand hits a log would have to be met by a thousand batches, since those of one batch are one element.
"""

from __future__ import annotations

from collections.abc import Sequence

from redis import Redis

from bench.connection import LoadError
from bench.workload import DOMAIN, TENANTS
from ratelimit_rls.core.keys import encode_tag, ending_of, storage_key
from ratelimit_rls.core.model import Algorithm, Entry, Limit, Unit

WINDOW_S = 3600
ONE_EXPIRES_EVERY_S = 0.5
"""About as often as each of some thousand callers comes, so that a log stays as long as it is."""


def key(number: int) -> bytes:
    """Of the first limit that the request of this number meets."""
    entries = (Entry("tenant", f"tenant-{number % TENANTS:02}"), Entry("user", f"user-{number:06}"))
    return storage_key(b"", encode_tag(DOMAIN, entries), ending_of(Limit(1, Unit.HOUR, Algorithm.SLIDING_LOG)))


def fill(address: str, keys: Sequence[bytes], hits: int) -> int:
    """Every log then holds so many hits, of which the oldest is about to expire; says how many bytes each one takes."""
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
    """Calls have been added to the logs that were filled, and so were decided by them."""
    with Redis.from_url(f"redis://{address}") as client:
        newest = client.lindex(keys[0], -1)
    if newest is None or int(newest.split()[1]) <= hits:
        raise LoadError(f"no call was added to the log of {keys[0].decode()}, which was given {hits} hits")
