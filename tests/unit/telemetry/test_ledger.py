"""The ledger: each call counted once, every refusal kept while there is room, and nothing kept that must not be."""

from __future__ import annotations

from random import Random

import pytest

from ratelimit_rls.core.decide import allowed, decide
from ratelimit_rls.core.model import (
    Answer,
    Charge,
    Decision,
    Descriptor,
    Entry,
    Limit,
    Outline,
    Position,
    Reading,
    Refusal,
    Request,
    Rule,
    Slot,
    Step,
    Unit,
)
from ratelimit_rls.core.style import Deny
from ratelimit_rls.errors import StoreError, StoreTimeout
from ratelimit_rls.telemetry.counts import OTHER, Counts, UsageKey, Word
from ratelimit_rls.telemetry.histogram import bucket_of
from ratelimit_rls.telemetry.ledger import DROPPED, LINES, WAITING, Caller, Ledger, Line

HERE = Position("rules.yaml", 1, 1)
STEP = Step(Limit(10, Unit.MINUTE), 1, Charge.ALWAYS)
QUOTA = Step(Limit(5, Unit.DAY), 1, Charge.ALWAYS, quota_mode=True)
BY_USER = Slot(Rule("edge.user", (STEP.limit,), position=HERE), (STEP,), 1)
BY_PATH = Slot(Rule("edge.path", (STEP.limit,), position=HERE, deny=Deny(status=503)), (STEP,), 1)
BY_QUOTA = Slot(Rule("edge.quota", (QUOTA.limit,), position=HERE), (QUOTA,), 1)
NONE = Slot(None, (), 1)
OK, OVER = Reading(3, 0, 1), Reading(-1, 5_000_000, 1)
MINUTE_S = 1_700_000_040


class Clock:
    now_s = float(MINUTE_S)

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def outline_of(*slots: Slot, shadow_mode: bool = False, refusal: Refusal | None = None) -> Outline:
    steps = tuple(step for slot in slots for step in slot.steps)
    return Outline("edge", True, steps, slots, shadow_mode=shadow_mode, refusal=refusal)


def told(outline: Outline, *readings: Reading, refused: bool = False, remembered: bool = False) -> Decision:
    return decide(outline, Answer(refused, 0, readings, remembered=remembered) if readings else None)


def request_of(**entries: str) -> Request:
    return Request("edge", (Descriptor(tuple(Entry(key, value) for key, value in entries.items())),))


def new(clock: Clock, sample: float = 0.0, most_waiting: int = 100, most_lines: int = 100) -> Ledger:
    return Ledger(sample=sample, most_waiting=most_waiting, most_lines=most_lines, clock=clock, draw=Random(1).random)


ONE = outline_of(BY_USER)
PASSED, REFUSED = told(ONE, OK), told(ONE, OVER, refused=True)


def numbers(counts: Counts) -> tuple[int, ...]:
    return counts.sums[:6]


def taken(ledger: Ledger) -> list[tuple[int, UsageKey, Counts]]:
    return [(minute_s, key, counts) for minute_s, cells in ledger.take_usage() for key, counts in cells.items()]


def used(ledger: Ledger) -> dict[tuple[str, str], tuple[int, ...]]:
    """By rule and user: total, allowed, throttled, blocked, cache hits, cache misses."""
    return {(key.rule, key.user): numbers(counts) for _, key, counts in taken(ledger)}


def test_each_call_is_counted_once_under_the_rule_that_spoke(clock: Clock) -> None:
    ledger = new(clock)
    both = outline_of(NONE, BY_USER, BY_PATH)
    line = ledger.line(request_of(user="alice"), both)
    ledger.note(
        [line, line, line, None],
        [
            told(both, OK, OK),
            told(both, OK, OVER, refused=True),
            told(both, OVER, OVER, refused=True, remembered=True),
            PASSED,
        ],
        0.001,
    )
    assert used(ledger) == {
        ("edge.user", "alice"): (2, 1, 1, 0, 1, 1),
        ("edge.path", "alice"): (1, 0, 1, 0, 0, 1),
    }


def test_a_quota_that_is_over_is_not_blamed_for_what_a_limit_refused(clock: Clock) -> None:
    ledger = new(clock)
    outline = outline_of(BY_QUOTA, BY_USER)
    line = ledger.line(request_of(user="alice"), outline)
    ledger.note([line], [told(outline, OVER, OVER, refused=True)], 0.001)
    assert [one.rule for one in ledger.take_decisions(9)] == ["edge.user"]


def test_without_a_limit_there_is_no_rule_and_nothing_to_remember(clock: Clock) -> None:
    ledger = new(clock)
    free = outline_of(NONE)
    ledger.note([ledger.line(request_of(user="alice"), free)], [told(free)], 0.001)
    assert used(ledger) == {("", "alice"): (1, 1, 0, 0, 0, 0)}


