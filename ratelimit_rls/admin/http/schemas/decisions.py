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
    int,
    Field(
        description="All requests: allowed, throttled, blocked, and those that failed without a decision, such as with "
        "`on_store_failure: error` while the store is unavailable."
    ),
]
Allowed = Annotated[int, Field(description="Requests that were admitted (ok), delayed ones included.")]
Throttled = Annotated[
    int, Field(description="Requests denied by a limit (over_limit); not those delayed by `action: throttle`.")
]
Blocked = Annotated[
    int,
    Field(description="Requests rejected regardless of the limits: of a blocked user, or with an invalid credential."),
]
Latency = Annotated[float | None, Field(description="Percentile of the decision time in microseconds; null: unknown.")]
RangeStart = Annotated[TimestampText, Field(description="Start of the time range.")]
RangeEnd = Annotated[TimestampText, Field(description="End of the time range.")]


class DescriptorEntry(ResponseBody):
    """An entry of a descriptor."""

    key: str = Field(description="Key of the entry, e.g. user.")
    value: str = Field(description="Value of the entry, e.g. alice; empty: the entry has none.")


Entries = Annotated[list[DescriptorEntry], Field(description="Entries of the descriptor, in order.")]


class LimitStatus(ResponseBody):
    """A limit and its current state."""

    limit: dict[str, Any] = Field(description="The limit, in the format of `rate_limit` in rules.")
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

    entries: Entries
    code: str = Field(description="ok or over_limit.")
    rule: str | None = Field(description="Path of the matching rule; null: no limit applies.")
    unlimited: bool = Field(description="The matching rule is `unlimited`: nothing is counted.")
    limits: list[LimitStatus] = Field(description="State of each limit of the rule.")
    violations: int = Field(description="Recent violations, if the rule has a penalty.")
    cooldown_s: float = Field(description="Seconds for which the penalty of the rule still denies all; 0: none.")
    state: str | None = Field(
        description="State of `warn_at`: normal, warning, or throttled (a limit or cooldown denies; not `action: "
        "throttle`); null: the rule has none."
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
    until: TimestampText | None = Field(
        description="End of the block; null: it has none, or the reason is another.", validation_alias="until_s"
    )


class Decision(ResponseBody):
    """The decision about a request."""

    code: str = Field(
        description="ok or over_limit. Recorded decisions and usage use other names: ok is allowed there; over_limit "
        "is throttled, or blocked if `rejection` is set."
    )
    descriptors: list[DescriptorStatus] = Field(description="The decision about each descriptor, in order.")
    wait_s: float = Field(
        description="Seconds for which the response to an admitted request would be delayed (`action: throttle`); "
        "`retry_after_s` of a limit is the wait of a denied one."
    )
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

    kind: EnumValue = Field(
        description="How the entry is compared, in the order of attempts: exact, wildcard, cidr, prefix, regex, or key "
        "only (any value)."
    )
    pattern: str = Field(description="Pattern as written in the rules; empty: there is none.")
    outcome: EnumValue = Field(
        description="matched; none (no rule of this kind for the key); no such value (such rules have other values); "
        "or not tried (it would match, but an earlier attempt did)."
    )
    position: OptionalPosition = Field(description="Position of the rule in its source; null: there is none.")
    overrode: list[PositionText] = Field(
        description="Positions of the same rule in sources of lower precedence, which are ignored."
    )


class MatchLevel(ResponseBody):
    """All attempts to match one descriptor entry."""

    entry: DescriptorEntry = Field(description="The descriptor entry.")
    attempts: list[MatchAttempt] = Field(description="The attempts, in order; at most one matched.")


class Entitlement(ResponseBody):
    """Limits and block of the user or key whose limits the rule applies."""

    limits_of: EnumValue = Field(description="`limits_of` of the rule: user or api_key.")
    source: LimitSource = Field(description="Source of the limits: override, custom, tier <name>, or rule.")
    blocked: bool = Field(description="All requests are denied, whatever the limits are.")
    block: Block | None = Field(description="The block of the user; null: not blocked.")


class DescriptorExplanation(ResponseBody):
    """The rule that a descriptor matches, and how it was found."""

    entries: Entries
    conclusion: str = Field(description="The result in one sentence, e.g. rule edge.user_alice.")
    rule: str | None = Field(description="Path of the matching rule; null: no limit applies.")
    position: OptionalPosition = Field(
        description="Position of the rule: file:line:column, or database:name:line:column; null: no rule matches."
    )
    limits: LimitList = Field(
        description="Limits of the user or key, or of the rule. For a blocked caller: those after the block."
    )
    entitlement: Entitlement | None = Field(
        description="Limits and block of the user or key, if the rule has `limits_of`; otherwise null."
    )
    counters: list[str] = Field(description="Keys of the counters in the store.")
    levels: list[MatchLevel] = Field(
        description="The path through the rules: one level per entry, up to the first that no rule matches."
    )

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

    domain: str = Field(description="Domain of the request.")
    rejection: Rejection | None = Field(description="Set if the caller is rejected regardless of the limits.")
    descriptors: list[DescriptorExplanation] = Field(description="The explanation of each descriptor, in order.")


class ResetResult(ResponseBody):
    """The counters that were reset."""

    counters: list[str] = Field(description="Keys of the counters that were reset, or would be in a dry run.")
    total: int = Field(description="Number of counters that the descriptors have, in use or not.")


class SimulatedRule(ResponseBody):
    """Requests of a simulation that matched one rule."""

    rule: str = Field(description="Path of the rule, e.g. edge.user_alice.")
    calls: int = Field(description="Requests that matched the rule.")
    denied: int = Field(description="Those of them that were denied, by this rule or another one that they matched.")


class SimulationResult(ResponseBody):
    """The decisions of a simulation."""

    calls: int = Field(description="Simulated requests: admitted plus denied.")
    admitted: int = Field(description="Requests with the result ok.")
    denied: int = Field(description="Requests with the result over_limit, whether a limit or a block denied them.")
    results: list[str] = Field(description="ok or over_limit for each request, in the given order.")
    per_rule: list[SimulatedRule] = Field(description="Requests by rule.")


class UsageByName(ResponseBody):
    """Usage of one user, rule, endpoint, domain or region."""

    name: str = Field(description="Name of the user, rule, endpoint, domain or region.")
    total: Total
    allowed: Allowed
    throttled: Throttled
    blocked: Blocked
    cache_hits: int = Field(description="Requests denied from the denial cache, without a call to the store.")
    cache_misses: int = Field(description="Requests with a limit that the denial cache did not answer.")
    p50_us: Latency
    p95_us: Latency
    p99_us: Latency


class UsageReport(ResponseBody):
    """The users, rules, endpoints, domains or regions with the most requests."""

    by: str = Field(description="What the items are: user, rule, endpoint, domain or region.")
    since: RangeStart
    until: RangeEnd
    items: list[UsageByName] = Field(description="The items, the one with the most requests first.")


class UsagePoint(ResponseBody):
    """Requests in one minute, hour or day."""

    at: TimestampText = Field(description="Start of the interval.", validation_alias="at_s")
    total: Total
    allowed: Allowed
    throttled: Throttled
    blocked: Blocked


class UsageSeries(ResponseBody):
    """Requests over time."""

    granularity: str = Field(description="Length of an interval: minute, hour or day.")
    since: RangeStart
    until: RangeEnd
    points: list[UsagePoint] = Field(description="Intervals without requests have no point.")


class RecordedDecision(ResponseBody):
    """A recorded decision. Unknown texts are empty, unknown numbers null."""

    at: TimestampText = Field(description="Time of the decision.", validation_alias="at_s")
    domain: str = Field(description="Domain of the request.")
    user: str = Field(description="User, from the descriptor entry `user` or `user_id`.")
    api_key: str = Field(description="Public id of the key.")
    ip: str = Field(description="Address of the client, from the descriptors.")
    endpoint: str = Field(description="Path without its query, from the descriptors.")
    method: str = Field(description="HTTP method, from the descriptors.")
    rule: str = Field(description="Path of the rule that denied, else of the first with a limit.")
    decision: str = Field(
        description="allowed (the response was ok), throttled (over_limit: a limit denied the request) or blocked (the "
        "caller was rejected regardless of the limits)."
    )
    reason: str = Field(description="Why a blocked request was rejected, e.g. blocked or unauthorized; else empty.")
    current: int | None = Field(description="Hits used of the limit, those of this request included if it was charged.")
    limit: int | None = Field(description="Capacity of the limit: `burst`, else `requests_per_unit`.")
    status: int | None = Field(description="HTTP status of a denied request, where the service chooses it.")
    retry_after_s: int | None = Field(description="Seconds after which a denied request may be repeated.")
    region: str = Field(description="RLS_REGION of the process that decided.")
    server_id: str = Field(description="Host name and process id of the process that decided.")
    latency_us: int | None = Field(description="Duration of the decision in microseconds.")


class RecordedDecisionPage(Page[RecordedDecision]):
    """One page of recorded decisions."""


def code_name(code: Code) -> str:
    return code.name.lower()


def to_entries(descriptor: Descriptor) -> list[DescriptorEntry]:
    return [DescriptorEntry.model_validate(entry) for entry in descriptor.entries]
