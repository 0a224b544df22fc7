"""Test oracle: each algorithm by its definition, in exact fractions, independent of lua/.

Retry and reset are not formulas but searches for the first microsecond at which the result changes, so that they are
right by definition. Speed does not matter here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil, floor
from typing import NamedTuple

from ratelimit_rls.core.model import (
    Algorithm,
    Charge,
    Limit,
    Penalty,
    Plan,
    PlanTemplate,
    Reading,
    Step,
    StoreResult,
    WarnAt,
)


@dataclass
class FixedWindow:
    limit: Limit
    counts: dict[int, int] = field(default_factory=dict)

    @property
    def capacity(self) -> int:
        return self.limit.requests_per_unit

    def used(self, now: int) -> Fraction:
        return Fraction(self.counts.get(now // self.limit.window_us, 0))

    def add(self, now: int, hits: int) -> None:
        index = now // self.limit.window_us
        self.counts[index] = max(0, self.counts.get(index, 0) + hits)

    def reset(self, now: int) -> int:
        return self.limit.window_us - now % self.limit.window_us


@dataclass
class SlidingWindow(FixedWindow):
    def used(self, now: int) -> Fraction:
        window = self.limit.window_us
        index, into = divmod(now, window)
        return self.counts.get(index, 0) + Fraction(self.counts.get(index - 1, 0) * (window - into), window)

    def add(self, now: int, hits: int) -> None:
        index = now // self.limit.window_us
        kept = self.counts.get(index, 0) + hits
        self.counts[index] = max(0, kept)
        if kept < 0:
            self.counts[index - 1] = max(0, self.counts.get(index - 1, 0) + kept)

    def reset(self, now: int) -> int:
        return first_us(lambda us: self.used(now + us) == 0)


@dataclass
class SlidingLog:
    limit: Limit
    hits: list[list[int]] = field(default_factory=list)  # [time, count]

    @property
    def capacity(self) -> int:
        return self.limit.requests_per_unit

    def used(self, now: int) -> Fraction:
        return Fraction(sum(many for at, many in self.hits if at > now - self.limit.window_us))

    def add(self, now: int, hits: int) -> None:
        self.hits = [hit for hit in self.hits if hit[0] > now - self.limit.window_us]
        if hits > 0:
            self.hits.append([now, hits])
        while hits < 0 and self.hits:
            taken = min(-hits, self.hits[-1][1])
            self.hits[-1][1] -= taken
            hits += taken
            if self.hits[-1][1] == 0:
                self.hits.pop()

    def reset(self, now: int) -> int:
        return first_us(lambda us: self.used(now + us) == 0)


@dataclass
class Bucket:
    """Token bucket, leaky bucket and GCRA: usage decreases at a constant rate down to 0."""

    limit: Limit
    at: int = 0
    level: int = 0  # in fractions of a request, 1/window in µs, so that each microsecond restores an integer

    @property
    def capacity(self) -> int:
        return self.limit.burst

    def used(self, now: int) -> Fraction:
        return Fraction(self._level(now), self.limit.window_us)

    def _level(self, now: int) -> int:
        return max(0, self.level - (now - self.at) * self.limit.requests_per_unit)

    def add(self, now: int, hits: int) -> None:
        self.level, self.at = max(0, self._level(now) + hits * self.limit.window_us), now

    def reset(self, now: int) -> int:
        return first_us(lambda us: self.used(now + us) == 0)


MODELS: dict[Algorithm, Callable[[Limit], FixedWindow | SlidingLog | Bucket]] = {
    Algorithm.FIXED_WINDOW: FixedWindow,
    Algorithm.SLIDING_WINDOW: SlidingWindow,
    Algorithm.SLIDING_LOG: SlidingLog,
    Algorithm.TOKEN_BUCKET: Bucket,
    Algorithm.LEAKY_BUCKET: Bucket,
    Algorithm.GCRA: Bucket,
}


def first_us(holds: Callable[[int], bool]) -> int:
    """Return the first microsecond from now at which a monotonic condition holds."""
    if holds(0):
        return 0
    high = 1
    while not holds(high):
        high *= 64
    low = high // 64
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


@dataclass
class PenaltyState:
    """State of a penalty: recent violations, and the cooldown that followed."""

    violations: list[int] = field(default_factory=list)
    cooldown_ends: int = 0
    holds: bool = False

    def reading(self, penalty: Penalty, now: int, cost: int) -> Reading:
        if not self.violations:
            return Reading(0, 0, 0)
        recent = sum(1 for at in self.violations if at > now - penalty.within_us)
        denies = cost >= 0 and self.holds and now < self.cooldown_ends
        reported = min(recent, penalty.after + len(penalty.multipliers) - 1)
        reset = max(self.violations[-1] + penalty.within_us, self.cooldown_ends) - now
        return Reading(reported, self.cooldown_ends - now if denies else 0, max(0, reset))

    def record_outcome(self, penalty: Penalty, now: int, retry: int, admitted: bool) -> None:
        """Record the outcome of a call. `retry` is that of the descriptor's own limits."""
        if now < self.cooldown_ends:
            if admitted:
                self.cooldown_ends, self.holds = 0, False
        elif retry > 0:
            self.violations.append(now)
            recent = sum(1 for at in self.violations if at > now - penalty.within_us)
            index = min(max(0, recent - penalty.after), len(penalty.multipliers) - 1)
            self.cooldown_ends = now + retry * penalty.multipliers[index]
            self.holds = recent >= penalty.after


