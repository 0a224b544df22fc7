"""The usage recorder: every call is counted once, denials are recorded within bounds, and credentials never."""

from __future__ import annotations

from random import Random

import pytest

from ratelimit_rls.core.decision import allow_without_store, decision_of
from ratelimit_rls.core.model import (
    Charge,
    Decision,
    Descriptor,
    DescriptorPlan,
    Entry,
    Limit,
    PlanTemplate,
    Position,
    Reading,
    Rejection,
    Request,
    Rule,
    Step,
    StoreResult,
    Unit,
)
from ratelimit_rls.core.response_policy import DenyResponse
from ratelimit_rls.errors import StoreError, StoreTimeout
from ratelimit_rls.telemetry.decision_records import RecordedCaller
from ratelimit_rls.telemetry.histogram import bucket_of
from ratelimit_rls.telemetry.usage_counts import OTHER, DecisionOutcome, UsageCounts, UsageKey
from ratelimit_rls.telemetry.usage_recorder import (
    BUFFERED,
    DROPPED,
    SAMPLED_OUT,
    USAGE_ENTRIES,
    UsageEntry,
    UsageRecorder,
)

HERE = Position("rules.yaml", 1, 1)
STEP = Step(Limit(10, Unit.MINUTE), 1, Charge.ALWAYS)
QUOTA = Step(Limit(5, Unit.DAY), 1, Charge.ALWAYS, quota_mode=True)
BY_USER = DescriptorPlan(Rule("edge.user", (STEP.limit,), position=HERE), (STEP,), 1)
BY_PATH = DescriptorPlan(Rule("edge.path", (STEP.limit,), position=HERE, deny=DenyResponse(status=503)), (STEP,), 1)
BY_QUOTA = DescriptorPlan(Rule("edge.quota", (QUOTA.limit,), position=HERE), (QUOTA,), 1)
NONE = DescriptorPlan(None, (), 1)
OK, OVER = Reading(3, 0, 1), Reading(-1, 5_000_000, 1)
MINUTE_S = 1_700_000_040


class Clock:
    now_s = float(MINUTE_S)

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def template_of(
    *descriptor_plans: DescriptorPlan, shadow_mode: bool = False, rejection: Rejection | None = None
) -> PlanTemplate:
    steps = tuple(step for descriptor_plan in descriptor_plans for step in descriptor_plan.steps)
    return PlanTemplate("edge", True, steps, descriptor_plans, shadow_mode=shadow_mode, rejection=rejection)


def decided(template: PlanTemplate, *readings: Reading, denied: bool = False, remembered: bool = False) -> Decision:
    return decision_of(template, StoreResult.of(denied, 0, readings, remembered=remembered) if readings else None)


def request_of(**entries: str) -> Request:
    return Request("edge", (Descriptor(tuple(Entry(key, value) for key, value in entries.items())),))


def new(clock: Clock, sample: float = 0.0, max_waiting: int = 100, max_lines: int = 100) -> UsageRecorder:
    return UsageRecorder(
        sample=sample, max_waiting=max_waiting, max_lines=max_lines, clock=clock, draw=Random(1).random
    )


ONE = template_of(BY_USER)
PASSED, DENIED = decided(ONE, OK), decided(ONE, OVER, denied=True)


def numbers(counts: UsageCounts) -> tuple[int, ...]:
    return counts.sums[:6]


def taken(recorder: UsageRecorder) -> list[tuple[int, UsageKey, UsageCounts]]:
    return [(minute_s, key, counts) for minute_s, cells in recorder.take_usage() for key, counts in cells.items()]


def used(recorder: UsageRecorder) -> dict[tuple[str, str], tuple[int, ...]]:
    """Return by rule and user: total, allowed, throttled, blocked, cache hits, cache misses."""
    return {(key.rule, key.user): numbers(counts) for _, key, counts in taken(recorder)}


def test_each_call_is_counted_once_under_the_deciding_rule(clock: Clock) -> None:
    recorder = new(clock)
    both = template_of(NONE, BY_USER, BY_PATH)
    entry = recorder.usage_entry(request_of(user="alice"), both)
    recorder.note(
        [entry, entry, entry, None],
        [
            decided(both, OK, OK),
            decided(both, OK, OVER, denied=True),
            decided(both, OVER, OVER, denied=True, remembered=True),
            PASSED,
        ],
        0.001,
    )
    assert used(recorder) == {
        ("edge.user", "alice"): (2, 1, 1, 0, 1, 1),
        ("edge.path", "alice"): (1, 0, 1, 0, 0, 1),
    }


