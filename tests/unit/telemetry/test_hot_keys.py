"""Hot keys: detection, accuracy of rates, and bounds on memory and log lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import NamedTuple

import pytest
from structlog.testing import capture_logs

from ratelimit_rls.core.decision import decision_of
from ratelimit_rls.core.model import (
    Charge,
    Decision,
    DescriptorPlan,
    LeasePolicy,
    Limit,
    PlanTemplate,
    Position,
    Reading,
    Rule,
    Step,
    StoreResult,
    Unit,
    WarnAt,
)
from ratelimit_rls.errors import StoreError, StoreTimeout
from ratelimit_rls.store.redis.keyspace import RedisKeyspace
from ratelimit_rls.telemetry.hot_keys import (
    GENERATION_S,
    MAX_KEPT,
    MAX_LOGGED_KEY_LENGTH,
    MAX_RATE,
    MAX_WARNINGS,
    OVER_THRESHOLD,
    REPEAT_WARNING_S,
    HotKeys,
    HotReport,
    as_json,
    merge_reports,
)

STEP = Step(Limit(10, Unit.MINUTE), 1, Charge.ALWAYS)
OK, OVER = Reading(3, 0, 1), Reading(0, 5, 1)


def template_of(*rules: Rule | None, limits: int = 1, harness: bool = False) -> PlanTemplate:
    watchers = (WarnAt(800),) if harness else ()
    descriptor_plans = tuple(
        DescriptorPlan(rule, (STEP,) * limits, 1, "d.k", watchers=watchers) if rule else DescriptorPlan(None, (), 1)
        for rule in rules
    )
    return PlanTemplate("edge", True, tuple(step for one in descriptor_plans for step in one.steps), descriptor_plans)


PLAIN = Rule("edge.user", (STEP.limit,), position=Position("rules.yaml", 3, 5))
LEASED = Rule("edge.user", (STEP.limit,), hot=LeasePolicy(100_000))
ONE, ONE_LEASED = template_of(PLAIN), template_of(LEASED)


@cache
def key_of(name: str) -> bytes:
    return b"rl:{edge/user=%s}:fixed_window:60" % name.encode()


class Keyed(NamedTuple):
    keys: tuple[bytes, ...]


class Call(NamedTuple):
    template: PlanTemplate
    prepared: Keyed | None


@cache
def call_of(*keys: bytes, template: PlanTemplate = ONE) -> Call:
    return Call(template, Keyed(keys) if keys else None)


@cache
def decided(template: PlanTemplate, *readings: Reading, remembered: bool = False) -> Decision:
    answer = StoreResult.of(any(not reading.allowed for reading in readings), 0, readings)
    return decision_of(template, answer)._replace(remembered=remembered)


@dataclass
class Harness:
    """HotKeys with a manual clock."""

    warn_per_second: int = 0
    now_s: float = 0.0
    random: Random = field(default_factory=lambda: Random(1))

    def __post_init__(self) -> None:
        self.hot_keys = HotKeys(self.warn_per_second, lambda: self.now_s, self.random.random)

    def ask(self, *names: str, reading: Reading = OK, template: PlanTemplate = ONE, remembered: bool = False) -> None:
        """Observe all calls in one batch."""
        calls = [call_of(key_of(name), template=template) for name in names]
        self.hot_keys.observe(calls, [decided(template, reading, remembered=remembered)] * len(calls))

    def ask_for(self, seconds: float, name: str, per_second: int, **how: object) -> None:
        for _ in range(round(seconds * per_second)):
            self.ask(name, **how)  # type: ignore[arg-type]
            self.now_s += 1 / per_second

    def hottest(self, limit: int = 5) -> list[tuple[str, int]]:
        rows = self.hot_keys.report().hottest(limit)
        return [(row.key, round(row.per_second)) for row in rows]


def names_of(rows: Sequence[tuple[str, int]]) -> list[str]:
    return [key.removeprefix("rl:{edge/user=").removesuffix("}:fixed_window:60") for key, _ in rows]


@pytest.fixture
def harness() -> Harness:
    return Harness()


def test_rates_are_exact_under_low_load(harness: Harness) -> None:
    for _ in range(20):
        harness.ask("alice", "bob")
        harness.ask("alice", reading=OVER)
        harness.now_s += 0.1
    report = harness.hot_keys.report()
    assert (report.seconds, report.calls_per_second) == (pytest.approx(2), pytest.approx(30))
    alice, bob = report.hottest(5)
    assert (alice.key, alice.per_second) == ("rl:{edge/user=alice}:fixed_window:60", pytest.approx(20))
    assert (bob.per_second, bob.denied_per_second) == (pytest.approx(10), 0)
    assert [(row.key, row.denied_per_second) for row in report.most_denied(5)] == [(alice.key, pytest.approx(10))]


def zipf(random: Random, calls: int, names: int) -> list[str]:
    return random.choices([f"u{rank}" for rank in range(names)], [1 / (rank + 1) for rank in range(names)], k=calls)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 7, 500])
def test_the_hottest_of_many_thousand_callers_are_found(harness: Harness, batch: int) -> None:
    stream = zipf(harness.random, 40_000, 5_000)
    for at in range(0, len(stream), batch):
        harness.ask(*stream[at : at + batch])
        harness.now_s += 4.9 * batch / len(stream)
    assert set(names_of(harness.hottest(5))) == {"u0", "u1", "u2", "u3", "u4"}


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2, 64, 1000])
def test_rates_are_right_on_average_in_batches_of_any_size(batch: int) -> None:
    """Also for periodic calls: each batch begins with those of one caller."""
    harness = Harness()
    share, calls = 0.25, 100_000
    hot = round(batch * share) if batch > 2 else 1
    one = ["hot"] * hot + [f"cold{number}" for number in range(batch - hot)]
    for _ in range(calls // batch):
        harness.ask(*one)
        harness.now_s += 4.0 * batch / calls
    report = harness.hot_keys.report()
    (hottest,) = report.hottest(1)
    assert report.calls_per_second == pytest.approx(25_000, rel=0.05)
    assert hottest.per_second == pytest.approx(25_000 * hot / batch, rel=0.1)


@pytest.mark.slow
def test_a_hot_caller_is_found_among_many_one_time_callers() -> None:
    """One caller has 1 % of all calls, and each of the rest comes from a different caller."""
    harness = Harness()
    for number in range(20_000):
        harness.ask("hot" if number % 100 == 0 else f"cold{number}")
        harness.now_s += 0.0002
    ((key, per_second),) = harness.hottest(1)
    assert names_of([(key, 0)]) == ["hot"]
    assert per_second == pytest.approx(50, rel=0.35)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_callers(harness: Harness) -> None:
    for number in range(20_000):
        harness.ask(f"u{number}", reading=OVER, remembered=True)
        harness.now_s += 0.0008
        if number % 5000 == 0:
            assert len(harness.hot_keys.report().keys) <= 4 * 2 * MAX_KEPT
    assert len(harness.hot_keys.report().keys) > MAX_KEPT / 4


def test_old_calls_are_dropped_within_two_generations(harness: Harness) -> None:
    harness.ask_for(GENERATION_S, "early", 100)
    harness.ask_for(GENERATION_S, "late", 50)
    assert harness.hottest() == [(key_of("early").decode(), 50), (key_of("late").decode(), 25)]
    harness.ask_for(GENERATION_S, "late", 50)
    assert harness.hottest() == [(key_of("late").decode(), 50)]
    harness.now_s += 3600
    assert harness.hot_keys.report() == HotReport(1.0, 0.0, ())


def test_the_first_calls_are_not_reported_as_a_high_rate(harness: Harness) -> None:
    harness.now_s = 0.001
    harness.ask("alice")
    assert harness.hottest() == [(key_of("alice").decode(), 1)]


def test_descriptors_count_once_by_first_key_and_only_denying_ones_as_denied() -> None:
    harness = Harness()
    template = template_of(PLAIN, None, PLAIN, limits=2, harness=True)
    keys = [b"a1", b"a2", b"aw", b"b1", b"b2", b"bw"]
    call = call_of(*keys, template=template)
    harness.hot_keys.observe([call], [decided(template, OK, OK, Reading(0, 0, 0), OK, OVER, Reading(2, 0, 0))])
    harness.hot_keys.observe([call_of(template=template_of(None))], [decision_of(template_of(None), None)])
    report = harness.hot_keys.report()
    assert report.calls_per_second == 2
    assert {row.key: (row.per_second, row.denied_per_second) for row in report.keys} == {"a1": (1, 0), "b1": (1, 1)}


def test_calls_with_a_store_error_are_counted(harness: Harness) -> None:
    decisions: list[Decision | StoreError] = [StoreTimeout("late")]
    harness.hot_keys.observe([call_of(key_of("alice"))], decisions)
    harness.hot_keys.observe([], [])
    assert harness.hottest() == [(key_of("alice").decode(), 1)]


def test_a_key_is_decoded_as_its_store_encodes_it() -> None:
    key = key_of("a\r\nb".replace("\r\n", "%0D%0A"))
    hot_keys = HotKeys(clock=lambda: 0.0, decode_key=RedisKeyspace().decode_key)
    hot_keys.observe([call_of(b"$%d\r\n%s\r\n" % (len(key), key))], [decided(ONE, OK)])
    (row,) = as_json(hot_keys.report(), 5)["hottest"]
    assert row["key"] == key.decode()
    assert (row["domain"], row["descriptor"]) == ("edge", "user=a\r\nb")
    assert (row["rule"], row["leased"], row["per_second"], row["share"]) == ("edge.user", False, 1.0, 1.0)


def test_reports_of_several_processes_are_merged() -> None:
    one, other = Harness(), Harness()
    for _ in range(10):
        one.ask("alice", reading=OVER)
        other.ask("alice", "bob")
    both = merge_reports([one.hot_keys.report(), other.hot_keys.report()])
    assert both.calls_per_second == 30
    alice, bob = both.hottest(5)
    assert (alice.per_second, alice.denied_per_second, bob.per_second) == (20, 10, 10)
    assert merge_reports([]) == HotReport(0.0, 0.0, ())


def warnings(harness: Harness, seconds: float, name: str, per_second: int, **how: object) -> list[str]:
    with capture_logs() as logs:
        harness.ask_for(seconds, name, per_second, **how)
        harness.now_s += GENERATION_S
        harness.ask("somebody else")
    return [log["key"] for log in logs if log["event"] == "hot_key"]


def test_a_hot_counter_is_logged_once_in_ten_minutes() -> None:
    harness = Harness(warn_per_second=50)
    assert warnings(harness, 12, "alice", 80) == [key_of("alice").decode()]
    harness.now_s += REPEAT_WARNING_S / 2
    assert warnings(harness, 6, "alice", 80) == []
    harness.now_s += REPEAT_WARNING_S / 2
    assert warnings(harness, 6, "alice", 80) == [key_of("alice").decode()]


def test_the_warning_names_the_rule_and_is_truncated() -> None:
    harness = Harness(warn_per_second=50)
    with capture_logs() as logs:
        harness.ask_for(6, "x\x1b[2J\n" + "y" * 500, 80)
    (log,) = logs
    assert log["log_level"] == "warning"
    assert log["key"].startswith("rl:{edge/user=x\\x1b[2J\\nyyy")
    assert len(log["key"]) == MAX_LOGGED_KEY_LENGTH
    assert log["per_second"] == pytest.approx(80, abs=1)
    assert "rules.yaml:3:5" in log["advice"]
    assert "`hot: {lease: 100ms}`" in log["advice"]


@pytest.mark.parametrize(
    ("per_second", "how"),
    [
        (40, {}),
        (80, {"template": ONE_LEASED}),
        (80, {"reading": OVER, "remembered": True}),  # the store is not asked: a lease would change nothing
    ],
)
def test_counters_that_need_no_lease_are_not_logged(per_second: int, how: dict[str, object]) -> None:
    assert warnings(Harness(warn_per_second=50), 12, "alice", per_second, **how) == []
    assert warnings(Harness(warn_per_second=0), 12, "alice", 200) == []


def test_denials_by_the_store_are_logged() -> None:
    assert warnings(Harness(warn_per_second=50), 6, "alice", 80, reading=OVER) == [key_of("alice").decode()]


@pytest.mark.slow
def test_heavy_samples_make_no_counter_hot_by_chance() -> None:
    harness = Harness(warn_per_second=10)
    crowd = [f"u{number}" for number in range(1000)]
    with capture_logs() as logs:
        for _ in range(400):
            harness.ask(*crowd, template=ONE_LEASED)
        harness.now_s += GENERATION_S
        for number in range(2000):  # two a second from each of the first hundred callers
            harness.ask(crowd[number % 100])
            harness.now_s += 0.005
    assert logs == []
    assert any(row.per_second > 10 for row in harness.hot_keys.report().keys)


def test_warnings_are_rate_limited_and_the_hottest_come_first() -> None:
    harness = Harness(warn_per_second=10)
    with capture_logs() as logs:
        for _ in range(8 * 100):
            harness.ask(*(f"u{number}" for number in range(8) for _ in range(number + 1)))
            harness.now_s += 0.01
    assert len(logs) == MAX_WARNINGS
    assert names_of([(log["key"], 0) for log in logs])[0] == "u7"


def test_gauges_do_not_contain_keys(harness: Harness) -> None:
    assert dict(harness.hot_keys.gauges()) == {MAX_RATE: 0, OVER_THRESHOLD: 0}
    harness = Harness(warn_per_second=50)
    harness.ask_for(3, "alice", 80)
    harness.ask_for(1, "leased", 300, template=ONE_LEASED)
    assert dict(harness.hot_keys.gauges()) == {MAX_RATE: 75, OVER_THRESHOLD: 1}