@dataclass
class Oracle:
    models: dict[bytes, FixedWindow | SlidingLog | Bucket] = field(default_factory=dict)
    offenders: dict[bytes, PenaltyState] = field(default_factory=dict)
    warned: set[bytes] = field(default_factory=set)

    def decide(self, plan: Plan, now: int, max_wait_us: int | None = None) -> StoreResult:
        before = copy.deepcopy(self.models)
        template = plan.template
        plan_keys = list(_plan_keys(plan))
        lowest = [self._usage(one, now) for one in plan_keys]
        readings = [self._first_look(one, now, max_wait_us) for one in plan_keys]
        hasty = [_is_hasty(one, reading, max_wait_us) for one, reading in zip(plan_keys, readings, strict=True)]
        denied = self._denied(template, plan_keys, readings)
        if denied and not template.shadow_mode:
            self.models = before
            for i, one in enumerate(plan_keys):
                if isinstance(one.what, Step):
                    readings[i] = self._second_look(one.key, one.what, now, readings[i])
        admitted = template.shadow_mode or not denied
        for i, one in enumerate(plan_keys):
            if not isinstance(one.what, Step):
                beside = [readings[j] for j in one.beside]
                meant = [readings[j].retry_us for j in one.beside if not readings[j].allowed and not hasty[j]]
                readings[i] = self._settle(one, now, admitted, beside, meant, [lowest[j] for j in one.beside])
        return StoreResult.of(denied, now, tuple(readings))

    def _first_look(self, one: PlanKey, now: int, max_wait_us: int | None) -> Reading:
        match one.what:
            case Step():
                return self._spend(one.key, one.what, now, max_wait_us)
            case Penalty():
                return self._offender(one.key).reading(one.what, now, one.cost)
            case WarnAt():
                return Reading(0, 0, 0)

    def _second_look(self, key: bytes, step: Step, now: int, first: Reading) -> Reading:
        if step.charge is Charge.ALWAYS:
            # A limit that denied next to a refunded one still denies.
            again = self._spend(key, step, now, None)
            return again if again.retry_us else again._replace(retry_us=first.retry_us)
        if not first.allowed:
            return first
        model = self._model(key, step)
        return Reading(floor(model.capacity - model.used(now)), 0, model.reset(now))

    def _usage(self, one: PlanKey, now: int) -> Fraction:
        """Return the usage of a limit in thousandths; 0 for monitors."""
        if not isinstance(one.what, Step):
            return Fraction(0)
        model = self._model(one.key, one.what)
        return Fraction(1000 * ceil(model.used(now)), model.capacity)

    def _settle(
        self,
        one: PlanKey,
        now: int,
        admitted: bool,
        beside: Sequence[Reading],
        meant: Sequence[int],
        lowest: Sequence[Fraction],
    ) -> Reading:
        """Settle the call. `meant` is the wait of limits that deny by the rules, not because the caller cannot wait."""
        if isinstance(one.what, Penalty):
            offender = self._offender(one.key)
            reported = offender.reading(one.what, now, one.cost)
            if one.cost > 0 and not reported.retry_us:
                offender.record_outcome(one.what, now, 0 if -1 in meant else max(meant, default=0), admitted)
                reported = offender.reading(one.what, now, one.cost)
            return reported
        assert isinstance(one.what, WarnAt)
        usages = [
            Fraction(1000 * (capacity - reading.left), capacity)
            for capacity, reading in zip(map(_capacity, one.steps), beside, strict=False)
        ]
        if max(map(min, usages, lowest)) < one.what.permille - 100:
            self.warned.discard(one.key)
        if max(usages) > one.what.permille:
            self.warned.add(one.key)
        is_denied = not all(reading.allowed for reading in beside)
        return Reading(2 if is_denied else int(one.key in self.warned), 0, 0)

    def _offender(self, key: bytes) -> PenaltyState:
        return self.offenders.setdefault(key, PenaltyState())

    def _denied(self, template: PlanTemplate, plan_keys: Sequence[PlanKey], readings: Sequence[Reading]) -> bool:
        over = [
            (one.what, not reading.allowed and not (isinstance(one.what, Step) and one.what.shadow_mode))
            for one, reading in zip(plan_keys, readings, strict=True)
        ]
        is_quota = [isinstance(what, Step) and what.quota_mode for what, _ in over]
        quotas = [failed for (_, failed), quota in zip(over, is_quota, strict=True) if quota]
        quotas += [False] if template.quota_passes else []
        others = [failed for (_, failed), quota in zip(over, is_quota, strict=True) if not quota]
        return any(others) or (bool(quotas) and all(quotas))

    def _model(self, key: bytes, step: Step) -> FixedWindow | SlidingLog | Bucket:
        model = self.models.setdefault(key, MODELS[step.limit.algorithm](step.limit))
        model.limit = step.limit
        return model

    def _spend(self, key: bytes, step: Step, now: int, max_wait_us: int | None) -> Reading:
        model, cost = self._model(key, step), step.cost
        always = step.charge is Charge.ALWAYS
        need = 1 if cost == 0 and not always else cost

        def fits(at: int) -> bool:
            return model.used(at) + need <= model.capacity

        over = cost >= 0 and not fits(now)
        retry = 0
        if over:
            retry = -1 if need > model.capacity else first_us(lambda us: us > 0 and fits(now + us))
        longest = step.max_delay_us if max_wait_us is None else min(step.max_delay_us, max_wait_us)
        waits = 0 < retry <= longest
        if cost != 0 and (always or waits or not over):
            model.add(now, cost)
        if waits:
            retry = -1 - retry if cost > 0 else 0
        elif over and retry > 0:
            retry = first_us(lambda us: us > 0 and fits(now + us + longest))
        return Reading(model.capacity - ceil(model.used(now)), retry, model.reset(now))


