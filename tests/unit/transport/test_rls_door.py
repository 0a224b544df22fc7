"""The door on its own: batches in which some calls are wrong, and the cache of what was seen before."""

from __future__ import annotations

from datetime import UTC, datetime
from math import inf

import pytest

from ratelimit_rls.core.model import Unit
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.errors import BadRequest
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.rules.snapshot import Rules
from ratelimit_rls.service import RateLimiter
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.transport.grpc.cache import LARGEST_MESSAGE_BYTES, Budget, CallCache, Known, weight_bytes
from ratelimit_rls.transport.grpc.decode import decode
from ratelimit_rls.transport.grpc.door import Answered, Failure, FailureCode
from ratelimit_rls.transport.grpc.encode import Wording
from ratelimit_rls.transport.grpc.limiter_door import MOST_MESSAGE_BYTES
from ratelimit_rls.transport.grpc.messages import RateLimitRequest, RateLimitResponse
from ratelimit_rls.transport.grpc.rls import RlsDoor
from ratelimit_rls.transport.grpc.waiting import WaitingRoom

RULES = b"domain: edge\ndescriptors: [{key: user, rate_limit: {unit: hour, requests_per_unit: 2}}]"


class Limiter(RateLimiter):
    """Counts how often a request had to be worked out."""

    def __init__(self) -> None:
        self.snapshot, self.metrics = Rules(), Metrics()
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


def new_door(limiter: Limiter) -> RlsDoor:
    return RlsDoor(limiter, limiter.metrics, room=WaitingRoom(10, 0.003))


async def answers(door: RlsDoor, *messages: bytes) -> list[Answered | None]:
    return list(await door.ask(messages, [inf] * len(messages)).answers())


def remaining(answer: Answered | None) -> int:
    assert isinstance(answer, bytes)
    return int(RateLimitResponse.FromString(answer).statuses[0].limit_remaining)


async def test_each_call_of_a_batch_gets_its_own_answer_in_order(limiter: Limiter) -> None:
    door = new_door(limiter)
    batch = [ask("a"), b"\xff", ask("a"), ask("b"), ask("a", domain=""), bytes(MOST_MESSAGE_BYTES + 1)]
    first, garbage, second, other, nameless, large = await answers(door, *batch)
    assert (remaining(first), remaining(second), remaining(other)) == (1, 0, 1)
    failures = [failure.code for failure in (garbage, nameless, large) if isinstance(failure, Failure)]
    assert failures == [
        FailureCode.INVALID_ARGUMENT,
        FailureCode.INVALID_ARGUMENT,
        FailureCode.RESOURCE_EXHAUSTED,
    ]
    assert limiter.metrics.service.service_error == 3
    assert await answers(door) == []


async def test_an_answer_that_cannot_be_worded_harms_no_other(
    limiter: Limiter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    door = new_door(limiter)
    encode = door._encoder.encode

    def fail_once(decision, wording):  # type: ignore[no-untyped-def]
        if decision.statuses[0].remaining == 1:
            raise ZeroDivisionError
        return encode(decision, wording)

    monkeypatch.setattr(door._encoder, "encode", fail_once)
    broken, fine = await answers(door, ask("a"), ask("a"))
    assert broken == Failure(FailureCode.INTERNAL, "internal error")
    assert remaining(fine) == 0
    assert "ZeroDivisionError" in caplog.text


async def test_a_request_is_worked_out_once_for_as_long_as_the_rules_stand(limiter: Limiter) -> None:
    door = new_door(limiter)
    await answers(door, ask("a"), ask("a"))
    await answers(door, ask("a"))
    assert limiter.prepared == 1
    limiter.load(RULES)
    await answers(door, ask("a"))
    assert limiter.prepared == 2


async def test_refusals_are_not_remembered(limiter: Limiter) -> None:
    door = new_door(limiter)
    limiter.snapshot.current = None
    (answer,) = await answers(door, ask("a"))
    assert answer == Failure(FailureCode.UNAVAILABLE, "no rate limit configuration loaded")
    limiter.load(RULES)
    (answer,) = await answers(door, ask("a"))
    assert remaining(answer) == 1


def known(limiter: Limiter, message: bytes) -> Known[Wording]:
    return Known(limiter.prepare(decode(message)), Wording(()))


def test_what_a_request_brought_weighs_in_the_cache(limiter: Limiter) -> None:
    """Of hits that few others have, a whole kind of request is kept with it, once for all that are of that kind."""
    cache: CallCache[Wording] = CallCache(Budget(2**30))
    grown = []
    for message in (ask("a"), ask("b", hits=70_000), ask("c", hits=70_000), ask("d")):
        before = cache.held_bytes
        cache.put(message, known(limiter, message))
        grown.append(cache.held_bytes - before)
    light, heavy, same, again = grown
    assert heavy - light > 1_000
    assert abs(same - light) < 20
    assert again == light
    for _ in range(4):
        cache.evict()
    assert cache.held_bytes == 0


def test_the_cache_stays_within_its_bytes_and_still_hits_when_more_come_round_than_fit(limiter: Limiter) -> None:
    messages = [ask(f"{i:04}") for i in range(100)]
    entries = [known(limiter, message) for message in messages]
    cache: CallCache[Wording] = CallCache(Budget(80 * weight_bytes(messages[0], entries[0])))
    hits = 0
    for _ in range(50):
        for message, entry in zip(messages, entries, strict=True):
            found = cache.get(message)
            hits += found is entry
            cache.put(message, entry)
            assert len(cache) <= 80
    assert hits > 2000  # of 5000; going by age there would be none
    cache.clear()
    assert len(cache) == 0
    cache.put(messages[0], entries[0])
    assert cache.get(messages[0]) is entries[0]


def test_a_lot_falls_on_neighbours_and_then_on_others(limiter: Limiter, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [ask(f"{i:04}") for i in range(132)]
    entries = [known(limiter, message) for message in messages]
    cache: CallCache[Wording] = CallCache(Budget(100 * weight_bytes(messages[0], entries[0])))
    lots = iter([0.5, 0.0])
    monkeypatch.setattr("ratelimit_rls.transport.grpc.cache.random", lambda: next(lots))
    for message, entry in zip(messages, entries, strict=True):
        cache.put(message, entry)
    gone = [number for number, message in enumerate(messages) if cache.get(message) is None]
    assert gone == [*range(16), *range(48, 64)]
    assert (len(cache), list(lots)) == (100, [])


def test_caches_on_one_budget_give_way_to_each_other(limiter: Limiter) -> None:
    messages = [ask(f"{i:04}") for i in range(100)]
    entries = [known(limiter, message) for message in messages]
    budget = Budget(60 * weight_bytes(messages[0], entries[0]))
    first, second = (CallCache[Wording](budget) for _ in range(2))
    for message, entry in zip(messages, entries, strict=True):
        first.put(message, entry)
    assert len(first) == 60, "all that there is, while nobody else asks"
    for message, entry in zip(messages, entries, strict=True):
        second.put(message, entry)
    assert (len(first), len(second)) == (30, 30)
    first.clear()
    assert budget.held_bytes == second.held_bytes == 30 * weight_bytes(messages[0], entries[0])


def test_the_cache_keeps_no_huge_messages(limiter: Limiter) -> None:
    message = ask("x" * LARGEST_MESSAGE_BYTES)
    cache: CallCache[Wording] = CallCache(Budget(2**30))
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


def test_a_text_that_is_not_utf8_is_a_bad_request() -> None:
    with pytest.raises(BadRequest, match="not UTF-8"):
        decode(ask("abcd").replace(b"abcd", b"\xff\xff\xff\xff"))
