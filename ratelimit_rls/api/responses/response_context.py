"""Inputs of one response, from which all its headers and its body are built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ratelimit_rls.api.responses.formatting import rule_path, until_us
from ratelimit_rls.api.responses.limit_labels import LimitLabels
from ratelimit_rls.core.model import Decision, Rule, Status, Step


class ResponseContext(NamedTuple):
    """Decision, reported status and derived values of one response."""

    decision: Decision
    status: Status  # the reported one
    step: Step  # its limit
    rule: Rule  # its rule
    denying: Sequence[Status]  # statuses that deny the call; empty if it is allowed
    retry_after_s: int  # as sent, including jitter; 0: the call is allowed
    limit_labels: LimitLabels

    @property
    def path(self) -> str:
        return rule_path(self.decision.template.domain, self.rule)

    @property
    def reset_at_us(self) -> int:
        """Time when the reported limit allows the next call, or has fully recovered."""
        return self.decision.now_us + self.until_us

    @property
    def until_us(self) -> int:
        reading = self.status.reading
        return 0 if reading is None else until_us(reading)
