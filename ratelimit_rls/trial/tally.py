"""What a rule set did to the traffic: for all calls together, and for every rule that was met."""

from __future__ import annotations

from dataclasses import dataclass

from ratelimit_rls.core.model import Code, Decision, Rule, Status
from ratelimit_rls.trial.series import Series

MOST_RULE_SERIES = 64
"""Rules whose refusals are also kept over time: those that refuse first. The others are counted all the same."""

_SECOND_US = 1_000_000


@dataclass(slots=True)
class RuleTally:
    rule: Rule
    calls: int = 0
    hits: int = 0
    refused: int = 0  # calls that were refused, and this rule was over its limit
    let_pass: int = 0  # calls over this rule's limit that passed all the same: in shadow mode, or for another quota
    first_us: int | None = None  # the first call over the limit, refused or let pass
    last_us: int | None = None
    peak: int = 0  # the most calls within one second by the clock
    peak_us: int = 0
    series: Series | None = None
    _second: int = -1
    _second_calls: int = 0

    def met(self, at_us: int, hits: int) -> None:
        self.calls += 1
        self.hits += hits
        second = at_us // _SECOND_US
        if second != self._second:
            self._second, self._second_calls = second, 0
        self._second_calls += 1
        if self._second_calls > self.peak:
            self.peak, self.peak_us = self._second_calls, second * _SECOND_US

    def over(self, at_us: int, refused: bool) -> None:
        self.refused += refused
        self.let_pass += not refused
        if self.first_us is None:
            self.first_us = at_us
        self.last_us = at_us
        if self.series is not None:
            self.series.add(at_us, refused=True)


class Tally:
    def __init__(self, width_us: int | None = None) -> None:
        self._width_us = width_us
        self._rules: dict[int, RuleTally] = {}  # by identity: a rule lives as long as its tree, and hashing one is dear
        self._series_left = MOST_RULE_SERIES
        self.series = Series(width_us)
        self.calls = 0
        self.refused = 0
        self.without_rule = 0  # calls of which no descriptor met a rule

    def record(self, decision: Decision, at_us: int) -> None:
        refused = decision.code is Code.OVER_LIMIT
        self.calls += 1
        self.refused += refused
        self.series.add(at_us, refused)
        met_any = False
        for status in decision.statuses:
            rule = status.slot.rule
            if rule is None:
                continue
            met_any = True
            tally = self._rules.get(id(rule))
            if tally is None:
                tally = self._rules[id(rule)] = RuleTally(rule)
            tally.met(at_us, status.slot.hits)
            if _is_over(status):
                self._over(tally, at_us, refused and status.code is Code.OVER_LIMIT)
        self.without_rule += not met_any

    def _over(self, tally: RuleTally, at_us: int, refused: bool) -> None:
        if tally.first_us is None and self._series_left:
            self._series_left -= 1
            tally.series = Series(self._width_us)
        tally.over(at_us, refused)

    def rules(self) -> list[RuleTally]:
        """Those that refuse most come first; then by path."""
        return sorted(self._rules.values(), key=lambda one: (-one.refused, -one.let_pass, one.rule.path))


def _is_over(status: Status) -> bool:
    return status.code is Code.OVER_LIMIT or (status.reading is not None and not status.reading.allowed)
