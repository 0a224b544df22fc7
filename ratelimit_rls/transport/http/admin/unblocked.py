"""How callers would stand if none of them were blocked: whose counters are whose, and which limits wait for them."""

from __future__ import annotations

from ratelimit_rls.core.model import Subject
from ratelimit_rls.core.standing import Standing, Standings


class Unblocked:
    """core.standing.Standings."""

    def __init__(self, standings: Standings) -> None:
        self._standings = standings

    def of(self, kind: Subject, subject: str, tier: str) -> Standing:
        standing = self._standings.of(kind, subject, tier)
        return standing if standing.block is None else Standing(standing.limits, standing.source)