def test_a_denial_is_attributed_to_the_limit_and_not_to_a_quota(clock: Clock) -> None:
    recorder = new(clock)
    template = template_of(BY_QUOTA, BY_USER)
    entry = recorder.usage_entry(request_of(user="alice"), template)
    recorder.note([entry], [decided(template, OVER, OVER, denied=True)], 0.001)
    assert [one.rule for one in recorder.take_decisions(9)] == ["edge.user"]


def test_a_call_without_a_limit_has_no_rule_and_no_cache_miss(clock: Clock) -> None:
    recorder = new(clock)
    free = template_of(NONE)
    recorder.note([recorder.usage_entry(request_of(user="alice"), free)], [decided(free)], 0.001)
    assert used(recorder) == {("", "alice"): (1, 1, 0, 0, 0, 0)}


def test_undecided_calls_are_counted_and_not_recorded(clock: Clock) -> None:
    recorder = new(clock, sample=1.0)
    entry = recorder.usage_entry(request_of(user="alice"), ONE)
    decisions: list[Decision | StoreError] = [StoreTimeout("late"), allow_without_store(ONE)]
    recorder.note([entry, entry], decisions, 0.001)
    assert used(recorder) == {("edge.user", "alice"): (2, 1, 0, 0, 0, 2)}
    assert [one.outcome for one in recorder.take_decisions(9)] == [DecisionOutcome.ALLOWED]


def test_all_calls_are_allowed_in_shadow_mode(clock: Clock) -> None:
    recorder = new(clock)
    shadow = template_of(BY_USER, shadow_mode=True)
    entry = recorder.usage_entry(request_of(user="alice"), shadow)
    for remembered in (False, True, False):
        recorder.note([entry], [decided(shadow, OVER, denied=True, remembered=remembered)], 0.001)
    assert used(recorder) == {("edge.user", "alice"): (3, 3, 0, 0, 1, 2)}
    assert recorder.take_decisions(9) == []


def test_calls_that_got_another_response_are_skipped(clock: Clock) -> None:
    recorder = new(clock, sample=1.0)
    entry = recorder.usage_entry(request_of(user="alice"), ONE)
    recorder.note([entry, entry, entry], [PASSED, DENIED, PASSED], 0.001, skipped={0, 1})
    assert used(recorder) == {("edge.user", "alice"): (1, 1, 0, 0, 0, 1)}
    assert len(recorder.take_decisions(9)) == 1


def test_a_denial_is_recorded_with_its_decision(clock: Clock) -> None:
    recorder = new(clock)
    template = template_of(BY_PATH)
    entries = {"user_id": "alice", "remote_address": "10.0.0.1", "path": "/a?token=x#y", "method": "GET"}
    entry = recorder.usage_entry(request_of(**entries), template)
    recorder.note([entry, entry], [decided(template, OVER, denied=True)] * 2, 0.0007)
    first, second = recorder.take_decisions(9)
    assert first.caller == RecordedCaller("edge", "alice", "", "10.0.0.1", "/a", "GET")
    assert first[3:] == ("edge.path", DecisionOutcome.THROTTLED, 11, 10, 503, 5, 700, "")
    assert (first.at_s, second.log_id) == (clock.now_s, first.log_id + 1)


def test_blocked_callers_are_distinguished_from_limited_ones(clock: Clock) -> None:
    recorder = new(clock)
    template = template_of(NONE, BY_USER, rejection=Rejection("blocked", "no more", 403, descriptor_index=1))
    entry = recorder.usage_entry(request_of(user="alice"), template)
    recorder.note([entry], [decision_of(template, None)], 0.001)
    recorder.record_denial(entry, "unauthorized", 401)
    blocked, unauthorized = recorder.take_decisions(9)
    assert (blocked.outcome, blocked.rule, blocked.status, blocked.reason) == (
        DecisionOutcome.BLOCKED,
        "edge.user",
        403,
        "blocked",
    )
    assert (unauthorized.outcome, unauthorized.rule, unauthorized.status) == (DecisionOutcome.BLOCKED, "", 401)
    assert (unauthorized.reason, unauthorized.latency_us) == ("unauthorized", None)
    assert used(recorder) == {("edge.user", "alice"): (1, 0, 0, 1, 0, 0), ("", "alice"): (1, 0, 0, 1, 0, 0)}


def test_admissions_are_sampled_at_the_configured_rate(clock: Clock) -> None:
    recorder = new(clock, sample=0.1, max_waiting=10_000)
    entry = recorder.usage_entry(request_of(user="alice"), ONE)
    for size in (1, 3, 50, 1000, 8946):
        recorder.note([entry] * size, [PASSED] * size, 0.001)
    assert 900 < len(recorder.take_decisions(10_000)) < 1100
    assert recorder.dropped == 0


