"""What a rule set did to the traffic: for all calls together, and for every rule that was met."""

from __future__ import annotations

from dataclasses import dataclass

from ratelimit_rls.core.model import Code, Decision, Outline, Rule, Status
from ratelimit_rls.trial.series import Series

MOST_RULE_SERIES = 64
"""Rules whose refusals are also kept over time: those that refuse first. The others are counted all the same."""

_SECOND_US = 1_000_000


@dataclass(slots=True)
class RuleTally:
    path: str
    position: str | None
    calls: int = 0
    hits: int = 0
    refused: int = 0  # calls that were refused, and this rule was over its limit
    let_pass: int = 0  # calls over this rule's limit that passed all the same: in shadow mode, or for another quota
    waited: int = 0  # calls that were admitted after a wait for this rule's slot
    longest_wait_us: int = 0
    first_us: int | None = None  # the first call over the limit, refused or let pass
    last_us: int | None = None
    peak: int = 0  # the most calls within one second by the clock
    peak_us: int = 0
    series: Series | None = None
    _second: int = -1
    _second_calls: int = 0

    def met(self, second: int, calls: int, hits: int) -> None:
        self.calls += calls
        self.hits += hits
        if second != self._second:
            self._second, self._second_calls = second, 0
        self._second_calls += calls
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

    def held(self, wait_us: int) -> None:
        self.waited += 1
        self.longest_wait_us = max(self.longest_wait_us, wait_us)


class Tally:
    """Every call is added; of one that a limit did not simply let through, the decision is told as well.

    Calls of one second that ask alike are counted together and passed on to their rules by `settle`, which keeps what a
    call costs independent of how many rules it meets.
    """

    def __init__(self, width_us: int | None = None) -> None:
        self._width_us = width_us
        self._rules: dict[int, RuleTally] = {}  # by identity: a rule lives as long as its tree, and hashing one is dear
        self._series_left = MOST_RULE_SERIES
        self._alike: dict[Outline, int] = {}
        self._second = -1
        self.series = Series(width_us)
        self.calls = 0
        self.refused = 0
        self.without_rule = 0  # calls of which no descriptor met a rule
        self.first_us: int | None = None
        self.last_us: int | None = None

    def add(self, outline: Outline, at_us: int, refused: bool) -> None:
        """Calls come in the order of their moments."""
        second = at_us // _SECOND_US
        if second != self._second:
            self.settle()
            self._second = second
            self.first_us = at_us if self.first_us is None else self.first_us
        alike = self._alike
        alike[outline] = alike.get(outline, 0) + 1
        self.series.add(at_us, refused)
        self.refused += refused
        self.last_us = at_us

    def settle(self) -> None:
        """Pass on what was only counted."""
        for outline, calls in self._alike.items():
            self.calls += calls
            rules = [(slot.rule, slot.hits) for slot in outline.slots if slot.rule is not None]
            for rule, hits in rules:
                self._of(rule).met(self._second, calls, calls * hits)
            self.without_rule += 0 if rules else calls
        self._alike.clear()

    def tell(self, decision: Decision, at_us: int) -> None:
        refused = decision.code is Code.OVER_LIMIT
        for status in decision.statuses:
            rule = status.slot.rule
            if rule is None:
                continue
            if _is_over(status):
                self._over(self._of(rule), at_us, refused and status.code is Code.OVER_LIMIT)
            elif decision.wait_us:
                wait_us = max([reading.wait_us for reading in status.readings], default=0)
                if wait_us:
                    self._of(rule).held(wait_us)

    def _of(self, rule: Rule) -> RuleTally:
        tally = self._rules.get(id(rule))
        if tally is None:
            tally = self._rules[id(rule)] = RuleTally(rule.path, str(rule.position) if rule.position else None)
        return tally

    def _over(self, tally: RuleTally, at_us: int, refused: bool) -> None:
        if tally.first_us is None and self._series_left:
            self._series_left -= 1
            tally.series = Series(self._width_us)
        tally.over(at_us, refused)

    def rules(self) -> list[RuleTally]:
        """Those that refuse most come first; then by path."""
        return sorted(self._rules.values(), key=lambda one: (-one.refused, -one.let_pass, one.path))


def _is_over(status: Status) -> bool:
    return status.code is Code.OVER_LIMIT or (status.reading is not None and not status.reading.allowed)
