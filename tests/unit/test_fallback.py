"""The fallback: decisions of each `on_store_failure`, metrics, and the log of an outage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from ratelimit_rls.api.responses import ResponseBuilder, ResponseOptions
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
from ratelimit_rls.errors import (
    CallerDeadlineExceeded,
    Overloaded,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
    UnknownState,
)
from ratelimit_rls.pipeline import fallback
from ratelimit_rls.pipeline.fallback import Fallback, UndecidedCall
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.telemetry.collector import collect
from ratelimit_rls.telemetry.instruments import DECISIONS, STORE_FAILURES
from ratelimit_rls.telemetry.metrics import LimitCounters, Metrics

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


class Setup:
    """A fallback, with calls prepared as a rate limiter would."""

    def __init__(self, policy: OnStoreFailure, shares: int = 1) -> None:
        self.now_us = NOW_US
        self.metrics = Metrics()
        self.fallback = Fallback(self.metrics, shares, clock=lambda: self.now_us)
        tree = compile_documents({"f.yaml": RULES.encode()}).tree
        self._planner = Planner(tree, Policy(on_store_failure=policy))

    def plan(self, *keys: str, value: str = "v", hits: int = 0) -> Plan:
        return self._planner.plan(Request("d", tuple(Descriptor((Entry(key, value),)) for key in keys), hits))

    def ask(
        self, *keys: str, error: StoreError = AWAY, value: str = "v", hits: int = 0, wait_us: int | None = None
    ) -> Decision | StoreError:
        plan = self.plan(*keys, value=value, hits=hits)
        counters = self.metrics.metric_counters(plan.template)
        (decision,) = self.fallback.apply([UndecidedCall(plan.template, plan.keys, error, wait_us)])
        if isinstance(decision, Decision):
            self.metrics.record(decision, counters)
        return decision

    def decision(self, *keys: str, value: str = "v", hits: int = 0, wait_us: int | None = None) -> Decision:
        decision = self.ask(*keys, value=value, hits=hits, wait_us=wait_us)
        assert isinstance(decision, Decision)
        return decision

    def passed(self, key: str, calls: int, **more: str) -> int:
        return sum(self.decision(key, **more).code is Code.OK for _ in range(calls))  # type: ignore[arg-type]

    def give_back(self, decision: Decision, key: str) -> None:
        self.fallback.give_back(self.plan(key).keys, decision)

    @property
    def counted(self) -> dict[str, int]:
        return {
            name.removeprefix("ratelimit.fallback.decisions."): count
            for name, count in self.metrics.names().items()
            if count
        }


UNAVAILABLE = {"ratelimit.service.call.should_rate_limit.redis_error": 1, "ratelimit.store.failures.unavailable": 1}
"""Counters of a call whose store was unavailable."""


@pytest.mark.parametrize(
    ("policy", "outcomes"),
    [
        (OnStoreFailure.ALLOW, {"ok": 3}),
        (OnStoreFailure.DENY, {"over_limit": 3}),
        (OnStoreFailure.LOCAL, {"ok": 3}),
        (OnStoreFailure.ERROR, {}),
    ],
)
def test_fallback_decisions_are_counted_with_source_fallback(policy: OnStoreFailure, outcomes: dict[str, int]) -> None:
    setup = Setup(policy)
    for error in (AWAY, CallerDeadlineExceeded("late"), Overloaded("full")):
        setup.ask("user", error=error)
    collected = collect(setup.metrics)
    decisions = {one.attributes[2:]: value for one, value in collected.items() if one.instrument == DECISIONS.name}
    assert {key: value for key, value in decisions.items() if value} == {
        (outcome, "fallback"): count for outcome, count in outcomes.items()
    }
    reasons = {one.attributes[0]: value for one, value in collected.items() if one.instrument == STORE_FAILURES.name}
    assert reasons == {"deadline_exceeded": 1, "overloaded": 1, "unavailable": 1, "unknown_state": 0}


def test_error_returns_the_store_error() -> None:
    setup = Setup(OnStoreFailure.ERROR)
    assert setup.ask("user") is AWAY
    assert setup.counted == {"error": 1, **UNAVAILABLE}


def test_allow_passes_and_reports_no_limit() -> None:
    setup = Setup(OnStoreFailure.ALLOW)
    decision = setup.decision("user", "free")
    assert (decision.code, decision.without_store) == (Code.OK, OnStoreFailure.ALLOW)
    assert [(status.code, status.step) for status in decision.statuses] == [(Code.OK, None)] * 2
    assert ResponseBuilder(ResponseOptions(headers_enabled=True)).build(decision).headers == ()
    assert setup.counted == {"allow": 1, **UNAVAILABLE}


def test_deny_denies_with_a_wait_of_one_second() -> None:
    setup = Setup(OnStoreFailure.DENY)
    decision = setup.decision("free", "user")
    assert (decision.code, decision.without_store, decision.now_us) == (Code.OVER_LIMIT, OnStoreFailure.DENY, NOW_US)
    free, user = decision.statuses
    assert (free.code, free.step) == (Code.OK, None)
    assert (user.code, user.remaining, user.reset_s) == (Code.OVER_LIMIT, 0, 1)
    headers = dict(ResponseBuilder(ResponseOptions(headers_enabled=True)).build(decision).headers)
    assert headers == {"RateLimit-Limit": "10", "RateLimit-Remaining": "0", "RateLimit-Reset": "1"}
    assert setup.counted == {"deny": 1, **UNAVAILABLE}


@pytest.mark.parametrize(
    ("key", "shares", "passes"),
    [
        ("user", 1, 10),
        ("user", 4, 3),  # rounded up
        ("user", 10, 1),
        ("user", 1000, 1),  # at least one
        ("one", 3, 1),
        ("blocked", 4, 0),  # zero stays zero, however it is divided
        ("bucket", 1, 7),
        ("bucket", 2, 4),
    ],
)
def test_local_admits_its_share_of_the_limit(key: str, shares: int, passes: int) -> None:
    setup = Setup(OnStoreFailure.LOCAL, shares)
    assert setup.passed(key, 20) == passes


def test_a_share_of_a_bucket_is_refilled_at_its_share_of_the_rate() -> None:
    setup = Setup(OnStoreFailure.LOCAL, 6)
    assert setup.passed("bucket", 5) == 2
    setup.now_us += 59_000_000  # at 10 a minute
    assert setup.passed("bucket", 5) == 2  # at most the bucket's capacity
    setup.now_us += 6_000_000
    assert setup.passed("bucket", 5) == 1


def test_local_counts_per_value_and_window() -> None:
    setup = Setup(OnStoreFailure.LOCAL, 4)
    assert [setup.passed("user", 5, value=value) for value in ("a", "b", "a")] == [3, 3, 0]
    setup.now_us += 60_000_000
    assert setup.passed("user", 5, value="a") == 3


def test_local_reports_the_configured_limit_and_counts_the_share() -> None:
    setup = Setup(OnStoreFailure.LOCAL, 2)
    for _ in range(4):
        decision = setup.decision("user")
    (status,) = decision.statuses
    assert (decision.code, decision.without_store) == (Code.OK, OnStoreFailure.LOCAL)
    assert status.step is not None
    assert (status.step.limit, status.remaining) == (Limit(10, Unit.MINUTE), 1)
    assert status.step is decision.template.steps[0]  # responses are built from it
    assert setup.metrics.limit("d.user", "d", "d.user") == LimitCounters(total_hits=4, within_limit=4)
    setup.decision("user")
    setup.decision("user")
    assert setup.metrics.limit("d.user", "d", "d.user") == LimitCounters(
        total_hits=6, within_limit=5, near_limit=1, over_limit=1
    )


@pytest.mark.parametrize("key", ["slow", "paced"])
def test_local_throttling_delays_and_refunds(key: str) -> None:
    setup = Setup(OnStoreFailure.LOCAL, 2)  # a slot every two seconds
    assert setup.decision(key).wait_us == 0
    delayed = setup.decision(key)
    assert delayed.wait_us == 2_000_000
    assert setup.decision(key, wait_us=1_000_000).code is Code.OVER_LIMIT
    setup.give_back(delayed, key)
    assert setup.decision(key).wait_us == 2_000_000


def test_the_local_store_is_created_on_demand_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "MAX_LOCAL_BYTES", 2**18)
    setup = Setup(OnStoreFailure.LOCAL)
    assert not list(setup.fallback.gauges())
    for number in range(4_000):
        setup.ask("user", value=f"{number:050}")
    delayed = dict(setup.fallback.gauges())
    assert 50_000 < delayed["ratelimit.fallback.size"] <= 2**18
    assert delayed["ratelimit.fallback.evictions"] > 0


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (StoreTimeout("no answer"), "unavailable"),
        (CallerDeadlineExceeded("no answer yet"), "deadline_exceeded"),
        (Overloaded("too many"), "overloaded"),
        (UnknownState("rl:{k}:gcra:60"), "unknown_state"),
    ],
)
def test_undecided_calls_are_redis_errors_by_kind(error: StoreError, kind: str) -> None:
    setup = Setup(OnStoreFailure.ALLOW)
    setup.ask("user", error=error)
    errors = {"ratelimit.service.call.should_rate_limit.redis_error": 1, f"ratelimit.store.failures.{kind}": 1}
    assert setup.counted == {"allow": 1, **errors}


def test_an_unknown_state_is_logged_with_its_key_and_is_not_an_outage(turn: Callable[[float], None]) -> None:
    setup = Setup(OnStoreFailure.ALLOW)
    with capture_logs() as lines:
        for _ in range(3):
            setup.ask("user", error=UnknownState("rl:{k}:gcra:60"))
        turn(fallback.UNKNOWN_STATE_INTERVAL_S)
        setup.ask("user", error=UnknownState("rl:{k}:gcra:60"))
    assert [(line["event"], line["key"]) for line in lines] == [("store_state_unknown", "rl:{k}:gcra:60")] * 2
    assert setup.fallback.outage is None


@pytest.fixture
def turn(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that advances the clock of outages."""
    now_s = [100.0]
    monkeypatch.setattr(fallback, "monotonic", lambda: now_s[0])

    def turned(by_s: float) -> None:
        now_s[0] += by_s

    return turned


def test_an_outage_is_logged_when_it_begins_and_ends(turn: Callable[[float], None]) -> None:
    setup = Setup(OnStoreFailure.ALLOW)
    with capture_logs() as logs:
        for _ in range(50):
            setup.ask("user")
            turn(0.1)
            setup.fallback.note_store_success()  # sometimes it does
        assert [entry["event"] for entry in logs] == ["store_fallback_started"]
        assert logs[0]["error"] == "no connection"
        turn(0.8)
        setup.fallback.note_store_success()
        assert setup.fallback.outage is not None
        turn(0.2)
        setup.fallback.note_store_success()
        assert setup.fallback.outage is None
        setup.fallback.note_store_success()
    assert [entry["event"] for entry in logs[1:]] == ["store_fallback_ended"]
    assert (logs[1]["calls"], logs[1]["duration_s"]) == (50, 4.9)