def test_sampling_none_or_all_admissions(clock: Clock) -> None:
    for sample, kept in ((0.0, 0), (1.0, 7)):
        recorder = new(clock, sample=sample)
        entry = recorder.usage_entry(request_of(user="alice"), ONE)
        recorder.note([entry] * 7, [PASSED] * 7, 0.001)
        assert [one[3:] for one in recorder.take_decisions(9)] == kept * [
            ("edge.user", DecisionOutcome.ALLOWED, 7, 10, None, None, 1000, "")
        ]


def test_the_newest_records_are_dropped_and_counted_when_full(clock: Clock) -> None:
    recorder = new(clock, max_waiting=5)
    entry = recorder.usage_entry(request_of(user="alice"), ONE)
    recorder.note([entry] * 7, [DENIED] * 7, 0.001)
    oldest = recorder.take_decisions(3)
    recorder.note([entry] * 2, [DENIED] * 2, 0.001)
    recorder.put_back(oldest)
    kept = recorder.take_decisions(9)
    assert kept[:3] == oldest
    assert [one.log_id - oldest[0].log_id for one in kept] == [0, 1, 2, 3, 4]
    assert dict(recorder.gauges()) == {BUFFERED: 0, DROPPED: 4, SAMPLED_OUT: 0, USAGE_ENTRIES: 1}


def test_a_flood_of_denials_is_sampled_and_usage_stays_exact(clock: Clock) -> None:
    recorder = UsageRecorder(sample=0, max_waiting=10_000, denials_per_minute=60, clock=clock)
    entry = recorder.usage_entry(request_of(user="mallory"), ONE)
    recorded = []
    for _ in range(10 * 60):  # 100 a second for ten minutes
        recorder.note([entry] * 50, [DENIED] * 50, 0.001)
        for _ in range(50):
            recorder.record_denial(entry, "no key", 401)
        recorded.append(len(recorder.take_decisions(10_000)))
        clock.now_s += 1.0
    assert recorded == [60, *[1] * 599]  # a minute's worth at once, then evenly spread
    assert dict(recorder.gauges())[SAMPLED_OUT] == 100 * 600 - sum(recorded)
    counted = [counts.sums for _, _, counts in taken(recorder)]
    assert sum(sums.throttled for sums in counted) == sum(sums.blocked for sums in counted) == 50 * 600


def test_admissions_are_recorded_during_a_flood_of_denials(clock: Clock) -> None:
    recorder = UsageRecorder(sample=1, max_waiting=1000, denials_per_minute=10, clock=clock)
    entry = recorder.usage_entry(request_of(user="alice"), ONE)
    recorder.note([entry] * 100, [PASSED] * 100, 0.001)
    recorder.note([entry] * 100, [DENIED] * 100, 0.001)
    recorder.note([entry] * 100, [PASSED] * 100, 0.001)
    outcomes = [one.outcome for one in recorder.take_decisions(1000)]
    assert (outcomes.count(DecisionOutcome.ALLOWED), outcomes.count(DecisionOutcome.THROTTLED)) == (200, 10)


def test_denials_with_much_text_are_recorded_less_often(clock: Clock) -> None:
    recorded = {}
    for path in ("/a", "/" + "a" * 499, "/" + "\N{GRINNING FACE}" * 499):
        recorder = UsageRecorder(sample=0, max_waiting=1000, denials_per_minute=100, clock=clock)
        entry = recorder.usage_entry(request_of(user="mallory", path=path), ONE)
        recorder.note([entry] * 1000, [DENIED] * 1000, 0.001)
        recorded[path] = len(recorder.take_decisions(1000))
    assert [*recorded.values()] == [100, 25, 8]


def test_minutes_are_separate_and_never_go_back(clock: Clock) -> None:
    recorder = new(clock)
    entry = recorder.usage_entry(request_of(user="alice"), ONE)
    for clock.now_s in (MINUTE_S + 59.9, MINUTE_S + 60, MINUTE_S + 30.0):  # the clock was set back
        recorder.note([entry], [PASSED], 0.001)
    assert {minute_s - MINUTE_S: counts.total for minute_s, _, counts in taken(recorder)} == {0: 1, 60: 2}
    assert recorder.minute_s == MINUTE_S + 60
    clock.now_s = MINUTE_S + 120
    assert recorder.take_usage() == []
    assert recorder.minute_s == MINUTE_S + 120


