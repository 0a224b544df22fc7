"""The textbook: each algorithm as its definition says, in exact fractions, with nothing in common with lua/.

Retry and reset are not formulas here but searches for the first microsecond at which the answer changes, so that they
are right by definition. Slow, and meant to be.
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
    Answer,
    Charge,
    Limit,
    Outline,
    Penalty,
    Plan,
    Reading,
    Step,
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
    hits: list[list[int]] = field(default_factory=list)  # [moment, how many]

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
    """Token bucket, leaky bucket and GCRA: what is used comes back evenly, and never becomes less than nothing."""

    limit: Limit
    at: int = 0
    level: int = 0  # in parts of a request, as many as its window has microseconds: each brings back whole ones

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
    """The first microsecond from now at which something holds that then holds for ever."""
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
class Offender:
    """Who is watched by a penalty: what was refused, and the cooldown that followed."""

    violations: list[int] = field(default_factory=list)
    cooldown_ends: int = 0
    holds: bool = False

    def reading(self, penalty: Penalty, now: int, cost: int) -> Reading:
        if not self.violations:
            return Reading(0, 0, 0)
        recent = sum(1 for at in self.violations if at > now - penalty.within_us)
        refuses = cost >= 0 and self.holds and now < self.cooldown_ends
        told = min(recent, penalty.after + len(penalty.multipliers) - 1)
        reset = max(self.violations[-1] + penalty.within_us, self.cooldown_ends) - now
        return Reading(told, self.cooldown_ends - now if refuses else 0, max(0, reset))

    def went(self, penalty: Penalty, now: int, retry: int, admitted: bool) -> None:
        """`retry`: of the descriptor's own limits."""
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
    offenders: dict[bytes, Offender] = field(default_factory=dict)
    warned: set[bytes] = field(default_factory=set)

    def decide(self, plan: Plan, now: int, patience_us: int | None = None) -> Answer:
        before = copy.deepcopy(self.models)
        outline = plan.outline
        asked = list(_asked(plan))
        lowest = [self._usage(one, now) for one in asked]
        readings = [self._first_look(one, now, patience_us) for one in asked]
        hasty = [_is_hasty(one, reading, patience_us) for one, reading in zip(asked, readings, strict=True)]
        refused = self._refused(outline, asked, readings)
        if refused and not outline.shadow_mode:
            self.models = before
            for i, one in enumerate(asked):
                if isinstance(one.what, Step):
                    readings[i] = self._second_look(one.key, one.what, now, readings[i])
        admitted = outline.shadow_mode or not refused
        for i, one in enumerate(asked):
            if not isinstance(one.what, Step):
                beside = [readings[j] for j in one.beside]
                meant = [readings[j].retry_us for j in one.beside if not readings[j].allowed and not hasty[j]]
                readings[i] = self._settle(one, now, admitted, beside, meant, [lowest[j] for j in one.beside])
        return Answer(refused, now, tuple(readings))

    def _first_look(self, one: Asked, now: int, patience_us: int | None) -> Reading:
        match one.what:
            case Step():
                return self._spend(one.key, one.what, now, patience_us)
            case Penalty():
                return self._offender(one.key).reading(one.what, now, one.cost)
            case WarnAt():
                return Reading(0, 0, 0)

    def _second_look(self, key: bytes, step: Step, now: int, first: Reading) -> Reading:
        if step.charge is Charge.ALWAYS:
            # A limit that refused beside what is now undone goes on refusing.
            again = self._spend(key, step, now, None)
            return again if again.retry_us else again._replace(retry_us=first.retry_us)
        if not first.allowed:
            return first
        model = self._model(key, step)
        return Reading(floor(model.capacity - model.used(now)), 0, model.reset(now))

    def _usage(self, one: Asked, now: int) -> Fraction:
        """Thousandths, of a limit; watchers use nothing."""
        if not isinstance(one.what, Step):
            return Fraction(0)
        model = self._model(one.key, one.what)
        return Fraction(1000 * ceil(model.used(now)), model.capacity)

    def _settle(
        self,
        one: Asked,
        now: int,
        admitted: bool,
        beside: Sequence[Reading],
        meant: Sequence[int],
        lowest: Sequence[Fraction],
    ) -> Reading:
        """`meant`: for how long those refuse that do so by the rules, and not for want of patience."""
        if isinstance(one.what, Penalty):
            offender = self._offender(one.key)
            told = offender.reading(one.what, now, one.cost)
            if one.cost > 0 and not told.retry_us:
                offender.went(one.what, now, 0 if -1 in meant else max(meant, default=0), admitted)
                told = offender.reading(one.what, now, one.cost)
            return told
        assert isinstance(one.what, WarnAt)
        usages = [
            Fraction(1000 * (capacity - reading.left), capacity)
            for capacity, reading in zip(map(_capacity, one.steps), beside, strict=False)
        ]
        if max(map(min, usages, lowest)) < one.what.permille - 100:
            self.warned.discard(one.key)
        if max(usages) > one.what.permille:
            self.warned.add(one.key)
        is_refused = not all(reading.allowed for reading in beside)
        return Reading(2 if is_refused else int(one.key in self.warned), 0, 0)

    def _offender(self, key: bytes) -> Offender:
        return self.offenders.setdefault(key, Offender())

    def _refused(self, outline: Outline, asked: Sequence[Asked], readings: Sequence[Reading]) -> bool:
        over = [
            (one.what, not reading.allowed and not (isinstance(one.what, Step) and one.what.shadow_mode))
            for one, reading in zip(asked, readings, strict=True)
        ]
        is_quota = [isinstance(what, Step) and what.quota_mode for what, _ in over]
        quotas = [failed for (_, failed), quota in zip(over, is_quota, strict=True) if quota]
        quotas += [False] if outline.quota_passes else []
        others = [failed for (_, failed), quota in zip(over, is_quota, strict=True) if not quota]
        return any(others) or (bool(quotas) and all(quotas))

    def _model(self, key: bytes, step: Step) -> FixedWindow | SlidingLog | Bucket:
        model = self.models.setdefault(key, MODELS[step.limit.algorithm](step.limit))
        model.limit = step.limit
        return model

    def _spend(self, key: bytes, step: Step, now: int, patience_us: int | None) -> Reading:
        model, cost = self._model(key, step), step.cost
        always = step.charge is Charge.ALWAYS
        need = 1 if cost == 0 and not always else cost

        def fits(at: int) -> bool:
            return model.used(at) + need <= model.capacity

        over = cost >= 0 and not fits(now)
        retry = 0
        if over:
            retry = -1 if need > model.capacity else first_us(lambda us: us > 0 and fits(now + us))
        longest = step.max_delay_us if patience_us is None else min(step.max_delay_us, patience_us)
        waits = 0 < retry <= longest
        if cost != 0 and (always or waits or not over):
            model.add(now, cost)
        if waits:
            retry = -1 - retry if cost > 0 else 0
        elif over and retry > 0:
            retry = first_us(lambda us: us > 0 and fits(now + us + longest))
        return Reading(model.capacity - ceil(model.used(now)), retry, model.reset(now))


def _is_hasty(one: Asked, first: Reading, patience_us: int | None) -> bool:
    """Whether it is refused only because its caller cannot wait."""
    if not isinstance(one.what, Step) or first.retry_us <= 0 or patience_us is None:
        return False
    return first.retry_us + min(one.what.max_delay_us, patience_us) <= one.what.max_delay_us


def _capacity(step: Step) -> int:
    return step.limit.burst or step.limit.requests_per_unit


class Asked(NamedTuple):
    """One key of a plan with what it is for; a watcher knows which readings lie beside it."""

    key: bytes
    what: Step | Penalty | WarnAt
    cost: int
    steps: tuple[Step, ...] = ()
    beside: tuple[int, ...] = ()


def _asked(plan: Plan) -> Iterator[Asked]:
    keys = iter(plan.keys)
    at = 0
    for slot in plan.outline.slots:
        for step in slot.steps:
            yield Asked(next(keys), step, step.cost)
        before = tuple(range(at, at + len(slot.steps)))
        at += len(slot.steps)
        for watcher in slot.watchers:
            yield Asked(next(keys), watcher, slot.steps[0].cost, slot.steps, before)
            before = (*before, at)
            at += 1
