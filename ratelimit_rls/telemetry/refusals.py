"""A few of the refusals in the log, with the rule that refused: enough to see why without a line for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic

import structlog

from ratelimit_rls.core.model import Code, Decision, Status
from ratelimit_rls.telemetry.rule_names import told_as
from ratelimit_rls.telemetry.traces import Ids

log = structlog.get_logger()


class RefusalLog:
    """At most so many lines a second, the first refusals of it. What the client sent is in none of them."""

    def __init__(self, per_second: int, clock: Callable[[], float] = monotonic) -> None:
        self._per_second = per_second
        self._clock = clock
        self._second = -1
        self._left = 0

    @property
    def has_room(self) -> bool:
        """To be asked once per batch, so that a batch costs nothing more once the second's lines are written."""
        if not self._per_second:
            return False
        second = int(self._clock())
        if second != self._second:
            self._second, self._left = second, self._per_second
        return self._left > 0

    def note(self, decisions: Iterable[tuple[int, Decision]], ids: Callable[[int], Ids | None]) -> None:
        """`ids` are those of the trace that a decision, by its number, belongs to."""
        for number, decision in decisions:
            if decision.code is Code.OVER_LIMIT:
                self._write(decision, ids(number))
                self._left -= 1
                if not self._left:
                    return

    def _write(self, decision: Decision, ids: Ids | None) -> None:
        refusal = decision.outline.refusal
        if refusal is not None:  # whatever the limits say
            words: dict[str, str | int] = {"reason": refusal.reason}
        else:
            words = _words(next(status for status in decision.statuses if status.code is Code.OVER_LIMIT))
        log.info("refused", domain=decision.outline.domain, **words, **(ids._asdict() if ids else {}))


def _words(status: Status) -> dict[str, str | int]:
    words: dict[str, str | int] = {"rule": told_as(status.slot.rule)}
    if status.step is not None:
        limit = status.step.limit
        times = f"{limit.unit_multiplier} " if limit.unit_multiplier != 1 else ""
        words["limit"] = f"{limit.requests_per_unit} per {times}{limit.unit.name.lower()}"
    words["retry_after_s"] = status.reset_s
    return words
