"""Recorder of calls: denials, a sample of admissions, and exact counts by the minute.

    decisions ─► UsageRecorder ─► a background task (database/usage/writer.py) ─► the database

Recording a call costs a fraction of a microsecond and never waits. All calls are counted exactly, each once, under the
rule that decided it: the one that denied, else the first with a limit. Everything is bounded whatever clients send, and
what exceeds a bound is counted.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain

from ratelimit_rls.core.decision import reported_limit
from ratelimit_rls.core.model import (
    Code,
    Decision,
    DescriptorPlan,
    Entry,
    Outcome,
    PlanTemplate,
    Request,
    StoreResult,
    construct,
)
from ratelimit_rls.core.plan import per_template
from ratelimit_rls.errors import StoreError
from ratelimit_rls.telemetry.decision_records import (
    DecisionRecord,
    RecordedCaller,
    capacity_of,
    denial_record,
    denying_status,
    early_denial_record,
    recorded_caller,
    rule_name,
    used_of_first_limit,
)
from ratelimit_rls.telemetry.histogram import bucket_of
from ratelimit_rls.telemetry.row_budget import RowBudget
from ratelimit_rls.telemetry.usage_counts import (
    ALL_OTHERS,
    ALLOWED,
    ALLOWED_FREE,
    ALLOWED_HIT,
    BLOCKED,
    OTHER,
    THROTTLED,
    THROTTLED_HIT,
    UNDECIDED,
    UNTIMED,
    DecisionOutcome,
    MinuteUsage,
    UsageCounts,
    UsageKey,
)

MAX_ENTRIES = 10_000
"""Default number of callers, rules and endpoints that are counted separately in one minute. Each becomes a row. The
heaviest callers appear early in the minute, so they are among them."""

MINUTE_S = 60

MAX_CLOCK_STEP_BACK_S = 300
"""If the clock is set back by no more than this, calls are still counted in the minute before the change."""

BUFFERED = "ratelimit.audit.buffered"
DROPPED = "ratelimit.audit.dropped"
SAMPLED_OUT = "ratelimit.audit.sampled_out"
USAGE_ENTRIES = "ratelimit.usage.entries"


class UsageEntry:
    """The usage counters for the calls of one planned request."""

    __slots__ = ("_admitted", "_codes", "_descriptor_plan", "_generation", "_is_known", "_key", "caller", "rule")

    def __init__(self, caller: RecordedCaller, template: PlanTemplate) -> None:
        self.caller = caller
        self._descriptor_plan, self.rule = _first_limited(template)  # for admissions
        self._key = construct(UsageKey, (caller.domain, self.rule, caller.user, caller.endpoint))
        self._is_known = template.domain_known  # the number of known domains is bounded
        self._admitted = ALLOWED_FREE if self._descriptor_plan is None else ALLOWED
        self._codes: dict[int, int] = {}  # the counter of its calls under that rule
        self._generation: object = None  # of that counter; if outdated, the counter must be looked up again

    def used(self, result: StoreResult) -> tuple[int | None, int | None]:
        """Return usage and capacity of the limit that is reported for a call that passes all its limits."""
        assert self._descriptor_plan is not None, "a call without limits has no result"
        steps = self._descriptor_plan.steps
        reported = reported_limit(result.numbers, 0, len(steps))
        capacity = capacity_of(steps[reported // 3])
        return capacity - result.numbers[reported], capacity


class UsageRecorder:
    def __init__(
        self,
        *,
        sample: float,
        max_waiting: int,
        max_lines: int = MAX_ENTRIES,
        denials_per_minute: int = 0,
        clock: Callable[[], float] = time.time,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`sample` is the fraction of admissions that are recorded; at most `max_waiting` decisions wait to be written.
        Of more denials than `denials_per_minute`, a sample is recorded (row_budget.py); 0 means all of them."""
        self._sample = sample
        self._max_waiting = max_waiting
        self._max_lines = max_lines
        self._clock = clock
        self._draw = draw
        self._ahead = self._gap()  # calls before the next sample
        self._waiting: deque[DecisionRecord] = deque()
        self._next_id = random.randrange(2**62)
        self.dropped = 0
        self._denial_budget = RowBudget(denials_per_minute)
        self._cells: dict[UsageKey, UsageCounts] = {}  # of this minute
        self._past: list[MinuteUsage] = []  # of earlier minutes, oldest first
        self._past_lines = 0
        self._generation = object()
        self.clock_resets = 0  # how often the clock was set back by more than MAX_CLOCK_STEP_BACK_S
        self._minute_s = 0
        self._minute_ends_s = -math.inf
        self._seen: set[UsageKey] = set()  # in this minute, including those already taken

    def usage_entry(self, request: Request, template: PlanTemplate) -> UsageEntry:
        """Return the entry of a request. Create it once per plan, after credentials were resolved, and keep it."""
        entries = chain.from_iterable([descriptor.entries for descriptor in request.descriptors])
        return self.usage_entry_of(entries, template, request.domain)

    def usage_entry_of(self, entries: Iterable[Entry], template: PlanTemplate, domain: str) -> UsageEntry:
        """Return the entry of a request of this domain with these entries, or with those of RECORDED_KEYS alone."""
        return UsageEntry(recorded_caller(entries, template.domain or domain), template)

    def note(
        self,
        entries: Sequence[UsageEntry | None],
        outcomes: Sequence[Outcome | StoreError],
        elapsed_s: float,
        skipped: Collection[int] = (),
    ) -> None:
        """Record a batch. `skipped` has the indexes of calls that got another response."""
        now_s = self._clock()
        if not self._minute_s - MAX_CLOCK_STEP_BACK_S <= now_s < self._minute_ends_s:
            self._begin_minute(now_s)
        if skipped:
            entries = [None if number in skipped else usage_entry for number, usage_entry in enumerate(entries)]
        latency_us = int(elapsed_s * 1e6)
        bucket = bucket_of(latency_us)
        if self._ahead < len(entries):
            self._sample_admissions(entries, outcomes, now_s, latency_us)
        else:
            self._ahead -= len(entries)
        generation, passed = self._generation, Code.OK
        for usage_entry, outcome in zip(entries, outcomes, strict=True):
            if usage_entry is None:
                continue
            if usage_entry._generation is generation and (
                outcome.__class__ is StoreResult or (outcome.__class__ is Decision and outcome.code is passed)
            ):
                codes = usage_entry._codes
                code = usage_entry._admitted + bucket
                if code in codes:
                    codes[code] += 1
                else:
                    codes[code] = 1
            else:
                self._record_one(usage_entry, outcome, now_s, latency_us, bucket)

    def record_denial(self, usage_entry: UsageEntry, reason: str, status: int) -> None:
        """Record a call that was denied before any limit was checked, such as a 401."""
        now_s = self._clock()
        if not self._minute_s - MAX_CLOCK_STEP_BACK_S <= now_s < self._minute_ends_s:
            self._begin_minute(now_s)
        _count(self._codes_of(usage_entry, ""), BLOCKED + UNTIMED)
        if self._denial_budget.admits(now_s) and self._has_room():
            self._append_denial(early_denial_record(now_s, self._new_id(), usage_entry.caller, reason, status))

    def _record_one(
        self, usage_entry: UsageEntry, outcome: Outcome | StoreError, now_s: float, latency_us: int, bucket: int
    ) -> None:
        """Record a call that was not simply admitted, or the first of its entry in a while."""
        if isinstance(outcome, StoreError):
            _count(self._own_codes(usage_entry), UNDECIDED + bucket)
        elif isinstance(outcome, StoreResult):
            _count(self._own_codes(usage_entry), usage_entry._admitted + bucket)
        elif outcome.code is Code.OK:
            # Under the global shadow mode a cached denial passes.
            _count(
                self._own_codes(usage_entry), (ALLOWED_HIT if outcome.remembered else usage_entry._admitted) + bucket
            )
            if outcome.template.shadow_mode:
                usage_entry._generation = None
        else:
            self._record_denied(usage_entry, outcome, now_s, latency_us, bucket)

    def _record_denied(
        self, usage_entry: UsageEntry, decision: Decision, now_s: float, latency_us: int, bucket: int
    ) -> None:
        rejection = decision.template.rejection
        if rejection is not None:
            code, status = BLOCKED, decision.statuses[rejection.descriptor_index]
        else:
            code, status = THROTTLED_HIT if decision.remembered else THROTTLED, denying_status(decision)
        if status.descriptor_plan is usage_entry._descriptor_plan:
            rule, codes = usage_entry.rule, self._own_codes(usage_entry)
        else:
            rule = rule_name(status.descriptor_plan)
            codes = self._codes_of(usage_entry, rule)
        _count(codes, code + bucket)
        if self._denial_budget.admits(now_s) and self._has_room():
            self._append_denial(
                denial_record(now_s, self._new_id(), usage_entry.caller, rule, decision, status, latency_us)
            )

    def _append_denial(self, rejection: DecisionRecord) -> None:
        self._waiting.append(rejection)
        texts = (*rejection.caller, rejection.rule, rejection.reason)
        self._denial_budget.spend(sum(len(text.encode("utf-8", "replace")) for text in texts))

    def _own_codes(self, usage_entry: UsageEntry) -> dict[int, int]:
        if usage_entry._generation is not self._generation:
            usage_entry._codes, usage_entry._generation = (
                self._codes_at(usage_entry._key, usage_entry),
                self._generation,
            )
        return usage_entry._codes

    def _codes_of(self, usage_entry: UsageEntry, rule: str) -> dict[int, int]:
        """Return the counter for calls of this entry under another rule than its own."""
        return self._codes_at(usage_entry._key._replace(rule=rule), usage_entry)

    def _codes_at(self, key: UsageKey, usage_entry: UsageEntry) -> dict[int, int]:
        counts = self._cells.get(key)
        if counts is None and key not in self._seen:
            if len(self._seen) >= self._max_lines or self.lines >= 2 * self._max_lines:
                key = self._shared_key(key, usage_entry)
                counts = self._cells.get(key)
            else:
                self._seen.add(key)
        if counts is None:
            counts = self._cells[key] = UsageCounts()
        return counts.codes

    def _shared_key(self, key: UsageKey, usage_entry: UsageEntry) -> UsageKey:
        """Return a shared key, by domain and rule, which the rules bound, unless usage is no longer taken."""
        if self.lines >= 3 * self._max_lines:
            return ALL_OTHERS
        return UsageKey(key.domain if usage_entry._is_known else OTHER, key.rule, OTHER, OTHER)

    def _begin_minute(self, now_s: float) -> None:
        """Begin a minute, hardly ever an earlier one: clocks are set back a little now and then. A clock that was far
        ahead is trusted again as soon as it is right; a repeated minute is counted separately (`clock_resets`)."""
        if self._cells:
            self._past.append(MinuteUsage(self._minute_s, self._cells))
            self._past_lines += len(self._cells)
            self._cells = {}
        minute_s = int(now_s // MINUTE_S) * MINUTE_S
        if minute_s < self._minute_s - MAX_CLOCK_STEP_BACK_S:
            self._minute_s = minute_s
            self.clock_resets += 1
        self._minute_s = max(self._minute_s, minute_s)
        self._minute_ends_s = self._minute_s + MINUTE_S
        self._generation = object()
        self._seen.clear()

    def _sample_admissions(
        self,
        entries: Sequence[UsageEntry | None],
        outcomes: Sequence[Outcome | StoreError],
        now_s: float,
        latency_us: int,
    ) -> None:
        """Record a uniform random sample of admissions. Denials are recorded regardless of the sample."""
        number = self._ahead
        while number < len(entries):
            usage_entry, outcome = entries[int(number)], outcomes[int(number)]
            if (
                usage_entry is not None
                and not isinstance(outcome, StoreError)
                and (isinstance(outcome, StoreResult) or outcome.code is Code.OK)
                and self._has_room()
            ):
                self._waiting.append(self._admission_record(usage_entry, outcome, now_s, latency_us))
            number += 1 + self._gap()
        self._ahead = number - len(entries)

    def _admission_record(
        self, usage_entry: UsageEntry, outcome: Outcome, now_s: float, latency_us: int
    ) -> DecisionRecord:
        used = usage_entry.used(outcome) if isinstance(outcome, StoreResult) else used_of_first_limit(outcome)
        allowed = DecisionOutcome.ALLOWED
        return DecisionRecord(
            now_s, self._new_id(), usage_entry.caller, usage_entry.rule, allowed, *used, latency_us=latency_us
        )

    def _gap(self) -> float:
        if self._sample >= 1:
            return 0
        return int(math.log(1 - self._draw()) / math.log1p(-self._sample)) if self._sample > 0 else math.inf

    def _has_room(self) -> bool:
        """Return True if a record fits. The newest is dropped: the earlier ones show how it began."""
        if len(self._waiting) < self._max_waiting:
            return True
        self.dropped += 1
        return False

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def take_decisions(self, capacity: int) -> list[DecisionRecord]:
        """Take the oldest decisions."""
        waiting = self._waiting
        return [waiting.popleft() for _ in range(min(capacity, len(waiting)))]

    def put_back(self, decisions: Sequence[DecisionRecord]) -> None:
        """Return decisions that were taken last and could not be written."""
        self._waiting.extendleft(reversed(decisions))
        while len(self._waiting) > self._max_waiting:
            self._waiting.pop()
            self.dropped += 1

    @property
    def minute_s(self) -> int:
        """The start of the current minute; nothing is added to earlier ones."""
        return self._minute_s

    @property
    def lines(self) -> int:
        """The number of entries counted separately since usage was last taken."""
        return self._past_lines + len(self._cells)

    @property
    def is_minute_over(self) -> bool:
        """Return True if nothing more is added to the current counts: the minute ended, or the clock was set back."""
        return not self._minute_s - MAX_CLOCK_STEP_BACK_S <= self._clock() < self._minute_ends_s

    def take_usage(self) -> list[MinuteUsage]:
        """Take what was counted since the last time, oldest first."""
        if self.is_minute_over:
            self._begin_minute(self._clock())
        taken = self._past
        if self._cells:
            taken.append(MinuteUsage(self._minute_s, self._cells))
        self._past, self._past_lines, self._cells = [], 0, {}
        self._generation = object()
        return taken

    @property
    def decisions(self) -> int:
        """Number of decisions that wait to be written."""
        return len(self._waiting)

    def gauges(self) -> Iterator[tuple[str, int]]:
        yield BUFFERED, self.decisions
        yield DROPPED, self.dropped
        yield SAMPLED_OUT, self._denial_budget.left_out
        yield USAGE_ENTRIES, self.lines


def _count(codes: dict[int, int], code: int) -> None:
    codes[code] = codes.get(code, 0) + 1


@per_template
def _first_limited(template: PlanTemplate) -> tuple[DescriptorPlan | None, str]:
    """Return the first descriptor with a limit, and the name of its rule."""
    descriptor_plan = next((one for one in template.descriptor_plans if one.steps), None)
    return descriptor_plan, rule_name(descriptor_plan)