def test_taking_usage_returns_what_was_added_since(clock: Clock) -> None:
    recorder = new(clock)
    entry = recorder.usage_entry(request_of(user="alice"), ONE)
    for calls in (2, 3):
        recorder.note([entry] * calls, [PASSED] * calls, 0.001)
        ((minute_s, key, counts),) = taken(recorder)
        assert (minute_s, key, counts.total) == (MINUTE_S, UsageKey("edge", "edge.user", "alice", ""), calls)
    assert recorder.take_usage() == []


def test_callers_beyond_the_bound_are_counted_together(clock: Clock) -> None:
    recorder = new(clock, max_lines=2)
    for user in ("alice", "bob", "carol", "dave", "alice"):
        recorder.note([recorder.usage_entry(request_of(user=user), ONE)], [PASSED], 0.001)
    assert {key.user: counts.total for _, key, counts in taken(recorder)} == {"alice": 2, "bob": 1, OTHER: 2}
    for user in ("carol", "alice"):  # in the same minute
        recorder.note([recorder.usage_entry(request_of(user=user), ONE)], [PASSED], 0.001)
    assert {key.user: counts.total for _, key, counts in taken(recorder)} == {"alice": 1, OTHER: 1}
    clock.now_s += 60
    recorder.note([recorder.usage_entry(request_of(user="carol"), ONE)], [PASSED], 0.001)
    assert [key.user for _, key, _ in taken(recorder)] == ["carol"]


def test_memory_is_bounded_even_if_usage_is_never_taken(clock: Clock) -> None:
    recorder = new(clock, max_lines=10)
    for number in range(300):
        clock.now_s += 7
        unknown = PlanTemplate(f"domain {number}", False, (), (NONE,))
        recorder.note([recorder.usage_entry(request_of(user=f"u{number}"), unknown)], [decided(unknown)], 0.001)
        recorder.note([recorder.usage_entry(request_of(user=f"u{number}"), ONE)], [PASSED], 0.001)
    counted = taken(recorder)
    assert sum(counts.total for _, _, counts in counted) == 600
    assert len(counted) <= 30 + 300 * 7 / 60 + 1


def test_latencies_are_in_their_buckets(clock: Clock) -> None:
    recorder = new(clock)
    entry = recorder.usage_entry(request_of(user="alice"), ONE)
    recorder.note([entry, entry], [PASSED, DENIED], 0.0005)
    recorder.note([entry], [PASSED], 0.02)
    ((_, _, counts),) = taken(recorder)
    assert counts.sums.latencies == {bucket_of(500): 2, bucket_of(20_000): 1}
    counts.add(counts)
    assert counts.sums.latencies == {bucket_of(500): 4, bucket_of(20_000): 2}
    counts.clear()
    assert counts.total == 0


def caller_of(clock: Clock, **entries: str) -> RecordedCaller:
    entry: UsageEntry = new(clock).usage_entry(request_of(**entries), ONE)
    return entry.caller


def test_credentials_are_never_recorded(clock: Clock) -> None:
    key_id = "abcdefghij23"
    secret = "s" * 43
    assert caller_of(clock, api_key=key_id).api_key == key_id
    assert caller_of(clock, api_key=f"rlk_{key_id}_{secret}").api_key == key_id
    for foreign in (secret, "rlk_short", f"{key_id}_{secret[1:]}", key_id.upper()):
        assert secret[1:] not in str(caller_of(clock, api_key=foreign))
        assert caller_of(clock, api_key=foreign).api_key == ""


def test_recorded_texts_can_be_stored_in_every_database(clock: Clock) -> None:
    caller = caller_of(clock, user="a\0b\ud800" + "x" * 300, path="/" + "y" * 600, method="Z" * 99, ip="1" * 99)
    assert caller.user.startswith("a\ufffdb?xx")
    assert [len(text) for text in (caller.user, caller.endpoint, caller.method, caller.ip)] == [255, 500, 16, 64]
    "".join(caller).encode()


def test_the_first_entry_of_a_field_is_recorded(clock: Clock) -> None:
    request = Request(
        "edge",
        (
            Descriptor((Entry("generic_key", "x"), Entry("user", ""))),
            Descriptor((Entry("user_id", "first"), Entry("user", "second"))),
            Descriptor((Entry("client_ip", "10.0.0.1"), Entry("endpoint", "/a"))),
        ),
    )
    assert new(clock).usage_entry(request, ONE).caller == RecordedCaller("edge", "first", "", "10.0.0.1", "/a")


def test_an_overridden_limit_is_recorded_without_request_values(clock: Clock) -> None:
    own = template_of(DescriptorPlan(Rule("edge.user_secret", (STEP.limit,)), (STEP,), 1))
    assert new(clock).usage_entry(request_of(user="alice"), own).rule == "_override"
