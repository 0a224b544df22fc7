"""The fallback: what each `on_store_failure` tells a call, what is counted, and what is logged of an outage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from ratelimit_rls import failure
from ratelimit_rls.core.model import (
    Code,
    Decision,
    Descriptor,
    Entry,
    Limit,
    OnStoreFailure,
    Plan,
    Request,
    Unit,
)
from ratelimit_rls.core.plan import Planner, Policy
from ratelimit_rls.errors import Late, Overloaded, StoreError, StoreTimeout, StoreUnavailable
from ratelimit_rls.failure import Fallback, Undecided
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.telemetry.collect import collect
from ratelimit_rls.telemetry.instruments import DECISIONS, STORE_FAILURES
from ratelimit_rls.telemetry.metrics import LimitCounters, Metrics
from ratelimit_rls.transport.answers import AnswerOptions, Answers

NOW_US = 1_786_000_000_000_000
AWAY = StoreUnavailable("no connection")

RULES = """
domain: d
descriptors:
  - key: user
    rate_limit: {unit: minute, requests_per_unit: 10}
  - key: bucket
    rate_limit: {unit: minute, requests_per_unit: 60, algorithm: token_bucket, burst: 7}
  - key: blocked
    rate_limit: {unit: minute, requests_per_unit: 0}
  - key: one
    rate_limit: {unit: minute, requests_per_unit: 1}
  - key: slow
    action: throttle
    max_delay: 1m
    rate_limit: {unit: minute, requests_per_unit: 60, algorithm: leaky_bucket, burst: 1}
  - key: paced
    action: throttle
    max_delay: 1m
    rate_limit: {unit: minute, requests_per_unit: 60, algorithm: gcra, burst: 1}
  - key: free
    rate_limit: {unlimited: true}
