"""The textbook: each algorithm as its definition says, in exact fractions, with nothing in common with lua/.

Retry and reset are not formulas here but searches for the first microsecond at which the answer changes, so that they
are right by definition. Slow, and meant to be.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil, floor

from ratelimit_rls.core.model import Algorithm, Answer, Charge, Limit, Outline, Plan, Reading, Step


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
    level: Fraction = Fraction(0)

    @property
    def capacity(self) -> int:
        return self.limit.burst

    def used(self, now: int) -> Fraction:
        back = Fraction((now - self.at) * self.limit.requests_per_unit, self.limit.window_us)
        return max(Fraction(0), self.level - back)

    def add(self, now: int, hits: int) -> None:
        self.level, self.at = max(Fraction(0), self.used(now) + hits), now

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
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


class Oracle:
    def __init__(self) -> None:
        self.models: dict[bytes, FixedWindow | SlidingLog | Bucket] = {}

    def decide(self, plan: Plan, now: int) -> Answer:
        before = copy.deepcopy(self.models)
        outline = plan.outline
        asked = list(zip(plan.keys, outline.steps, strict=True))
        readings = [self._spend(key, step, now) for key, step in asked]
        refused = self._refused(outline, readings)
        if refused and not outline.shadow_mode:
            self.models = before
            for i, (key, step) in enumerate(asked):
                if step.charge is Charge.ALWAYS:
                    # A limit that refused beside what is now undone goes on refusing.
                    again = self._spend(key, step, now)
                    readings[i] = again if again.retry_us else again._replace(retry_us=readings[i].retry_us)
                elif readings[i].allowed:
                    model = self._model(key, step)
                    readings[i] = Reading(floor(model.capacity - model.used(now)), 0, model.reset(now))
        return Answer(refused, now, tuple(readings))

    def _refused(self, outline: Outline, readings: Sequence[Reading]) -> bool:
        over = [
            (step, not reading.allowed and not step.shadow_mode)
            for step, reading in zip(outline.steps, readings, strict=True)
        ]
        quotas = [failed for step, failed in over if step.quota_mode] + ([False] if outline.quota_passes else [])
        return any(failed for step, failed in over if not step.quota_mode) or (bool(quotas) and all(quotas))

    def _model(self, key: bytes, step: Step) -> FixedWindow | SlidingLog | Bucket:
        model = self.models.setdefault(key, MODELS[step.limit.algorithm](step.limit))
        model.limit = step.limit
        return model

    def _spend(self, key: bytes, step: Step, now: int) -> Reading:
        model, cost = self._model(key, step), step.cost
        always = step.charge is Charge.ALWAYS
        need = 1 if cost == 0 and not always else cost

        def fits(at: int) -> bool:
            return model.used(at) + need <= model.capacity

        over = cost >= 0 and not fits(now)
        if cost != 0 and (always or not over):
            model.add(now, cost)
        retry = 0
        if over:
            retry = -1 if need > model.capacity else first_us(lambda us: us > 0 and fits(now + us))
        return Reading(model.capacity - ceil(model.used(now)), retry, model.reset(now))
