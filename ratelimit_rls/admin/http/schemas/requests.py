"""Request bodies. Unknown fields are rejected, and values are not coerced to other types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    JsonValue,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from ratelimit_rls.admin.http.schemas.fields import (
    MAX_VALUE_LENGTH,
    CallerName,
    Duration,
    Name,
    OptionalCallerName,
    OptionalName,
    RequestBody,
    Text,
    Timestamp,
    check_unicode,
)
from ratelimit_rls.core import model
from ratelimit_rls.core.model import MAX_HITS, MAX_REQUESTS_PER_UNIT, Descriptor, Entry, Purpose
from ratelimit_rls.database.administration import Role
from ratelimit_rls.rules.limits_json import read_limits
from ratelimit_rls.rules.stored_rule import CounterScope, StoredRule, Targeting
from ratelimit_rls.yaml.parser import MAX_DEPTH

MAX_DOCUMENT_LENGTH = 512 * 1024
MAX_ALTERNATIVES = 256
"""Values in one field of targeting."""

MAX_DOCUMENT_VALUES = 20_000
"""Values in a document given as an object: Python takes ten times as long to write YAML as to read it."""

MAX_LIMITS = 16
MAX_DESCRIPTORS = 100
MAX_ENTRIES = 64
MAX_SIMULATED_REQUESTS = 10_000


def _check_document_size(value: Any) -> Any:
    """Bound the number of values, counted level by level, before any other validation.

    Takes no longer for a million values than for a few.
    """
    parts, level = 0, [value]
    for _ in range(
        MAX_DEPTH + 2
    ):  # one more level for a list of documents, and one for the values at the deepest level
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner.extend(one.values())
            elif isinstance(one, list):
                inner.extend(one)
            if parts + len(inner) > MAX_DOCUMENT_VALUES:
                raise ValueError(
                    f"must have at most {MAX_DOCUMENT_VALUES} values as an object; send larger documents as text"
                )
        if not inner:
            return value
        parts += len(inner)
        level = inner
    raise ValueError(f"must have at most {MAX_DEPTH} levels")


class Limit(RequestBody):
    """A limit in the format of `rate_limit` in rules; compiled by the rules compiler, with its errors."""

    unit: Literal["second", "minute", "hour", "day", "week", "month", "year"] = Field(
        description="Unit of the window; a month is 30 days, unless `calendar` is true."
    )
    requests_per_unit: int = Field(
        ge=0, le=MAX_REQUESTS_PER_UNIT, description="Requests that are admitted in a window; 0: none."
    )
    unit_multiplier: int | None = Field(None, ge=1, le=MAX_REQUESTS_PER_UNIT, description="Units in a window; null: 1.")
    algorithm: (
        Literal["fixed_window", "sliding_window", "sliding_log", "token_bucket", "leaky_bucket", "gcra"] | None
    ) = Field(None, description="Algorithm; null: fixed_window.")
    burst: int | None = Field(
        None,
        ge=1,
        le=MAX_REQUESTS_PER_UNIT,
        description="Requests admitted at once by token_bucket, leaky_bucket and gcra; null: `requests_per_unit`.",
    )
    calendar: bool | None = Field(None, description="Windows are those of the calendar; fixed_window only.")
    timezone: OptionalName | None = Field(None, description="Time zone of the calendar, e.g. Europe/Berlin; null: UTC.")


Limits = Annotated[list[Limit], Field(max_length=MAX_LIMITS)]


def compile_limits(limits: Sequence[Limit]) -> tuple[model.Limit, ...]:
    """Compile limits with the rules compiler. Raises RulesError, which names the field."""
    return read_limits([limit.model_dump(exclude_none=True) for limit in limits])


class ExpiringBody(RequestBody):
    """Base of bodies that end at a timestamp, or after a duration from now."""

    until: Timestamp | None = Field(None, description="End, as a timestamp.")
    duration: Duration | None = Field(None, description="Duration until the end, instead of `until`: 90m, 12h, 30d.")

    @model_validator(mode="after")
    def _check_single_end(self) -> Self:
        if self.until is not None and self.duration is not None:
            raise ValueError("give either until or duration, not both")
        return self

    def ends_s(self, now_s: float) -> float | None:
        return self.until if self.duration is None else now_s + self.duration


class TierInput(RequestBody):
    """A tier to be created or replaced."""

    limits: Limits = Field(description="Limits of each user of the tier.")
    description: Text = Field("", description="Text for administrators.")


class TierCreate(TierInput):
    """A tier to be created."""

    name: CallerName = Field(description="Unique name of the tier.")


class UserInput(RequestBody):
    """A user to be created or replaced."""

    tier: OptionalCallerName = Field("", description="Name of the tier; empty: none.")
    org: OptionalCallerName = Field("", description="Organisation of the user; empty: none.")
    limits: Limits = Field(default_factory=list, description="Custom limits, which replace those of the tier.")


class UserTierUpdate(RequestBody):
    """The new tier of a user."""

    tier: OptionalCallerName = Field(description="Name of the tier; empty: none.")


class OverrideCreate(ExpiringBody):
    """Temporary limits of a user, which replace all others."""

    limits: Annotated[list[Limit], Field(min_length=1, max_length=MAX_LIMITS)] = Field(
        description="The temporary limits."
    )
    reason: Text = Field("", description="Text for administrators.")

    @model_validator(mode="after")
    def _require_end(self) -> Self:
        if self.until is None and self.duration is None:
            raise ValueError("an override must end: give until or duration")
        return self


class BlockInput(ExpiringBody):
    """A block to be created or replaced. Without an end it lasts until it is deleted."""

    reason: Text = Field("", description="Text for administrators.")


class ApiKeyUpdate(RequestBody):
    """Changes of an API key. Fields that are not given stay as they are."""

    name: OptionalName | None = Field(None, description="Text for administrators.")
    tier: OptionalCallerName | None = Field(None, description="Name of the tier; empty: that of its user.")
    limits: Limits | None = Field(None, description="Limits of the key, in addition to those of its user.")
    expires: Timestamp | None = Field(None, description="Expiry; null: never.")


class ApiKeyCreate(RequestBody):
    """An API key to be created."""

    user_id: CallerName = Field(description="User that the key belongs to, who must exist.")
    name: OptionalName = Field("", description="Text for administrators.")
    tier: OptionalCallerName = Field("", description="Name of the tier; empty: that of its user.")
    limits: Limits = Field(default_factory=list, description="Limits of the key, in addition to those of its user.")
    expires: Timestamp | None = Field(None, description="Expiry; null: never.")
    expires_in: Duration | None = Field(None, description="Duration until expiry, instead of `expires`: 12h, 90d.")

    @model_validator(mode="after")
    def _check_single_end(self) -> Self:
        _check_expiry(self.expires, self.expires_in)
        return self


class AdminTokenCreate(RequestBody):
    """A token of an administrator to be created."""

    name: Name = Field(description="Name under which audit entries record changes.")
    role: Annotated[Role, Field(strict=False)] = Field(description="Each role includes those before it.")
    expires: Timestamp | None = Field(None, description="Expiry; null: never.")
    expires_in: Duration | None = Field(None, description="Duration until expiry, instead of `expires`: 12h, 90d.")

    @model_validator(mode="after")
    def _check_single_end(self) -> Self:
        _check_expiry(self.expires, self.expires_in)
        return self


def _check_expiry(expires: float | None, expires_in: float | None) -> None:
    if expires is not None and expires_in is not None:
        raise ValueError("give either expires or expires_in, not both")


def expires_s(body: ApiKeyCreate | AdminTokenCreate, now_s: float) -> float | None:
    return body.expires if body.expires_in is None else now_s + body.expires_in


Alternatives = Annotated[list[Name], Field(max_length=MAX_ALTERNATIVES)]


class TargetingInput(RequestBody):
    """The requests that a rule applies to. A field that is not given restricts nothing."""

    tiers: Alternatives = Field(default_factory=list, description="Names of tiers.")
    endpoints: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=500)]], Field(max_length=MAX_ALTERNATIVES)
    ] = Field(default_factory=list, description="Paths; `*` matches any text.", examples=[["/api/*"]])
    methods: Alternatives = Field(default_factory=list, description="HTTP methods.")
    cidrs: Alternatives = Field(
        default_factory=list, description="Networks of client addresses.", examples=[["10.0.0.0/8"]]
    )
    scope: Annotated[CounterScope, Field(strict=False)] | None = Field(
        None, description="Whose requests share a counter."
    )

    def to_targeting(self) -> Targeting:
        return Targeting(tuple(self.tiers), tuple(self.endpoints), tuple(self.methods), tuple(self.cidrs), self.scope)


Document = Annotated[
    Annotated[str, Field(max_length=MAX_DOCUMENT_LENGTH), AfterValidator(check_unicode)] | dict[str, JsonValue],
    Field(
        description="A rules document: YAML text, or the equivalent object.",
        examples=["domain: edge\nrate_limit: {unit: minute, requests_per_unit: 100}\n"],
    ),
]
"""Wherever a document is accepted, _check_document_size bounds it."""


class RuleInput(RequestBody):
    """A rule to be created or replaced."""

    name: Name = Field(description="Unique name, used in positions and errors: database:name:line:column.")
    document: Annotated[Document, BeforeValidator(_check_document_size)]
    priority: int = Field(100, ge=0, le=1_000_000, description="Lower numbers take precedence.")
    enabled: bool = Field(True, description="A disabled rule has no effect.")
    targeting: TargetingInput = Field(
        default_factory=lambda: TargetingInput(scope=None), description="The requests that the rule applies to."
    )

    def to_rule(self, rule_id: str, document: str) -> StoredRule:
        """Return the rule to be stored. `document` is its text; `rule_id` is "" for a new rule, which has no id yet."""
        return StoredRule(rule_id, self.name, document, self.priority, self.enabled, self.targeting.to_targeting())


class DescriptorEntryInput(RequestBody):
    """An entry of a descriptor."""

    key: Annotated[str, Field(min_length=1, max_length=MAX_VALUE_LENGTH), AfterValidator(check_unicode)] = Field(
        description="Key of the entry, e.g. user."
    )
    value: Annotated[str, Field(max_length=MAX_VALUE_LENGTH), AfterValidator(check_unicode)] = Field(
        "", description="Value of the entry, e.g. alice."
    )


class DescriptorInput(RequestBody):
    """A descriptor of a request."""

    entries: Annotated[list[DescriptorEntryInput], Field(min_length=1, max_length=MAX_ENTRIES)] = Field(
        description="Entries of the descriptor, in the order of the levels of the rules."
    )


Domain = Annotated[str, Field(min_length=1, max_length=MAX_VALUE_LENGTH), AfterValidator(check_unicode)]
Descriptors = Annotated[list[DescriptorInput], Field(min_length=1, max_length=MAX_DESCRIPTORS)]


class RateLimitRequest(RequestBody):
    """A rate limit request as Envoy sends it: a domain and its descriptors."""

    domain: Domain = Field(description="Domain of the rules, as in the configuration of Envoy's filter.")
    descriptors: Descriptors = Field(description="Descriptors of the request; each is limited by the rule it matches.")

    def to_request(self, purpose: Purpose = Purpose.DECIDE) -> model.Request:
        return model.Request(self.domain, tuple(self._to_descriptors(None)), purpose=purpose)

    def _to_descriptors(self, hits: int | None) -> list[Descriptor]:
        return [
            Descriptor(tuple(Entry(entry.key, entry.value) for entry in one.entries), hits=hits)
            for one in self.descriptors
        ]


class CheckRequest(RateLimitRequest):
    """A request to be decided and counted."""

    hits_addend: int = Field(1, ge=0, le=MAX_HITS, description="Hits to count; 0: read without counting.")

    def to_request(self, purpose: Purpose = Purpose.DECIDE) -> model.Request:
        return model.Request(self.domain, tuple(self._to_descriptors(self.hits_addend)), purpose=purpose)


class ResetRequest(RateLimitRequest):
    """The descriptors whose counters are to be reset."""

    penalty_only: bool = Field(False, description="Reset only violations and cooldowns, not the limits.")


class SimulatedRequest(CheckRequest):
    """A request with a timestamp."""

    at: Timestamp = Field(description="Time of the request on the virtual clock.")


def _defer_validation(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    """Skip validation here. Each request is validated when it is simulated: all at once would take too long."""
    return value


class SimulationRequest(RequestBody):
    """The requests and rules of a simulation."""

    requests: Annotated[
        list[Annotated[SimulatedRequest, WrapValidator(_defer_validation)]],
        Field(min_length=1, max_length=MAX_SIMULATED_REQUESTS),
    ] = Field(description="The requests, in any order: they are decided in the order of `at`.")
    documents: Annotated[list[Document], Field(max_length=64), BeforeValidator(_check_document_size)] | None = Field(
        None,
        description="Rules to simulate, instead of the active ones. They are compiled as the service compiles files.",
    )
