"""Log of a sample of denials, with the rule that denied: enough to see why, without a line for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic

import structlog

from ratelimit_rls.core.model import Code, Decision, Status
from ratelimit_rls.telemetry.rule_labels import rule_label
from ratelimit_rls.telemetry.traces import TraceIds

_log = structlog.get_logger()


class DenialLog:
    """Logs the first denials of each second, at most `per_second`. The lines contain no client data."""

    def __init__(self, per_second: int, clock: Callable[[], float] = monotonic) -> None:
        self._per_second = per_second
        self._clock = clock
        self._second = -1
        self._left = 0

    @property
    def has_lines_left(self) -> bool:
        """Return True if lines are left in this second. Check it once per batch, so that a batch costs nothing more."""
        second = int(self._clock())
        if second != self._second:
            self._second, self._left = second, self._per_second
        return self._left > 0

    def record(self, decisions: Iterable[tuple[int, Decision]], ids: Callable[[int], TraceIds | None]) -> None:
        """Log denials. `ids` returns the trace ids of a decision by its number."""
        for number, decision in decisions:
            if decision.code is Code.OVER_LIMIT:
                self._write(decision, ids(number))
                self._left -= 1
                if not self._left:
                    return

    def _write(self, decision: Decision, ids: TraceIds | None) -> None:
        rejection = decision.template.rejection
        if rejection is not None:  # independent of the limits
            fields: dict[str, str | int] = {"reason": rejection.reason}
        else:
            fields = _status_fields(next(status for status in decision.statuses if status.code is Code.OVER_LIMIT))
        _log.info("call_denied", domain=decision.template.domain, **fields, **(ids._asdict() if ids else {}))


def _status_fields(status: Status) -> dict[str, str | int]:
    fields: dict[str, str | int] = {"rule": rule_label(status.descriptor_plan.rule)}
    if status.step is not None:
        limit = status.step.limit
        times = f"{limit.unit_multiplier} " if limit.unit_multiplier != 1 else ""
        fields["limit"] = f"{limit.requests_per_unit} per {times}{limit.unit.name.lower()}"
    fields["retry_after_s"] = status.reset_s
    return fields
