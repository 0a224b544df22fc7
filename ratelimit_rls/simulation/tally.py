"""Counts of a rule set's decisions: in total, and per rule."""

from __future__ import annotations

from dataclasses import dataclass

from ratelimit_rls.core.model import Code, Decision, PlanTemplate, Rule, Status
from ratelimit_rls.simulation.histogram import TimeHistogram

MAX_RULE_SERIES = 64
"""Rules whose denials are also recorded over time: those that deny first. The others are only counted."""

_SECOND_US = 1_000_000


@dataclass(slots=True)
class RuleTally:
    path: str
    position: str | None
    calls: int = 0
    hits: int = 0
    denied: int = 0  # denied calls while this rule was over its limit
    passed_over_limit: int = 0  # calls over this rule's limit that passed: in shadow mode, or because of another quota
    delayed: int = 0  # calls admitted after a wait for this rule's slot
    max_wait_us: int = 0
    first_us: int | None = None  # first call over the limit, denied or not
    last_us: int | None = None
    peak: int = 0  # maximum number of calls in one clock second
    peak_us: int = 0
    series: TimeHistogram | None = None
    _second: int = -1
    _second_calls: int = 0

    def record_calls(self, second: int, calls: int, hits: int) -> None:
        self.calls += calls
        self.hits += hits
        if second != self._second:
            self._second, self._second_calls = second, 0
        self._second_calls += calls
        if self._second_calls > self.peak:
            self.peak, self.peak_us = self._second_calls, second * _SECOND_US

    def record_over_limit(self, at_us: int, denied: bool) -> None:
        self.denied += denied
        self.passed_over_limit += not denied
        if self.first_us is None:
            self.first_us = at_us
        self.last_us = at_us
        if self.series is not None:
            self.series.add(at_us, denied=True)

    def record_wait(self, wait_us: int) -> None:
        self.delayed += 1
        self.max_wait_us = max(self.max_wait_us, wait_us)


class Tally:
    """Totals of a rule set. Every call is added; for calls that a limit affected, the decision is recorded, too.

    Calls of one second with equal plans are counted together and passed on to their rules by `flush`, so that the cost
    of a call does not depend on its number of rules.
    """

    def __init__(self, width_us: int | None = None) -> None:
        self._width_us = width_us
        # By identity: rules live as long as their tree, and hashing one is expensive.
        self._rules: dict[int, RuleTally] = {}
        self._series_left = MAX_RULE_SERIES
        self._calls_by_template: dict[PlanTemplate, int] = {}
        self._second = -1
        self.series = TimeHistogram(width_us)
        self.calls = 0
        self.denied = 0
        self.without_rule = 0  # calls whose descriptors match no rule
        self.first_us: int | None = None
        self.last_us: int | None = None

    def add(self, template: PlanTemplate, at_us: int, denied: bool) -> None:
        """Add a call. Calls are in time order."""
        second = at_us // _SECOND_US
        if second != self._second:
            self.flush()
            self._second = second
            self.first_us = at_us if self.first_us is None else self.first_us
        counts = self._calls_by_template
        counts[template] = counts.get(template, 0) + 1
        self.series.add(at_us, denied)
        self.denied += denied
        self.last_us = at_us

    def flush(self) -> None:
        """Pass the counted calls on to their rules."""
        for template, calls in self._calls_by_template.items():
            self.calls += calls
            rules = [(one.rule, one.hits) for one in template.descriptor_plans if one.rule is not None]
            for rule, hits in rules:
                self._tally_of(rule).record_calls(self._second, calls, calls * hits)
            self.without_rule += 0 if rules else calls
        self._calls_by_template.clear()

    def record_decision(self, decision: Decision, at_us: int) -> None:
        denied = decision.code is Code.OVER_LIMIT
        for status in decision.statuses:
            rule = status.descriptor_plan.rule
            if rule is None:
                continue
            if _is_over(status):
                self._over(self._tally_of(rule), at_us, denied and status.code is Code.OVER_LIMIT)
            elif decision.wait_us:
                wait_us = max([reading.wait_us for reading in status.readings], default=0)
                if wait_us:
                    self._tally_of(rule).record_wait(wait_us)

    def _tally_of(self, rule: Rule) -> RuleTally:
        tally = self._rules.get(id(rule))
        if tally is None:
            tally = self._rules[id(rule)] = RuleTally(rule.path, str(rule.position) if rule.position else None)
        return tally

    def _over(self, tally: RuleTally, at_us: int, denied: bool) -> None:
        if tally.first_us is None and self._series_left:
            self._series_left -= 1
            tally.series = TimeHistogram(self._width_us)
        tally.record_over_limit(at_us, denied)

    def rules(self) -> list[RuleTally]:
        """Return the rules by number of denials, highest first, then by path."""
        return sorted(self._rules.values(), key=lambda one: (-one.denied, -one.passed_over_limit, one.path))


def _is_over(status: Status) -> bool:
    return status.code is Code.OVER_LIMIT or (status.reading is not None and not status.reading.allowed)
