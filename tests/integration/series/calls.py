"""Decisions to be noted, as the service would make them."""

from __future__ import annotations

from ratelimit_rls.core.decide import decide
from ratelimit_rls.core.model import (
    Answer,
    Charge,
    Descriptor,
    Entry,
    Limit,
    Outline,
    Position,
    Reading,
    Request,
    Rule,
    Slot,
    Step,
    Unit,
)
from ratelimit_rls.telemetry.ledger import Ledger

STEP = Step(Limit(10, Unit.MINUTE), 1, Charge.ALWAYS)
RULE = Rule("edge.user", (STEP.limit,), position=Position("rules.yaml", 1, 1))
OUTLINE = Outline("edge", True, (STEP,), (Slot(RULE, (STEP,), 1, "edge.user"),))
PASSED = decide(OUTLINE, Answer(False, 0, (Reading(3, 0, 1),)))
REFUSED = decide(OUTLINE, Answer(True, 0, (Reading(-1, 5_000_000, 1),)))


def call(
    ledger: Ledger, user: str, passed: int = 0, refused: int = 0, elapsed_s: float = 0.001, path: str = ""
) -> None:
    """So many calls of one user, decided together."""
    entries = (Entry("user", user), *([Entry("path", path)] if path else []))
    line = ledger.line(Request("edge", (Descriptor(entries),)), OUTLINE)
    decisions = [PASSED] * passed + [REFUSED] * refused
    ledger.note([line] * len(decisions), decisions, elapsed_s)