def test_what_the_store_did_not_say_is_counted_and_not_recorded(clock: Clock) -> None:
    ledger = new(clock, sample=1.0)
    line = ledger.line(request_of(user="alice"), ONE)
    decisions: list[Decision | StoreError] = [StoreTimeout("late"), allowed(ONE)]
    ledger.note([line, line], decisions, 0.001)
    assert used(ledger) == {("edge.user", "alice"): (2, 1, 0, 0, 0, 2)}
    assert [one.word for one in ledger.take_decisions(9)] == [Word.ALLOWED]


def test_in_shadow_mode_all_are_allowed_remembered_or_not(clock: Clock) -> None:
    ledger = new(clock)
    shadow = outline_of(BY_USER, shadow_mode=True)
    line = ledger.line(request_of(user="alice"), shadow)
    for remembered in (False, True, False):
        ledger.note([line], [told(shadow, OVER, refused=True, remembered=remembered)], 0.001)
    assert used(ledger) == {("edge.user", "alice"): (3, 3, 0, 0, 1, 2)}
    assert ledger.take_decisions(9) == []


def test_those_told_something_else_are_left_out(clock: Clock) -> None:
    ledger = new(clock, sample=1.0)
    line = ledger.line(request_of(user="alice"), ONE)
    ledger.note([line, line, line], [PASSED, REFUSED, PASSED], 0.001, skipped={0, 1})
    assert used(ledger) == {("edge.user", "alice"): (1, 1, 0, 0, 0, 1)}
    assert len(ledger.take_decisions(9)) == 1


def test_a_refusal_is_kept_with_what_was_decided(clock: Clock) -> None:
    ledger = new(clock)
    outline = outline_of(BY_PATH)
    entries = {"user_id": "alice", "remote_address": "10.0.0.1", "path": "/a?token=x#y", "method": "GET"}
    line = ledger.line(request_of(**entries), outline)
    ledger.note([line, line], [told(outline, OVER, refused=True)] * 2, 0.0007)
    first, second = ledger.take_decisions(9)
    assert first.caller == Caller("edge", "alice", "", "10.0.0.1", "/a", "GET")
    assert first[3:] == ("edge.path", Word.THROTTLED, 11, 10, 503, 5, 700, "")
    assert (first.at_s, second.log_id) == (clock.now_s, first.log_id + 1)


def test_who_is_blocked_is_told_apart_from_who_is_limited(clock: Clock) -> None:
    ledger = new(clock)
    outline = outline_of(NONE, BY_USER, refusal=Refusal("blocked", "no more", 403, slot=1))
    line = ledger.line(request_of(user="alice"), outline)
    ledger.note([line], [decide(outline, None)], 0.001)
    ledger.note_refusal(line, "unauthorized", 401)
    blocked, unauthorized = ledger.take_decisions(9)
    assert (blocked.word, blocked.rule, blocked.status, blocked.reason) == (Word.BLOCKED, "edge.user", 403, "blocked")
    assert (unauthorized.word, unauthorized.rule, unauthorized.status) == (Word.BLOCKED, "", 401)
    assert (unauthorized.reason, unauthorized.latency_us) == ("unauthorized", None)
    assert used(ledger) == {("edge.user", "alice"): (1, 0, 0, 1, 0, 0), ("", "alice"): (1, 0, 0, 1, 0, 0)}


def test_admissions_are_drawn_as_often_as_was_said(clock: Clock) -> None:
    ledger = new(clock, sample=0.1, most_waiting=10_000)
    line = ledger.line(request_of(user="alice"), ONE)
    for size in (1, 3, 50, 1000, 8946):
        ledger.note([line] * size, [PASSED] * size, 0.001)
    assert 900 < len(ledger.take_decisions(10_000)) < 1100
    assert ledger.dropped == 0


def test_none_or_all_of_them(clock: Clock) -> None:
    for sample, kept in ((0.0, 0), (1.0, 7)):
        ledger = new(clock, sample=sample)
        line = ledger.line(request_of(user="alice"), ONE)
        ledger.note([line] * 7, [PASSED] * 7, 0.001)
        assert [one[3:] for one in ledger.take_decisions(9)] == kept * [
            ("edge.user", Word.ALLOWED, 7, 10, None, None, 1000, "")
        ]


def test_the_newest_are_dropped_for_want_of_room_and_counted(clock: Clock) -> None:
    ledger = new(clock, most_waiting=5)
    line = ledger.line(request_of(user="alice"), ONE)
    ledger.note([line] * 7, [REFUSED] * 7, 0.001)
    oldest = ledger.take_decisions(3)
    ledger.note([line] * 2, [REFUSED] * 2, 0.001)
    ledger.put_back(oldest)
    kept = ledger.take_decisions(9)
    assert kept[:3] == oldest
    assert [one.log_id - oldest[0].log_id for one in kept] == [0, 1, 2, 3, 4]
    assert dict(ledger.gauges()) == {WAITING: 0, DROPPED: 4, LINES: 1}


