"""The bytes charged to a request cache match the memory it uses."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable

import pytest

from ratelimit_rls.api.responses import ResponseOptions
from ratelimit_rls.api.rls.codec import RlsCodec
from ratelimit_rls.pipeline.request_cache import CacheBudget
from ratelimit_rls.protos.messages import RateLimitRequest
from tests.unit.transport.test_rls_codec import Limiter

pytestmark = pytest.mark.slow

REQUESTS = 25


def request_message(
    number: int, descriptors: int, entries: int = 1, value: str = "v", key: str = "user", limit: int = 0, hits: int = 0
) -> bytes:
    request = RateLimitRequest(domain="edge")
    for one in range(descriptors):
        descriptor = request.descriptors.add()
        for _ in range(entries):
            descriptor.entries.add(key=key, value=f"{number}-{one}{value}")
        if limit:
            descriptor.limit.requests_per_unit = limit + number
            descriptor.limit.unit = 2
        if hits:
            descriptor.hits_addend.value = hits + number
    return bytes(request.SerializeToString())


def empty(number: int, content: bytes) -> bytes:
    return bytes(RateLimitRequest(domain="edge", hits_addend=100 + number).SerializeToString()) + content


KINDS: dict[str, Callable[[int], bytes]] = {
    "one descriptor": lambda number: request_message(number, 1),
    "many": lambda number: request_message(number, 100),
    "many without a rule": lambda number: request_message(number, 100, key="nothing"),
    "many empty ones": lambda number: empty(number, b"\x12\x00" * 250),
    "many empty entries": lambda number: empty(number, b"\x12\xd0\x0f" + b"\x0a\x00" * 1000),
    "many entries": lambda number: request_message(number, 1, 600),
    "limits of their own": lambda number: request_message(number, 100, limit=10),
    "hits of their own": lambda number: request_message(number, 100, hits=20),
    "values to escape": lambda number: request_message(number, 100, value="%" * 100),
    "a long value": lambda number: request_message(number, 1, value="%" * 10_000),
    "values that are not ASCII": lambda number: request_message(number, 100, value="\N{GRINNING FACE}" * 20),
}


@pytest.mark.parametrize("has_metadata", [False, True], ids=["", "with dynamic metadata"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_charged_bytes_match_memory(kind: Callable[[int], bytes], has_metadata: bool) -> None:
    limiter, budget = Limiter(), CacheBudget(2**30)
    options = ResponseOptions(dynamic_metadata=has_metadata)
    codec = RlsCodec(limiter, options, budget=budget)
    messages = [kind(number) for number in range(REQUESTS)]
    for _ in range(3):  # one-time allocations, also of the marks of repeated messages
        codec.decode(kind(10**6))
    if codec._reader is not None:
        for paths in codec._reader._domains.values():
            paths._max_descriptors = 0  # descriptors that were read recently are not part of the cache
    charged_before = budget.charged_bytes
    gc.collect()
    tracemalloc.start()
    try:
        for message in messages:
            for _ in range(2):  # most requests are cached when they are repeated
                codec.lookup(message) or codec.decode(bytes(bytearray(message)))  # a copy, as received from a socket
        gc.collect()
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(codec.cache) == REQUESTS + 1
    charged_bytes = budget.charged_bytes - charged_before
    print(f"{kept_bytes / REQUESTS:.0f} kept, {charged_bytes / REQUESTS:.0f} charged for each")
    assert charged_bytes / 2 < kept_bytes < 1.2 * charged_bytes
