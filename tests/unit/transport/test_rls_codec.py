"""RlsCodec in a pipeline: batches with invalid calls, and the request cache."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from structlog.testing import capture_logs

from ratelimit_rls.api.rls.codec import RlsCodec
from ratelimit_rls.api.rls.decode import decode
from ratelimit_rls.api.rls.encode import ResponseTemplate
from ratelimit_rls.core.model import Unit
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.errors import BadRequest
from ratelimit_rls.h2.status import RpcError, StatusCode
from ratelimit_rls.pipeline.batch import Response
from ratelimit_rls.pipeline.limiter import RateLimiter
from ratelimit_rls.pipeline.message_bounds import MAX_MESSAGE_BYTES, MessageBounds
from ratelimit_rls.pipeline.request_cache import (
    MAX_CACHED_MESSAGE_BYTES,
    CacheBudget,
    PreparedRequest,
    RequestCache,
    entry_bytes,
)
from ratelimit_rls.protos.messages import RateLimitRequest, RateLimitResponse
from ratelimit_rls.rules.active_rules import ActiveRules
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.telemetry.abuse import Abuse
from ratelimit_rls.telemetry.metrics import Metrics
from tests.support.pipelines import new_pipeline, responses

RULES = b"domain: edge\ndescriptors: [{key: user, rate_limit: {unit: hour, requests_per_unit: 2}}]"


class Limiter(RateLimiter):
    """Counts how often a request was prepared."""

    def __init__(self) -> None:
        self.snapshot, self.metrics = ActiveRules(), Metrics()
        super().__init__(self.snapshot, EmbeddedStore(), self.metrics, Policy())
        self.prepared = 0
        self.load(RULES)

    def load(self, document: bytes) -> None:
        tree = compile_documents({"rules.yaml": document}).tree
        self.snapshot.swap(tree, digest="", files=1, loaded_at=datetime.now(UTC))

    def prepare(self, request):  # type: ignore[no-untyped-def]
        self.prepared += 1
        return super().prepare(request)


@pytest.fixture
def limiter() -> Limiter:
    return Limiter()


def ask(user: str, domain: str = "edge", hits: int = 0) -> bytes:
    request = RateLimitRequest(domain=domain, hits_addend=hits)
    request.descriptors.add().entries.add(key="user", value=user)
    return bytes(request.SerializeToString())


async def answers(codec: RlsCodec, *messages: bytes) -> list[Response]:
    assert isinstance(codec.limiter, Limiter)
    return await responses(new_pipeline(codec, codec.limiter.metrics), messages)


def remaining(answer: Response) -> int:
    assert isinstance(answer, bytes)
    return int(RateLimitResponse.FromString(answer).statuses[0].limit_remaining)


async def test_responses_are_in_the_order_of_the_batch(limiter: Limiter) -> None:
    codec = RlsCodec(limiter)
    batch = [ask("a"), b"\xff", ask("a"), ask("b"), ask("a", domain=""), bytes(MAX_MESSAGE_BYTES + 1)]
    first, garbage, second, other, nameless, large = await answers(codec, *batch)
    assert (remaining(first), remaining(second), remaining(other)) == (1, 0, 1)
    failures = [failure.code for failure in (garbage, nameless, large) if isinstance(failure, RpcError)]
    assert failures == [
        StatusCode.INVALID_ARGUMENT,
        StatusCode.INVALID_ARGUMENT,
        StatusCode.RESOURCE_EXHAUSTED,
    ]
    assert limiter.metrics.service.service_error == 3
    assert await answers(codec) == []


async def test_encoding_error_affects_only_its_call(limiter: Limiter, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = RlsCodec(limiter)
    encode_pass = codec.encode_pass

    def fail_once(template, result, response_template):  # type: ignore[no-untyped-def]
        if result.readings[0].left == 1:
            raise ZeroDivisionError
        return encode_pass(template, result, response_template)

    monkeypatch.setattr(codec, "encode_pass", fail_once)
    with capture_logs() as lines:
        broken, fine = await answers(codec, ask("a"), ask("a"))
    assert broken == RpcError(StatusCode.INTERNAL, "internal error")
    assert remaining(fine) == 0
    (line,) = lines
    assert (line["event"], type(line["exc_info"])) == ("rate_limit_call_failed", ZeroDivisionError)


async def test_request_is_prepared_once_until_the_rules_change(limiter: Limiter) -> None:
    codec = RlsCodec(limiter)
    await answers(codec, ask("a"), ask("a"))
    await answers(codec, ask("a"))
    assert limiter.prepared == 1
    limiter.load(RULES)
    await answers(codec, ask("a"))
    assert limiter.prepared == 2


async def test_errors_are_not_cached(limiter: Limiter) -> None:
    codec = RlsCodec(limiter)
    limiter.snapshot.current = None
    (answer,) = await answers(codec, ask("a"))
    assert answer == RpcError(StatusCode.UNAVAILABLE, "no rate limit configuration loaded")
    limiter.load(RULES)
    (answer,) = await answers(codec, ask("a"))
    assert remaining(answer) == 1


def known(limiter: Limiter, message: bytes) -> PreparedRequest[ResponseTemplate]:
    return PreparedRequest(limiter.prepare(decode(message)), ResponseTemplate({}))


def test_own_data_of_a_request_is_charged_to_the_cache(limiter: Limiter) -> None:
    """An unusual number of hits also needs its own plan template, which is charged once for all requests that share
    it."""
    budget = CacheBudget(2**30)
    cache: RequestCache[ResponseTemplate] = RequestCache(budget)
    grown = []
    for message in (ask("a"), ask("b", hits=70_000), ask("c", hits=70_000), ask("d")):
        before = budget.charged_bytes
        cache.put(message, known(limiter, message))
        grown.append(budget.charged_bytes - before)
    light, heavy, same, again = grown
    assert heavy - light > 1_000
    assert abs(same - light) < 20
    assert again == light
    for _ in range(4):
        cache.evict()
    assert (cache.charged_bytes, budget.charged_bytes) == (0, 0)


def test_caches_that_share_a_template_charge_it_once_whichever_drops_it_last(limiter: Limiter) -> None:
    budget = CacheBudget(2**30)
    one: RequestCache[ResponseTemplate] = RequestCache(budget)
    other: RequestCache[ResponseTemplate] = RequestCache(budget)
    for cache, user in ((one, "a"), (other, "b")):
        message = ask(user, hits=70_000)
        cache.put(message, known(limiter, message))
    one.clear()
    assert one.charged_bytes == 0
    assert budget.charged_bytes > other.charged_bytes  # the template is still in use
    budget.max_bytes = 0
    budget.evict_over_budget(one)
    assert (len(other), other.charged_bytes, budget.charged_bytes) == (0, 0, 0)


def test_cache_still_hits_on_a_cyclic_scan_larger_than_the_cache(limiter: Limiter) -> None:
    messages = [ask(f"{i:04}") for i in range(100)]
    entries = [known(limiter, message) for message in messages]
    cache: RequestCache[ResponseTemplate] = RequestCache(CacheBudget(80 * entry_bytes(messages[0], entries[0])))
    hits = 0
    for _ in range(50):
        for message, entry in zip(messages, entries, strict=True):
            found = cache.get(message)
            hits += found is entry
            cache.put(message, entry)
            assert len(cache) <= 80
    assert hits > 2000  # of 5000; with FIFO eviction there would be none
    cache.clear()
    assert len(cache) == 0
    cache.put(messages[0], entries[0])
    assert cache.get(messages[0]) is entries[0]


def test_eviction_removes_adjacent_entries(limiter: Limiter, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [ask(f"{i:04}") for i in range(132)]
    entries = [known(limiter, message) for message in messages]
    cache: RequestCache[ResponseTemplate] = RequestCache(CacheBudget(100 * entry_bytes(messages[0], entries[0])))
    draws = iter([0.5, 0.0])
    monkeypatch.setattr("ratelimit_rls.pipeline.request_cache.random", lambda: next(draws))
    for message, entry in zip(messages, entries, strict=True):
        cache.put(message, entry)
    evicted = [number for number, message in enumerate(messages) if cache.get(message) is None]
    assert evicted == [*range(16), *range(48, 64)]
    assert (len(cache), list(draws)) == (100, [])


def test_caches_share_one_budget(limiter: Limiter) -> None:
    messages = [ask(f"{i:04}") for i in range(100)]
    entries = [known(limiter, message) for message in messages]
    budget = CacheBudget(60 * entry_bytes(messages[0], entries[0]))
    first, second = (RequestCache[ResponseTemplate](budget) for _ in range(2))
    for message, entry in zip(messages, entries, strict=True):
        first.put(message, entry)
    assert len(first) == 60, "all that there is, while no other cache needs it"
    for message, entry in zip(messages, entries, strict=True):
        second.put(message, entry)
    assert (len(first), len(second)) == (30, 30)
    first.clear()
    assert budget.charged_bytes == second.charged_bytes == 30 * entry_bytes(messages[0], entries[0])


def test_huge_messages_are_not_cached(limiter: Limiter) -> None:
    message = ask("x" * MAX_CACHED_MESSAGE_BYTES)
    cache: RequestCache[ResponseTemplate] = RequestCache(CacheBudget(2**30))
    cache.put(message, known(limiter, message))
    assert len(cache) == 0


def test_decoding_keeps_every_field() -> None:
    request = RateLimitRequest(domain="edge", hits_addend=2**32 - 1)
    first = request.descriptors.add(is_negative_hits=True)
    first.entries.add(key="k", value="")
    first.limit.requests_per_unit = 5
    first.limit.unit = 7
    first.hits_addend.value = 0
    second = request.descriptors.add()
    second.limit.unit = 12345
    decoded = decode(request.SerializeToString())
    assert (decoded.domain, decoded.hits) == ("edge", 2**32 - 1)
    one, two = decoded.descriptors
    assert (one.entries, one.hits, one.is_refund) == ((("k", ""),), 0, True)
    assert one.limit is not None
    assert (one.limit.requests_per_unit, one.limit.unit) == (5, Unit.WEEK)
    assert two.limit is not None
    assert (two.limit.unit, two.hits, two.is_refund, two.entries) == (Unit.UNKNOWN, None, False, ())


def test_invalid_utf8_is_a_bad_request() -> None:
    with pytest.raises(BadRequest, match="not UTF-8"):
        decode(ask("abcd").replace(b"abcd", b"\xff\xff\xff\xff"))


async def test_oversized_message_is_rejected_and_recorded_as_abuse(limiter: Limiter) -> None:
    bounds = MessageBounds(descriptors=1, message_bytes=1024)
    codec = RlsCodec(limiter, bounds=bounds)
    request = RateLimitRequest.FromString(ask("a"))
    request.descriptors.add().entries.add(key="user", value="b")

    complex_one, large = await answers(codec, request.SerializeToString(), bytes(1025))

    assert complex_one == RpcError(
        StatusCode.INVALID_ARGUMENT,
        "at most 1 descriptors are allowed in one message (RLS_MAX_DESCRIPTORS)",
        Abuse.MESSAGE_TOO_COMPLEX,
    )
    assert large == RpcError(
        StatusCode.RESOURCE_EXHAUSTED,
        "the message is too large; at most 1024 bytes are read",
        Abuse.MESSAGE_TOO_LARGE,
    )
    assert limiter.prepared == 0
    assert limiter.metrics.service.service_error == 2
