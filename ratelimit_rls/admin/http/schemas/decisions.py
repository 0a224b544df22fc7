"""Response bodies of decisions, explanations, simulations and recorded usage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field

from ratelimit_rls.admin.http.schemas.fields import (
    EnumValue,
    LimitList,
    LimitSource,
    OptionalPosition,
    PositionText,
    ResponseBody,
    TimestampText,
)
from ratelimit_rls.admin.http.schemas.resources import Block, Page
from ratelimit_rls.core import model
from ratelimit_rls.core.model import Code, Descriptor, Reading, Status, Step
from ratelimit_rls.identity.accounts import limit_fields

if TYPE_CHECKING:
    from ratelimit_rls.admin.decisions import ExplainedDescriptor

_US = 1_000_000

Total = Annotated[
    int, Field(description="All requests, including those that were decided by neither the store nor the rules.")
]
Throttled = Annotated[int, Field(description="Requests denied by a limit (over_limit).")]
Blocked = Annotated[int, Field(description="Requests rejected regardless of the limits.")]


class DescriptorEntry(ResponseBody):
    """An entry of a descriptor."""

    key: str
    value: str


class LimitStatus(ResponseBody):
    """A limit and its current state."""

    limit: dict[str, Any]
    remaining: int = Field(description="Requests that pass now; negative: debt.")
    retry_after_s: float | None = Field(description="Seconds until the next request passes; 0: now, null: never.")
    reset_after_s: float = Field(description="Seconds until the limit is entirely unused.")

    @classmethod
    def build(cls, step: Step, reading: Reading) -> Self:
        retry_us = reading.retry_us
        return cls(
            limit=limit_fields(step.limit),
            remaining=reading.left,
            retry_after_s=None if retry_us == -1 else max(0, retry_us) / _US,
            reset_after_s=reading.reset_us / _US,
        )


class DescriptorStatus(ResponseBody):
    """The decision about one descriptor."""

    entries: list[DescriptorEntry]
    code: str = Field(description="ok or over_limit.")
    rule: str | None = Field(description="Path of the matching rule; null: no limit applies.")
    unlimited: bool
    limits: list[LimitStatus]
    violations: int = Field(description="Recent violations, if the rule has a penalty.")
    cooldown_s: float
    state: str | None = Field(
        description="State of `warn_at`: normal, warning, or throttled (a limit or cooldown denies); null: the "
        "rule has none."
    )

    @classmethod
    def build(cls, descriptor: Descriptor, status: Status) -> Self:
        descriptor_plan = status.descriptor_plan
        readings = status.readings or ((status.reading,) if status.reading else ())
        return cls(
            entries=to_entries(descriptor),
            code=code_name(status.code),
            rule=descriptor_plan.rule.path if descriptor_plan.rule else None,
            unlimited=descriptor_plan.unlimited,
            limits=[LimitStatus.build(*pair) for pair in zip(descriptor_plan.steps, readings, strict=False)],
            violations=status.violations,
            cooldown_s=status.cooldown.retry_us / _US if status.cooldown else 0,
            state=status.state.name.lower() if status.state is not None else None,
        )


class Rejection(ResponseBody):
    """A rejection, which no limit decided."""

    reason: str = Field(description="blocked, or unauthorized: a credential is invalid.")
    until: TimestampText | None = Field(validation_alias="until_s")


class Decision(ResponseBody):
    """The decision about a request."""

    code: str = Field(
        description="ok or over_limit. Recorded decisions and usage name the same outcomes otherwise: ok is allowed, "
        "over_limit is throttled, or blocked if `rejection` is set."
    )
    descriptors: list[DescriptorStatus]
    wait_s: float = Field(description="Seconds for which the response would be delayed (`action: throttle`).")
    rejection: Rejection | None = Field(description="Set if the caller is rejected regardless of the limits.")
    without_store: str | None = Field(
        description="Fallback that was applied because the store failed; null: the store decided."
    )

    @classmethod
    def build(cls, descriptors: Sequence[Descriptor], decision: model.Decision) -> Self:
        rejection = decision.template.rejection
        return cls(
            code=code_name(decision.code),
            descriptors=[DescriptorStatus.build(*pair) for pair in zip(descriptors, decision.statuses, strict=True)],
            wait_s=decision.wait_us / _US,
            rejection=Rejection.model_validate(rejection) if rejection else None,
            without_store=decision.without_store.value if decision.without_store else None,
        )


class MatchAttempt(ResponseBody):
    """One attempt to match a descriptor entry with a rule."""

    kind: EnumValue
    pattern: str
    outcome: EnumValue
    position: OptionalPosition
    overrode: list[PositionText] = Field(
        description="Positions of the same rule in sources of lower precedence, which are ignored."
    )


class MatchLevel(ResponseBody):
    """All attempts to match one descriptor entry."""

    entry: DescriptorEntry
    attempts: list[MatchAttempt]


class AppliedSubjectLimits(ResponseBody):
    """Limits and block of the user or key whose limits the rule applies."""

    limits_of: EnumValue
    source: LimitSource = Field(description="Source of the limits: override, custom, tier <name>, or rule.")
    blocked: bool = Field(description="All requests are denied, whatever the limits are.")
    block: Block | None


class DescriptorExplanation(ResponseBody):
    """The rule that a descriptor matches, and how it was found."""

    entries: list[DescriptorEntry]
    conclusion: str
    rule: str | None
    position: OptionalPosition
    limits: LimitList = Field(
        description="Limits of the user or key, or of the rule. For a blocked caller: those after the block."
    )
    entitlement: AppliedSubjectLimits | None
    counters: list[str] = Field(description="Keys of the counters in the store.")
    levels: list[MatchLevel]

    @classmethod
    def build(cls, found: ExplainedDescriptor) -> Self:
        rule, entitlement, explanation = found.plan.rule, found.entitlement, found.explanation
        is_blocked = entitlement is not None and entitlement.blocked
        return cls.model_validate(
            {
                "entries": explanation.descriptor.entries,
                "conclusion": explanation.conclusion + ("; blocked: nothing passes" if is_blocked else ""),
                "rule": rule.path if rule else None,
                "position": rule.position if rule else None,
                "limits": rule.limits if rule else [],
                "entitlement": entitlement,
                "counters": [key.decode() for key in found.keys],
                "levels": explanation.levels,
            }
        )


class Explanation(ResponseBody):
    """The rules that the descriptors of a request match, and why."""

    domain: str
    rejection: Rejection | None = Field(description="Set if the caller is rejected regardless of the limits.")
    descriptors: list[DescriptorExplanation]


class ResetResult(ResponseBody):
    """The counters that were reset."""

    counters: list[str] = Field(description="Keys of the counters that were reset, or would be in a dry run.")
    total: int = Field(description="Number of counters that the descriptors have, in use or not.")


class SimulatedRule(ResponseBody):
    """Requests of a simulation that matched one rule."""

    rule: str
    calls: int
    denied: int


class SimulationResult(ResponseBody):
    """The decisions of a simulation."""

    calls: int
    admitted: int
    denied: int
    results: list[str] = Field(description="ok or over_limit for each request, in the given order.")
    per_rule: list[SimulatedRule]


class UsageByName(ResponseBody):
    """Usage of one user, rule, endpoint, domain or region."""

    name: str = Field(description="Name of the user, rule, endpoint, domain or region.")
    total: Total
    allowed: int
    throttled: Throttled
    blocked: Blocked
    cache_hits: int = Field(description="Requests denied from the denial cache, without a call to the store.")
    cache_misses: int
    p50_us: float | None
    p95_us: float | None
    p99_us: float | None


class UsageReport(ResponseBody):
    """The users, rules, endpoints, domains or regions with the most requests."""

    by: str
    since: TimestampText
    until: TimestampText
    items: list[UsageByName]


class UsagePoint(ResponseBody):
    """Requests in one minute, hour or day."""

    at: TimestampText = Field(validation_alias="at_s")
    total: Total
    allowed: int
    throttled: Throttled
    blocked: Blocked


class UsageSeries(ResponseBody):
    """Requests over time."""

    granularity: str
    since: TimestampText
    until: TimestampText
    points: list[UsagePoint] = Field(description="Intervals without requests have no point.")


class RecordedDecision(ResponseBody):
    """A recorded decision. Unknown texts are empty, unknown numbers null."""

    at: TimestampText = Field(validation_alias="at_s")
    domain: str
    user: str
    api_key: str = Field(description="Public id of the key.")
    ip: str
    endpoint: str
    method: str
    rule: str
    decision: str = Field(
        description="allowed (the response was ok), throttled (over_limit: a limit denied the request) or blocked (the "
        "caller was rejected regardless of the limits)."
    )
    reason: str
    current: int | None
    limit: int | None
    status: int | None
    retry_after_s: int | None
    region: str
    server_id: str
    latency_us: int | None


class RecordedDecisionPage(Page[RecordedDecision]):
    """One page of recorded decisions."""


def code_name(code: Code) -> str:
    return code.name.lower()


def to_entries(descriptor: Descriptor) -> list[DescriptorEntry]:
    return [DescriptorEntry.model_validate(entry) for entry in descriptor.entries]