"""


class House:
    """A fallback, and calls as a rate limiter would have prepared them."""

    def __init__(self, policy: OnStoreFailure, shares: int = 1) -> None:
        self.now_us = NOW_US
        self.metrics = Metrics()
        self.fallback = Fallback(self.metrics, shares, clock=lambda: self.now_us)
        tree = compile_documents({"f.yaml": RULES.encode()}).tree
        self._planner = Planner(tree, Policy(on_store_failure=policy))
        self._store = EmbeddedStore()

    def plan(self, *keys: str, value: str = "v", hits: int = 0) -> Plan:
        return self._planner.plan(Request("d", tuple(Descriptor((Entry(key, value),)) for key in keys), hits))

    def ask(
        self, *keys: str, why: StoreError = AWAY, value: str = "v", hits: int = 0, wait_us: int | None = None
    ) -> Decision | StoreError:
        plan = self.plan(*keys, value=value, hits=hits)
        counters = self.metrics.counters(plan.outline)
        (told,) = self.fallback.instead([Undecided(plan.outline, counters, self._store.prepare(plan), why, wait_us)])
        return told

    def decision(self, *keys: str, value: str = "v", hits: int = 0, wait_us: int | None = None) -> Decision:
        told = self.ask(*keys, value=value, hits=hits, wait_us=wait_us)
        assert isinstance(told, Decision)
        return told

    def passed(self, key: str, calls: int, **more: str) -> int:
        return sum(self.decision(key, **more).code is Code.OK for _ in range(calls))  # type: ignore[arg-type]

    def give_back(self, decision: Decision, key: str) -> None:
        self.fallback.give_back(self._store.prepare(self.plan(key)), decision)

    @property
    def counted(self) -> dict[str, int]:
        return {
            name.removeprefix("ratelimit.store_failure."): count
            for name, count in self.metrics.names().items()
            if count
        }


@pytest.mark.parametrize(
    ("policy", "outcomes"),
    [
        (OnStoreFailure.ALLOW, {"ok": 3}),
        (OnStoreFailure.DENY, {"over_limit": 3}),
        (OnStoreFailure.LOCAL, {"ok": 3}),
        (OnStoreFailure.ERROR, {}),
    ],
)
def test_what_is_told_instead_is_counted_as_a_decision_of_its_own_source(
    policy: OnStoreFailure, outcomes: dict[str, int]
) -> None:
    house = House(policy)
    for why in (AWAY, Late("late"), Overloaded("full")):
        house.ask("user", why=why)
    collected = collect(house.metrics)
    decisions = {one.attributes[2:]: value for one, value in collected.items() if one.instrument == DECISIONS.name}
    assert {key: value for key, value in decisions.items() if value} == {
        (outcome, "fallback"): count for outcome, count in outcomes.items()
    }
    reasons = {one.attributes[0]: value for one, value in collected.items() if one.instrument == STORE_FAILURES.name}
    assert reasons == {"late": 1, "overloaded": 1, "unavailable": 1}


def test_error_is_the_error_itself() -> None:
    house = House(OnStoreFailure.ERROR)
    assert house.ask("user") is AWAY
    assert house.counted == {"error": 1, "ratelimit.service.call.should_rate_limit.redis_error": 1}


def test_allow_lets_pass_and_speaks_of_no_limit() -> None:
    house = House(OnStoreFailure.ALLOW)
    decision = house.decision("user", "free")
    assert (decision.code, decision.without_store) == (Code.OK, OnStoreFailure.ALLOW)
    assert [(status.code, status.step) for status in decision.statuses] == [(Code.OK, None)] * 2
    assert Answers(AnswerOptions(headers_enabled=True)).tell(decision).headers == ()
    assert house.counted == {"allow": 1, "ratelimit.service.call.should_rate_limit.redis_error": 1}


def test_deny_refuses_and_tells_to_come_back_in_a_second() -> None:
    house = House(OnStoreFailure.DENY)
    decision = house.decision("free", "user")
    assert (decision.code, decision.without_store, decision.now_us) == (Code.OVER_LIMIT, OnStoreFailure.DENY, NOW_US)
    free, user = decision.statuses
    assert (free.code, free.step) == (Code.OK, None)
    assert (user.code, user.remaining, user.reset_s) == (Code.OVER_LIMIT, 0, 1)
    headers = dict(Answers(AnswerOptions(headers_enabled=True)).tell(decision).headers)
    assert headers == {"RateLimit-Limit": "10", "RateLimit-Remaining": "0", "RateLimit-Reset": "1"}
    assert house.counted == {"deny": 1, "ratelimit.service.call.should_rate_limit.redis_error": 1}


@pytest.mark.parametrize(
    ("key", "shares", "passes"),
    [
        ("user", 1, 10),
        ("user", 4, 3),  # rounded up
        ("user", 10, 1),
        ("user", 1000, 1),  # at least one
        ("one", 3, 1),
        ("blocked", 4, 0),  # nothing is nothing, however it is divided
        ("bucket", 1, 7),
        ("bucket", 2, 4),
    ],
)
def test_local_lets_pass_its_share_of_the_limit(key: str, shares: int, passes: int) -> None:
    house = House(OnStoreFailure.LOCAL, shares)
    assert house.passed(key, 20) == passes


def test_a_share_of_a_bucket_is_refilled_at_its_share_of_the_rate() -> None:
    house = House(OnStoreFailure.LOCAL, 6)
    assert house.passed("bucket", 5) == 2
    house.now_us += 59_000_000  # at 10 a minute
    assert house.passed("bucket", 5) == 2  # no more than fit
    house.now_us += 6_000_000
    assert house.passed("bucket", 5) == 1


def test_local_counts_each_value_by_itself_and_begins_anew_with_its_window() -> None:
    house = House(OnStoreFailure.LOCAL, 4)
    assert [house.passed("user", 5, value=value) for value in ("a", "b", "a")] == [3, 3, 0]
    house.now_us += 60_000_000
    assert house.passed("user", 5, value="a") == 3


def test_local_tells_of_the_limit_that_callers_know_and_counts_against_the_share() -> None:
    house = House(OnStoreFailure.LOCAL, 2)
    for _ in range(4):
        decision = house.decision("user")
    (status,) = decision.statuses
    assert (decision.code, decision.without_store) == (Code.OK, OnStoreFailure.LOCAL)
    assert status.step is not None
    assert (status.step.limit, status.remaining) == (Limit(10, Unit.MINUTE), 1)
    assert status.step is decision.outline.steps[0]  # answers are worded by it
    assert house.metrics.limit("d.user", "d", "d.user") == LimitCounters(total_hits=4, within_limit=4)
    house.decision("user")
    house.decision("user")
    assert house.metrics.limit("d.user", "d", "d.user") == LimitCounters(
        total_hits=6, within_limit=5, near_limit=1, over_limit=1
    )


@pytest.mark.parametrize("key", ["slow", "paced"])
def test_who_can_wait_is_held_locally_and_gives_back_what_it_leaves(key: str) -> None:
    house = House(OnStoreFailure.LOCAL, 2)  # a slot every two seconds
    assert house.decision(key).wait_us == 0
    held = house.decision(key)
    assert held.wait_us == 2_000_000
    assert house.decision(key, wait_us=1_000_000).code is Code.OVER_LIMIT
    house.give_back(held, key)
    assert house.decision(key).wait_us == 2_000_000


def test_nothing_is_kept_before_it_is_needed_and_never_more_than_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "LOCAL_BYTES", 2**18)
    house = House(OnStoreFailure.LOCAL)
    assert not list(house.fallback.gauges())
    for number in range(4_000):
        house.ask("user", value=f"{number:050}")
    held = dict(house.fallback.gauges())
    assert 50_000 < held["ratelimit.store_failure.local_bytes"] <= 2**18
    assert held["ratelimit.store_failure.local_evicted"] > 0


@pytest.mark.parametrize(
    ("why", "kind"),
    [(StoreTimeout("no answer"), None), (Late("no answer yet"), "late"), (Overloaded("too many"), "overloaded")],
)
def test_every_call_without_the_store_is_a_redis_error_and_two_kinds_are_told_apart(
    why: StoreError, kind: str | None
) -> None:
    house = House(OnStoreFailure.ALLOW)
    house.ask("user", why=why)
    prefix = "ratelimit.service.call.should_rate_limit."
    kinds = {name.removeprefix(prefix) for name in house.counted if name.startswith(prefix)}
    assert kinds == {"redis_error", kind} - {None}


@pytest.fixture
def turn(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Turns the clock by which outages are timed."""
    now_s = [100.0]
    monkeypatch.setattr(failure, "monotonic", lambda: now_s[0])

    def turned(by_s: float) -> None:
        now_s[0] += by_s

    return turned


def test_an_outage_is_logged_when_it_begins_and_when_it_is_over(turn: Callable[[float], None]) -> None:
    house = House(OnStoreFailure.ALLOW)
    with capture_logs() as logs:
        for _ in range(50):
            house.ask("user")
            turn(0.1)
            house.fallback.store_answered()  # now and then it does
        assert [entry["event"] for entry in logs] == ["calls are answered without the store"]
        assert logs[0]["error"] == "no connection"
        turn(0.8)
        house.fallback.store_answered()
        assert house.fallback.in_outage
        turn(0.2)
        house.fallback.store_answered()
        assert not house.fallback.in_outage
        house.fallback.store_answered()
    assert [entry["event"] for entry in logs[1:]] == ["the store decides again"]
    assert (logs[1]["calls_without_it"], logs[1]["for_s"]) == (50, 4.9)