def test_minutes_are_counted_apart_and_never_go_back(clock: Clock) -> None:
    ledger = new(clock)
    line = ledger.line(request_of(user="alice"), ONE)
    for clock.now_s in (MINUTE_S + 59.9, MINUTE_S + 60, MINUTE_S + 30.0):  # it was set back
        ledger.note([line], [PASSED], 0.001)
    assert {minute_s - MINUTE_S: counts.total for minute_s, _, counts in taken(ledger)} == {0: 1, 60: 2}
    assert ledger.minute_s == MINUTE_S + 60
    clock.now_s = MINUTE_S + 120
    assert ledger.take_usage() == []
    assert ledger.minute_s == MINUTE_S + 120


def test_what_is_taken_is_what_came_since(clock: Clock) -> None:
    ledger = new(clock)
    line = ledger.line(request_of(user="alice"), ONE)
    for calls in (2, 3):
        ledger.note([line] * calls, [PASSED] * calls, 0.001)
        ((minute_s, key, counts),) = taken(ledger)
        assert (minute_s, key, counts.total) == (MINUTE_S, UsageKey("edge", "edge.user", "alice", ""), calls)
    assert ledger.take_usage() == []


def test_too_many_callers_are_counted_together(clock: Clock) -> None:
    ledger = new(clock, most_lines=2)
    for user in ("alice", "bob", "carol", "dave", "alice"):
        ledger.note([ledger.line(request_of(user=user), ONE)], [PASSED], 0.001)
    assert {key.user: counts.total for _, key, counts in taken(ledger)} == {"alice": 2, "bob": 1, OTHER: 2}
    for user in ("carol", "alice"):  # the minute is still the same
        ledger.note([ledger.line(request_of(user=user), ONE)], [PASSED], 0.001)
    assert {key.user: counts.total for _, key, counts in taken(ledger)} == {"alice": 1, OTHER: 1}
    clock.now_s += 60
    ledger.note([ledger.line(request_of(user="carol"), ONE)], [PASSED], 0.001)
    assert [key.user for _, key, _ in taken(ledger)] == ["carol"]


def test_memory_is_bounded_even_if_nobody_takes(clock: Clock) -> None:
    ledger = new(clock, most_lines=10)
    for number in range(300):
        clock.now_s += 7
        unknown = Outline(f"domain {number}", False, (), (NONE,))
        ledger.note([ledger.line(request_of(user=f"u{number}"), unknown)], [told(unknown)], 0.001)
        ledger.note([ledger.line(request_of(user=f"u{number}"), ONE)], [PASSED], 0.001)
    counted = taken(ledger)
    assert sum(counts.total for _, _, counts in counted) == 600
    assert len(counted) <= 30 + 300 * 7 / 60 + 1


def test_times_are_in_their_buckets(clock: Clock) -> None:
    ledger = new(clock)
    line = ledger.line(request_of(user="alice"), ONE)
    ledger.note([line, line], [PASSED, REFUSED], 0.0005)
    ledger.note([line], [PASSED], 0.02)
    ((_, _, counts),) = taken(ledger)
    assert counts.sums.latencies == {bucket_of(500): 2, bucket_of(20_000): 1}
    counts.add(counts)
    assert counts.sums.latencies == {bucket_of(500): 4, bucket_of(20_000): 2}
    counts.clear()
    assert counts.total == 0


def caller_of(clock: Clock, **entries: str) -> Caller:
    line: Line = new(clock).line(request_of(**entries), ONE)
    return line.caller


def test_a_credential_is_never_kept(clock: Clock) -> None:
    key_id = "abcdefghij23"
    secret = "s" * 43
    assert caller_of(clock, api_key=key_id).api_key == key_id
    assert caller_of(clock, api_key=f"rlk_{key_id}_{secret}").api_key == key_id
    for foreign in (secret, "rlk_short", f"{key_id}_{secret[1:]}", key_id.upper()):
        assert secret[1:] not in str(caller_of(clock, api_key=foreign))
        assert caller_of(clock, api_key=foreign).api_key == ""


def test_what_is_kept_can_be_stored_anywhere(clock: Clock) -> None:
    caller = caller_of(clock, user="a\0b\ud800" + "x" * 300, path="/" + "y" * 600, method="Z" * 99, ip="1" * 99)
    assert caller.user.startswith("a\ufffdb?xx")
    assert [len(text) for text in (caller.user, caller.endpoint, caller.method, caller.ip)] == [255, 500, 16, 64]
    "".join(caller).encode()


def test_the_first_entry_that_says_who_or_what_counts(clock: Clock) -> None:
    request = Request(
        "edge",
        (
            Descriptor((Entry("generic_key", "x"), Entry("user", ""))),
            Descriptor((Entry("user_id", "first"), Entry("user", "second"))),
            Descriptor((Entry("client_ip", "10.0.0.1"), Entry("endpoint", "/a"))),
        ),
    )
    assert new(clock).line(request, ONE).caller == Caller("edge", "first", "", "10.0.0.1", "/a")


def test_a_limit_that_came_with_the_request_is_not_named_by_its_values(clock: Clock) -> None:
    own = outline_of(Slot(Rule("edge.user_secret", (STEP.limit,)), (STEP,), 1))
    assert new(clock).line(request_of(user="alice"), own).rule == "_override"
