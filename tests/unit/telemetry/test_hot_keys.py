"""Hot keys: who is found, how well their rates are known, and that neither memory nor the log grows with callers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import NamedTuple

import pytest
from structlog.testing import capture_logs

from ratelimit_rls.core.decide import decide
from ratelimit_rls.core.model import (
    Answer,
    Charge,
    Decision,
    Hot,
    Limit,
    Outline,
    Position,
    Reading,
    Rule,
    Slot,
    Step,
    Unit,
    WarnAt,
)
from ratelimit_rls.errors import StoreError, StoreTimeout
from ratelimit_rls.telemetry.hot_keys import (
    GENERATION_S,
    HOTTEST,
    LONGEST_LOGGED,
    MOST_KEPT,
    MOST_WARNINGS,
    OVER_THRESHOLD,
    SILENT_S,
    HotKeys,
    HotReport,
    as_json,
    together,
)

STEP = Step(Limit(10, Unit.MINUTE), 1, Charge.ALWAYS)
OK, OVER = Reading(3, 0, 1), Reading(0, 5, 1)


def outline_of(*rules: Rule | None, limits: int = 1, watched: bool = False) -> Outline:
    watchers = (WarnAt(800),) if watched else ()
    slots = tuple(
        Slot(rule, (STEP,) * limits, 1, "d.k", watchers=watchers) if rule else Slot(None, (), 1) for rule in rules
    )
    return Outline("edge", True, tuple(step for slot in slots for step in slot.steps), slots)


PLAIN = Rule("edge.user", (STEP.limit,), position=Position("rules.yaml", 3, 5))
LEASED = Rule("edge.user", (STEP.limit,), hot=Hot(100_000))
ONE, ONE_LEASED = outline_of(PLAIN), outline_of(LEASED)


@cache
def key_of(name: str) -> bytes:
    return b"rl:{edge/user=%s}:fixed_window:60" % name.encode()


class Keyed(NamedTuple):
    keys: tuple[bytes, ...]


class Call(NamedTuple):
    outline: Outline
    prepared: Keyed | None


@cache
def call_of(*keys: bytes, outline: Outline = ONE) -> Call:
    return Call(outline, Keyed(keys) if keys else None)


@cache
def decided(outline: Outline, *readings: Reading, remembered: bool = False) -> Decision:
    answer = Answer(any(not reading.allowed for reading in readings), 0, readings)
    return decide(outline, answer)._replace(remembered=remembered)


@dataclass
class Watched:
    """Hot keys on a clock of the test's own."""

    warn_per_second: int = 0
    now_s: float = 0.0
    random: Random = field(default_factory=lambda: Random(1))

    def __post_init__(self) -> None:
        self.hot_keys = HotKeys(self.warn_per_second, lambda: self.now_s, self.random.random)

    def ask(self, *names: str, reading: Reading = OK, outline: Outline = ONE, remembered: bool = False) -> None:
        """All of them in one batch."""
        calls = [call_of(key_of(name), outline=outline) for name in names]
        self.hot_keys.observe(calls, [decided(outline, reading, remembered=remembered)] * len(calls))

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
def watched() -> Watched:
    return Watched()


def test_a_quiet_service_is_told_of_exactly(watched: Watched) -> None:
    for _ in range(20):
        watched.ask("alice", "bob")
        watched.ask("alice", reading=OVER)
        watched.now_s += 0.1
    report = watched.hot_keys.report()
    assert (report.seconds, report.calls_per_second) == (pytest.approx(2), pytest.approx(30))
    alice, bob = report.hottest(5)
    assert (alice.key, alice.per_second) == ("rl:{edge/user=alice}:fixed_window:60", pytest.approx(20))
    assert (bob.per_second, bob.refused_per_second) == (pytest.approx(10), 0)
    assert [(row.key, row.refused_per_second) for row in report.most_refused(5)] == [(alice.key, pytest.approx(10))]


def zipf(random: Random, calls: int, names: int) -> list[str]:
    return random.choices([f"u{rank}" for rank in range(names)], [1 / (rank + 1) for rank in range(names)], k=calls)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 7, 500])
