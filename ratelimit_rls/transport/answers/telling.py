"""One answer in the making: what every header and every body of it is made from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ratelimit_rls.core.model import Decision, Rule, Status, Step
from ratelimit_rls.transport.answers.vocabulary import Vocabulary
from ratelimit_rls.transport.answers.words import rule_path, until_us


class Telling(NamedTuple):
    decision: Decision
    status: Status  # spoken of
    step: Step  # its limit
    rule: Rule  # its rule
    blamed: Sequence[Status]  # what refuses, if the call is refused
    retry_after_s: int  # as told, jitter included; 0: the call passes
    vocabulary: Vocabulary

    @property
    def path(self) -> str:
        return rule_path(self.decision.outline.domain, self.rule)

    @property
    def reset_at_us(self) -> int:
        """When the limit that is spoken of lets the next one pass, or is whole again."""
        return self.decision.now_us + self.until_us

    @property
    def until_us(self) -> int:
        reading = self.status.reading
        return 0 if reading is None else until_us(reading)
