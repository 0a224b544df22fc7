"""What the API shows, field by field, and how it is made of what is kept. No digest and no secret is among it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from ratelimit_rls.core.accounts import (
    AdminToken,
    ApiKey,
    AuditRow,
    Block,
    Override,
    StoredRule,
    Targeting,
    Tier,
    Use,
    User,
    limit_fields,
)
from ratelimit_rls.core.model import Limit
from ratelimit_rls.transport.http.admin.moments import moment_text, optional_moment

if TYPE_CHECKING:
    from ratelimit_rls.identity.directory import Effective
    from ratelimit_rls.transport.http.admin.backend import SourceState
    from ratelimit_rls.transport.http.admin.user_rules import UserRule

T = TypeVar("T")

NO_USE = Use()

Version = Annotated[int, Field(description="Also the ETag, in quotes.")]
MomentText = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
Fields = list[dict[str, Any]]
"""Limits, each as rules write `rate_limit`."""


class Shown(BaseModel):
    model_config = ConfigDict(frozen=True)


class Page(Shown, Generic[T]):
    items: list[T]
    next: str | None = Field(None, description="The cursor of the next page; null on the last one.")


class FieldProblem(Shown):
    """A mistake in the request, or in a rules document."""

    message: str
    field: str | None = None
    file: str | None = None
    line: int | None = None
    column: int | None = None


class ProblemBody(Shown):
    """RFC 9457."""

    type: str = Field(description="What programs tell it by: urn:ratelimit-rls:problem:…")
    title: str
    status: int
    detail: str
    errors: list[FieldProblem] = Field(default_factory=list)
    request_id: str = ""


class ShownTier(Shown):
    name: str
    limits: Fields
    description: str
    version: Version

    @classmethod
    def of(cls, tier: Tier) -> Self:
        return cls(name=tier.name, limits=fields(tier.limits), description=tier.description, version=tier.version)


class ShownOverride(Shown):
    limits: Fields
    until: MomentText
    reason: str

    @classmethod
    def of(cls, override: Override) -> Self:
        return cls(limits=fields(override.limits), until=moment_text(override.until_s), reason=override.reason)


class ShownBlock(Shown):
    reason: str
    until: MomentText | None

    @classmethod
    def of(cls, block: Block) -> Self:
        return cls(reason=block.reason, until=optional_moment(block.until_s))


class ShownUse(Shown):
    """What was counted, as far as it has been written down. The version does not tell of it."""

    requests_today: int
    requests_month: int
    refused: int = Field(description="Ever.")
    last: MomentText | None

    @classmethod
    def of(cls, use: Use) -> Self:
        return cls(
            requests_today=use.today, requests_month=use.total, refused=use.refused, last=optional_moment(use.last_s)
        )


class ShownUser(Shown):
    user_id: str
    tier: str
    org: str
    limits: Fields
    override: ShownOverride | None
    block: ShownBlock | None
    use: ShownUse
    version: Version

    @classmethod
    def of(cls, user: User, use: Use = NO_USE) -> Self:
        return cls(
            use=ShownUse.of(use),
            user_id=user.user_id,
            tier=user.tier,
            org=user.org,
            limits=fields(user.limits),
            override=ShownOverride.of(user.override) if user.override else None,
            block=ShownBlock.of(user.block) if user.block else None,
            version=user.version,
        )


class ShownCandidate(Shown):
    source: str
    limits: Fields | None
    why_not: str = Field(description="Empty: this is the one that holds.")


class ShownUserRule(Shown):
    """A rule in force with `limits_of: user` that the user meets, once a request names the user as it says."""

    domain: str
    rule: str = Field(description="Its path.")
    position: str | None = Field(description="Where it is written: file:line:column, or database:name:line:column.")
    limits: Fields = Field(description="Those that hold for the user under it: its own, if it has any, or the rule's.")
    unlimited: bool = Field(description="There are none.")

    @classmethod
    def of(cls, found: UserRule, own: Sequence[Limit] | None) -> Self:
        limits = found.rule.limits if own is None else own
        return cls(
            domain=found.domain,
            rule=found.rule.path,
            position=str(found.rule.position) if found.rule.position else None,
            limits=fields(limits),
            unlimited=not limits,
        )


class ShownLimits(Shown):
    """What holds for a user at this moment, and where it comes from."""

    user_id: str
    limits: Fields | None = Field(description="null: what the rules say.")
    source: str = Field(description="block, override, custom, tier <name>, or rule.")
    until: MomentText | None = Field(description="When something else holds; null: when somebody changes it.")
    block: ShownBlock | None
    considered: list[ShownCandidate] = Field(description="All that might hold, in the order in which they are asked.")
    rules: list[ShownUserRule] = Field(description="Where it holds. Of a blocked user: once it is not.")

    @classmethod
    def of(
        cls, user_id: str, effective: Effective, rules: Sequence[UserRule], unblocked: Sequence[Limit] | None
    ) -> Self:
        """`unblocked` are the user's own limits, be it blocked or not."""
        return cls(
            user_id=user_id,
            limits=None if effective.limits is None else fields(effective.limits),
            source=effective.source or "rule",
            until=None if effective.until_s == inf else moment_text(effective.until_s),
            block=ShownBlock.of(effective.block) if effective.block else None,
            considered=[
                ShownCandidate(
                    source=one.source or "rule",
                    limits=None if one.limits is None else fields(one.limits),
                    why_not=one.why_not,
                )
                for one in effective.considered
            ],
            rules=[ShownUserRule.of(one, unblocked) for one in rules],
        )