def test_of_many_thousand_callers_the_hottest_are_found(watched: Watched, batch: int) -> None:
    stream = zipf(watched.random, 40_000, 5_000)
    for at in range(0, len(stream), batch):
        watched.ask(*stream[at : at + batch])
        watched.now_s += 4.9 * batch / len(stream)
    assert set(names_of(watched.hottest(5))) == {"u0", "u1", "u2", "u3", "u4"}


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2, 64, 1000])
def test_rates_are_right_on_average_in_batches_of_any_size(batch: int) -> None:
    """Of calls that come in a rhythm, too: each batch begins with those of one caller."""
    watched = Watched()
    share, calls = 0.25, 100_000
    hot = round(batch * share) if batch > 2 else 1
    one = ["hot"] * hot + [f"cold{number}" for number in range(batch - hot)]
    for _ in range(calls // batch):
        watched.ask(*one)
        watched.now_s += 4.0 * batch / calls
    report = watched.hot_keys.report()
    (hottest,) = report.hottest(1)
    assert report.calls_per_second == pytest.approx(25_000, rel=0.05)
    assert hottest.per_second == pytest.approx(25_000 * hot / batch, rel=0.1)


@pytest.mark.slow
def test_nobody_hides_behind_many_others() -> None:
    """1 % of all calls, and a caller that never comes again for each of the rest."""
    watched = Watched()
    for number in range(20_000):
        watched.ask("hot" if number % 100 == 0 else f"cold{number}")
        watched.now_s += 0.0002
    ((key, per_second),) = watched.hottest(1)
    assert names_of([(key, 0)]) == ["hot"]
    assert per_second == pytest.approx(50, rel=0.35)


@pytest.mark.slow
def test_what_is_kept_does_not_grow_with_callers(watched: Watched) -> None:
    for number in range(20_000):
        watched.ask(f"u{number}", reading=OVER, remembered=True)
        watched.now_s += 0.0008
        if number % 5000 == 0:
            assert len(watched.hot_keys.report().keys) <= 4 * 2 * MOST_KEPT
    assert len(watched.hot_keys.report().keys) > MOST_KEPT / 4


def test_what_is_over_is_forgotten_within_two_generations(watched: Watched) -> None:
    watched.ask_for(GENERATION_S, "early", 100)
    watched.ask_for(GENERATION_S, "late", 50)
    assert watched.hottest() == [(key_of("early").decode(), 50), (key_of("late").decode(), 25)]
    watched.ask_for(GENERATION_S, "late", 50)
    assert watched.hottest() == [(key_of("late").decode(), 50)]
    watched.now_s += 3600
    assert watched.hot_keys.report() == HotReport(1.0, 0.0, ())


def test_the_first_calls_are_no_rush(watched: Watched) -> None:
    watched.now_s = 0.001
    watched.ask("alice")
    assert watched.hottest() == [(key_of("alice").decode(), 1)]


def test_every_descriptor_counts_once_by_its_first_key_and_only_those_that_refuse_as_refused() -> None:
    watched = Watched()
    outline = outline_of(PLAIN, None, PLAIN, limits=2, watched=True)
    keys = [b"a1", b"a2", b"aw", b"b1", b"b2", b"bw"]
    call = call_of(*keys, outline=outline)
    watched.hot_keys.observe([call], [decided(outline, OK, OK, Reading(0, 0, 0), OK, OVER, Reading(2, 0, 0))])
    watched.hot_keys.observe([call_of(outline=outline_of(None))], [decide(outline_of(None), None)])
    report = watched.hot_keys.report()
    assert report.calls_per_second == 2
    assert {row.key: (row.per_second, row.refused_per_second) for row in report.keys} == {"a1": (1, 0), "b1": (1, 1)}


def test_calls_without_an_answer_were_asked_all_the_same(watched: Watched) -> None:
    decisions: list[Decision | StoreError] = [StoreTimeout("late")]
    watched.hot_keys.observe([call_of(key_of("alice"))], decisions)
    watched.hot_keys.observe([], [])
    assert watched.hottest() == [(key_of("alice").decode(), 1)]


def test_a_key_is_read_from_what_redis_is_sent(watched: Watched) -> None:
    key = key_of("a\r\nb".replace("\r\n", "%0D%0A"))
    watched.hot_keys.observe([call_of(b"$%d\r\n%s\r\n" % (len(key), key))], [decided(ONE, OK)])
    (row,) = as_json(watched.hot_keys.report(), 5)["hottest"]
    assert row["key"] == key.decode()
    assert (row["domain"], row["descriptor"]) == ("edge", "user=a\r\nb")
    assert (row["rule"], row["leased"], row["per_second"], row["share"]) == ("edge.user", False, 1.0, 1.0)


def test_several_processes_are_told_of_as_one() -> None:
    one, other = Watched(), Watched()
    for _ in range(10):
        one.ask("alice", reading=OVER)
        other.ask("alice", "bob")
    both = together([one.hot_keys.report(), other.hot_keys.report()])
    assert both.calls_per_second == 30
    alice, bob = both.hottest(5)
    assert (alice.per_second, alice.refused_per_second, bob.per_second) == (20, 10, 10)
    assert together([]) == HotReport(0.0, 0.0, ())


def warnings(watched: Watched, seconds: float, name: str, per_second: int, **how: object) -> list[str]:
    with capture_logs() as logs:
        watched.ask_for(seconds, name, per_second, **how)
        watched.now_s += GENERATION_S
        watched.ask("somebody else")
    return [log["key"] for log in logs if log["event"] == "hot key"]


def test_a_counter_over_the_rate_is_warned_of_once_in_ten_minutes() -> None:
    watched = Watched(warn_per_second=50)
    assert warnings(watched, 12, "alice", 80) == [key_of("alice").decode()]
    watched.now_s += SILENT_S / 2
    assert warnings(watched, 6, "alice", 80) == []
    watched.now_s += SILENT_S / 2
    assert warnings(watched, 6, "alice", 80) == [key_of("alice").decode()]


def test_the_warning_says_where_to_put_a_lease_and_is_no_longer_than_need_be() -> None:
    watched = Watched(warn_per_second=50)
    with capture_logs() as logs:
        watched.ask_for(6, "x\x1b[2J\n" + "y" * 500, 80)
    (log,) = logs
    assert log["log_level"] == "warning"
    assert log["key"].startswith("rl:{edge/user=x\\x1b[2J\\nyyy")
    assert len(log["key"]) == LONGEST_LOGGED
    assert log["per_second"] == pytest.approx(80, abs=1)
    assert "rules.yaml:3:5" in log["advice"]
    assert "`hot: {lease: 100ms}`" in log["advice"]


@pytest.mark.parametrize(
    ("per_second", "how"),
    [
        (40, {}),
        (80, {"outline": ONE_LEASED}),
        (80, {"reading": OVER, "remembered": True}),  # the store is not asked: a lease would change nothing
    ],
)
def test_what_needs_no_lease_is_not_warned_of(per_second: int, how: dict[str, object]) -> None:
    assert warnings(Watched(warn_per_second=50), 12, "alice", per_second, **how) == []
    assert warnings(Watched(warn_per_second=0), 12, "alice", 200) == []


def test_refusals_that_the_store_decides_are_warned_of() -> None:
    assert warnings(Watched(warn_per_second=50), 6, "alice", 80, reading=OVER) == [key_of("alice").decode()]


@pytest.mark.slow
def test_draws_that_stand_for_many_make_nobody_hot_by_chance() -> None:
    watched = Watched(warn_per_second=10)
    crowd = [f"u{number}" for number in range(1000)]
    with capture_logs() as logs:
        for _ in range(400):
            watched.ask(*crowd, outline=ONE_LEASED)
        watched.now_s += GENERATION_S
        for number in range(2000):  # two a second from each of the first hundred
            watched.ask(crowd[number % 100])
            watched.now_s += 0.005
    assert logs == []
    assert any(row.per_second > 10 for row in watched.hot_keys.report().keys)


def test_few_warnings_a_minute_the_hottest_first() -> None:
    watched = Watched(warn_per_second=10)
    with capture_logs() as logs:
        for _ in range(8 * 100):
            watched.ask(*(f"u{number}" for number in range(8) for _ in range(number + 1)))
            watched.now_s += 0.01
    assert len(logs) == MOST_WARNINGS
    assert names_of([(log["key"], 0) for log in logs])[0] == "u7"


def test_gauges_name_no_key(watched: Watched) -> None:
    assert dict(watched.hot_keys.gauges()) == {HOTTEST: 0, OVER_THRESHOLD: 0}
    watched = Watched(warn_per_second=50)
    watched.ask_for(3, "alice", 80)
    watched.ask_for(1, "leased", 300, outline=ONE_LEASED)
    assert dict(watched.hot_keys.gauges()) == {HOTTEST: 75, OVER_THRESHOLD: 1}
