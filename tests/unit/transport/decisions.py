"""Decisions for tests of responses: rules and store results, passed through the real `decision_of`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from ratelimit_rls.core.decision import decision_of
from ratelimit_rls.core.model import (
    Charge,
    Decision,
    DescriptorPlan,
    Limit,
    PlanTemplate,
    Position,
    Reading,
    Rule,
    Step,
    StoreResult,
    Unit,
    Watcher,
)
from ratelimit_rls.core.response_policy import HeaderFamily, ResponsePolicy

SECOND = 1_000_000
NOW_US = int(datetime(2026, 1, 25, 14, 31, 15, 400_000, UTC).timestamp() * SECOND)
"""Just before a full second, so that truncation instead of rounding up is detected."""

MINUTE_LIMIT = Limit(1000, Unit.MINUTE)
DAY_LIMIT = Limit(100_000, Unit.DAY)
WRITTEN = Position("edge.yaml", 3, 5)

TO_MINUTE_US, TO_DAY_US = 44_600_000, 34_124_600_000
"""Time from NOW_US to the end of its minute and its day."""


class Matched(NamedTuple):
    """A descriptor that matched a rule, with the store's results for its limits, then for its watchers."""

    rule: Rule
    readings: Sequence[Reading]

    def descriptor_plan(self) -> DescriptorPlan:
        modes = {"shadow_mode": self.rule.shadow_mode, "quota_mode": self.rule.quota_mode}
        steps = tuple(Step(limit, 1, Charge.ADMITTED, **modes) for limit in self.rule.limits)
        watchers: tuple[Watcher | None, ...] = (self.rule.penalty, self.rule.warn_at)
        return DescriptorPlan(
            self.rule, steps, 1, watchers=tuple(watcher for watcher in watchers if watcher is not None)
        )

    @property
    def denies(self) -> bool:
        return not self.rule.shadow_mode and any(not reading.allowed for reading in self.readings)


def rule(*limits: Limit, path: str = "edge.user", headers: Sequence[HeaderFamily] | None = None, **more: Any) -> Rule:
    style = more.pop("style", ResponsePolicy(None if headers is None else tuple(headers)))
    return Rule(path, limits or (MINUTE_LIMIT,), position=more.pop("position", WRITTEN), response_policy=style, **more)


def decided(*matched: Matched, now_us: int = NOW_US, shadow_mode: bool = False) -> Decision:
    """Return the decision that lua/calls.lua would make."""
    descriptor_plans = tuple(one.descriptor_plan() for one in matched)
    steps = tuple(step for descriptor_plan in descriptor_plans for step in descriptor_plan.steps)
    template = PlanTemplate("edge", True, steps, descriptor_plans, shadow_mode=shadow_mode)
    readings = tuple(reading for one in matched for reading in one.readings)
    return decision_of(template, StoreResult.of(_is_denied(matched), now_us, readings) if steps else None)


def _is_denied(matched: Sequence[Matched]) -> bool:
    limits = [one.denies for one in matched if not one.rule.quota_mode]
    quotas = [one.denies for one in matched if one.rule.quota_mode]
    return any(limits) or (bool(quotas) and all(quotas))
