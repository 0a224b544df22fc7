"""Recording of decisions as the service would make them."""

from __future__ import annotations

from ratelimit_rls.core.decision import decision_of
from ratelimit_rls.core.model import (
    Charge,
    Descriptor,
    DescriptorPlan,
    Entry,
    Limit,
    PlanTemplate,
    Position,
    Reading,
    Request,
    Rule,
    Step,
    StoreResult,
    Unit,
)
from ratelimit_rls.telemetry.usage_recorder import UsageRecorder

STEP = Step(Limit(10, Unit.MINUTE), 1, Charge.ALWAYS)
RULE = Rule("edge.user", (STEP.limit,), position=Position("rules.yaml", 1, 1))
TEMPLATE = PlanTemplate("edge", True, (STEP,), (DescriptorPlan(RULE, (STEP,), 1, "edge.user"),))
PASSED = decision_of(TEMPLATE, StoreResult.of(False, 0, (Reading(3, 0, 1),)))
DENIED = decision_of(TEMPLATE, StoreResult.of(True, 0, (Reading(-1, 5_000_000, 1),)))


def call(
    recorder: UsageRecorder, user: str, passed: int = 0, denied: int = 0, elapsed_s: float = 0.001, path: str = ""
) -> None:
    """Record this many requests of one user, decided in one batch."""
    entries = (Entry("user", user), *([Entry("path", path)] if path else []))
    line = recorder.usage_entry(Request("edge", (Descriptor(entries),)), TEMPLATE)
    decisions = [PASSED] * passed + [DENIED] * denied
    recorder.note([line] * len(decisions), decisions, elapsed_s)