def _is_hasty(one: PlanKey, first: Reading, max_wait_us: int | None) -> bool:
    """Return True if it is denied only because the caller cannot wait."""
    if not isinstance(one.what, Step) or first.retry_us <= 0 or max_wait_us is None:
        return False
    return first.retry_us + min(one.what.max_delay_us, max_wait_us) <= one.what.max_delay_us


def _capacity(step: Step) -> int:
    return step.limit.burst or step.limit.requests_per_unit


class PlanKey(NamedTuple):
    """One key of a plan with its operation; a monitor also has the indices of its limits' states."""

    key: bytes
    what: Step | Penalty | WarnAt
    cost: int
    steps: tuple[Step, ...] = ()
    beside: tuple[int, ...] = ()


def _plan_keys(plan: Plan) -> Iterator[PlanKey]:
    keys = iter(plan.keys)
    at = 0
    for descriptor_plan in plan.template.descriptor_plans:
        for step in descriptor_plan.steps:
            yield PlanKey(next(keys), step, step.cost)
        before = tuple(range(at, at + len(descriptor_plan.steps)))
        at += len(descriptor_plan.steps)
        for watcher in descriptor_plan.watchers:
            yield PlanKey(next(keys), watcher, descriptor_plan.steps[0].cost, descriptor_plan.steps, before)
            before = (*before, at)
            at += 1