class ShownKey(Shown):
    key_id: str
    user_id: str
    name: str
    tier: str
    limits: Fields
    expires: MomentText | None
    revoked: MomentText | None
    total_requests: int = Field(description="Ever, as far as it has been written down, as the next.")
    last_used: MomentText | None
    version: Version

    @classmethod
    def of(cls, key: ApiKey, use: Use = NO_USE, /, **more: Any) -> Self:
        return cls(
            total_requests=use.total,
            last_used=optional_moment(use.last_s),
            key_id=key.key_id,
            user_id=key.user_id,
            name=key.name,
            tier=key.tier,
            limits=fields(key.limits),
            expires=optional_moment(key.expires_s),
            revoked=optional_moment(key.revoked_s),
            version=key.version,
            **more,
        )


class MadeKey(ShownKey):
    key: str | None = Field(description="The key itself, told this once and kept nowhere; null in a dry run.")


class ShownToken(Shown):
    token_id: str
    name: str
    role: str
    expires: MomentText | None
    revoked: MomentText | None
    last_used: MomentText | None

    @classmethod
    def of(cls, token: AdminToken, /, **more: Any) -> Self:
        return cls(
            token_id=token.token_id,
            name=token.name,
            role=token.role.value,
            expires=optional_moment(token.expires_s),
            revoked=optional_moment(token.revoked_s),
            last_used=optional_moment(token.last_used_s),
            **more,
        )


class MadeToken(ShownToken):
    token: str | None = Field(description="The token itself, told this once and kept nowhere; null in a dry run.")


class ShownTargeting(Shown):
    tiers: list[str]
    endpoints: list[str]
    methods: list[str]
    cidrs: list[str]
    scope: str | None

    @classmethod
    def of(cls, targeting: Targeting) -> Self:
        return cls(
            tiers=list(targeting.tiers),
            endpoints=list(targeting.endpoints),
            methods=list(targeting.methods),
            cidrs=list(targeting.cidrs),
            scope=targeting.scope.value if targeting.scope else None,
        )


class ShownRule(Shown):
    rule_id: str
    name: str
    document: str = Field(description="YAML.")
    priority: int
    enabled: bool
    targeting: ShownTargeting
    created_by: str
    created: MomentText
    updated: MomentText
    version: Version

    @classmethod
    def of(cls, rule: StoredRule) -> Self:
        return cls(
            rule_id=rule.rule_id,
            name=rule.name,
            document=rule.document,
            priority=rule.priority,
            enabled=rule.enabled,
            targeting=ShownTargeting.of(rule.targeting),
            created_by=rule.created_by,
            created=moment_text(rule.created_s),
            updated=moment_text(rule.updated_s),
            version=rule.version,
        )


class ShownAudit(Shown):
    audit_id: int
    at: MomentText
    actor: str
    token_id: str
    address: str
    action: str
    kind: str
    subject: str
    before: dict[str, JsonValue] | None = Field(description="null: it was not there.")
    after: dict[str, JsonValue] | None = Field(description="null: it is not there any more.")
    request_id: str

    @classmethod
    def of(cls, row: AuditRow) -> Self:
        return cls(
            audit_id=row.audit_id,
            at=moment_text(row.at_s),
            actor=row.actor,
            token_id=row.actor_token,
            address=row.address,
            action=row.action,
            kind=row.kind,
            subject=row.subject,
            before=_plain(row.before),
            after=_plain(row.after),
            request_id=row.request_id,
        )


class ShownSource(Shown):
    """How a source of rules or accounts stands in the process that answers. What does not apply to it is null."""

    name: str
    connected: bool | None
    version: int | None
    digest: str | None
    sequence: int | None
    lag: int | None = Field(description="How many changes this process is behind.")
    loaded_from: str | None
    changed: MomentText | None
    failures: int
    last_error: str | None

    @classmethod
    def of(cls, state: SourceState) -> Self:
        return cls(
            name=state.name,
            connected=state.connected,
            version=state.version,
            digest=state.digest,
            sequence=state.sequence,
            lag=state.lag,
            loaded_from=state.loaded_from,
            changed=optional_moment(state.changed_s),
            failures=state.failures,
            last_error=state.last_error,
        )


class ShownSources(Shown):
    sources: list[ShownSource]


class Healthy(Shown):
    status: str


def fields(limits: Sequence[Limit]) -> Fields:
    return [limit_fields(limit) for limit in limits]


def _plain(row: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if row is None else dict(row)
