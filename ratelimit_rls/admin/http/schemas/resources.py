"""Response bodies of resources. They contain no digests or secrets, except for new keys and tokens."""

from __future__ import annotations

from dataclasses import fields
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, Generic, Self, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue

from ratelimit_rls.admin.http.schemas.fields import (
    EnumValue,
    LimitList,
    LimitSource,
    OptionalPosition,
    ResponseBody,
    TimestampText,
)
from ratelimit_rls.database import administration
from ratelimit_rls.database.administration import AccountUsage
from ratelimit_rls.identity import accounts

if TYPE_CHECKING:
    from ratelimit_rls.admin.user_limits import LimitsOfUser

T = TypeVar("T")

NO_USE = AccountUsage()

Version = Annotated[int, Field(description="Version of the resource; in quotes, its ETag.")]


class Page(ResponseBody, Generic[T]):
    """One page of a list. Subclasses give each page a name of its own in the OpenAPI document."""

    items: list[T]
    next: str | None = Field(None, description="Cursor of the next page; null on the last page.")


class ErrorDetail(ResponseBody):
    """An error in the request, or in a rules document."""

    message: str
    field: str | None = None
    file: str | None = None
    line: int | None = None
    column: int | None = None


class ProblemDetails(ResponseBody):
    """An error response (RFC 9457)."""

    model_config = ConfigDict(title="Problem")

    type: str = Field(description="Identifies the kind of error: urn:ratelimit-rls:problem:…")
    title: str
    status: int
    detail: str
    errors: list[ErrorDetail] = Field(default_factory=list)
    request_id: str = ""


class Tier(ResponseBody):
    """A named set of limits."""

    name: str
    limits: LimitList
    description: str
    version: Version


class Override(ResponseBody):
    """Temporary limits of a user, which replace all others."""

    limits: LimitList
    until: TimestampText = Field(validation_alias="until_s")
    reason: str


class Block(ResponseBody):
    """A block of a user: all requests are denied."""

    reason: str
    until: TimestampText | None = Field(validation_alias="until_s")


class UsageSummary(ResponseBody):
    """Recorded usage of a user. It does not affect the version."""

    requests_today: int = Field(validation_alias="today")
    requests_month: int = Field(validation_alias="total")
    denied: int = Field(description="Requests denied since the user was created.")
    last: TimestampText | None = Field(validation_alias="last_s")


class User(ResponseBody):
    """A user with its tier, limits, override, block and usage."""

    user_id: str
    tier: str
    org: str
    limits: LimitList
    override: Override | None
    block: Block | None
    usage: UsageSummary
    version: Version

    @classmethod
    def build(cls, user: accounts.User, use: AccountUsage) -> Self:
        return cls.model_validate({**_attributes(user), "usage": use})


class LimitSourceCandidate(ResponseBody):
    """One possible source of the limits of a user."""

    source: LimitSource
    limits: LimitList | None
    why_not: str = Field(description="Why these limits do not apply; empty for those that do.")


class RuleLimitsOfUser(ResponseBody):
    """An active rule with `limits_of: user` that applies to requests that name the user as it requires."""

    domain: str
    rule: str = Field(description="Path of the rule.", validation_alias="path")
    position: OptionalPosition = Field(
        description="Position of the rule: file:line:column, or database:name:line:column."
    )
    limits: LimitList = Field(
        description="Limits that apply to the user under this rule: the user's own, or else those of the rule."
    )
    unlimited: bool = Field(description="No limit applies.")


class UserLimits(ResponseBody):
    """The limits that currently apply to a user, and their source."""

    user_id: str
    limits: LimitList | None = Field(description="null: those of the rules.")
    source: LimitSource = Field(description="Source of the limits: block, override, custom, tier <name>, or rule.")
    until: Annotated[TimestampText | None, BeforeValidator(lambda at_s: None if at_s == inf else at_s)] = Field(
        description="End of the block or override; null: until changed.", validation_alias="until_s"
    )
    block: Block | None
    considered: list[LimitSourceCandidate] = Field(description="All possible sources, in order of precedence.")
    rules: list[RuleLimitsOfUser] = Field(
        description="The rules that apply these limits. For a blocked user: those that apply once the block ends."
    )

    @classmethod
    def build(cls, user_id: str, found: LimitsOfUser) -> Self:
        return cls.model_validate({**found.effective._asdict(), "user_id": user_id, "rules": found.rules})


class ApiKey(ResponseBody):
    """An API key, without its secret."""

    key_id: str
    user_id: str
    name: str
    tier: str
    limits: LimitList
    expires: TimestampText | None = Field(validation_alias="expires_s")
    revoked: TimestampText | None = Field(validation_alias="revoked_s")
    total_requests: int = Field(description="Recorded requests since the key was created.")
    last_used: TimestampText | None = Field(description="Last recorded use.")
    version: Version

    @classmethod
    def build(cls, key: accounts.ApiKey, use: AccountUsage = NO_USE, /, **more: Any) -> Self:
        return cls.model_validate({**_attributes(key), "total_requests": use.total, "last_used": use.last_s, **more})


class NewApiKey(ApiKey):
    """A newly created API key, with its secret."""

    key: str | None = Field(description="The key itself. Returned only here and not stored; null in a dry run.")


class AdminToken(ResponseBody):
    """A token of an administrator, without its secret."""

    token_id: str
    name: str
    role: EnumValue
    expires: TimestampText | None = Field(validation_alias="expires_s")
    revoked: TimestampText | None = Field(validation_alias="revoked_s")
    last_used: TimestampText | None = Field(validation_alias="last_used_s")
    version: Version


class NewAdminToken(AdminToken):
    """A newly created token, with its secret."""

    token: str | None = Field(description="The token itself. Returned only here and not stored; null in a dry run.")

    @classmethod
    def build(cls, token: administration.AdminToken, text: str | None) -> Self:
        return cls.model_validate({**_attributes(token), "version": token.version, "token": text})


class Targeting(ResponseBody):
    """The requests that a rule applies to. Empty fields restrict nothing."""

    tiers: list[str]
    endpoints: list[str]
    methods: list[str]
    cidrs: list[str]
    scope: EnumValue | None


class Rule(ResponseBody):
    """A rule stored in the database."""

    rule_id: str
    name: str
    document: str = Field(description="The rules document, as YAML.")
    priority: int
    enabled: bool
    targeting: Targeting
    created_by: str
    created: TimestampText = Field(validation_alias="created_s")
    updated: TimestampText = Field(validation_alias="updated_s")
    version: Version


class AuditEntry(ResponseBody):
    """One change by an administrator."""

    audit_id: int
    at: TimestampText = Field(validation_alias="at_s")
    actor: str
    token_id: str = Field(validation_alias="actor_token")
    address: str
    action: str
    kind: str
    subject: str
    before: dict[str, JsonValue] | None = Field(description="State before the change; null: it did not exist.")
    after: dict[str, JsonValue] | None = Field(description="State after the change; null: it was deleted.")
    request_id: str


class SourceStatus(ResponseBody):
    """Status of a source of rules or accounts in the process that answers. Fields that do not apply are null."""

    name: str
    connected: bool | None
    version: int | None
    digest: str | None
    sequence: int | None
    lag: int | None = Field(description="Number of changes that this process is behind.")
    loaded_from: str | None
    changed: TimestampText | None = Field(validation_alias="changed_s")
    failures: int
    last_error: str | None
    writable: bool | None = Field(
        description="Whether the last write transaction succeeded. Reads may succeed even if writes fail."
    )
    write_error: str | None = Field(description="Error of the last write transaction.")


class SourceStatusList(ResponseBody):
    """All sources of rules and accounts."""

    sources: list[SourceStatus]


class TierPage(Page[Tier]):
    """One page of tiers."""


class UserPage(Page[User]):
    """One page of users."""


class ApiKeyPage(Page[ApiKey]):
    """One page of API keys."""


class AdminTokenPage(Page[AdminToken]):
    """One page of tokens."""


class RulePage(Page[Rule]):
    """One page of stored rules."""


class AuditEntryPage(Page[AuditEntry]):
    """One page of audit entries."""


class Health(ResponseBody):
    """Health of the API."""

    status: str


def _attributes(value: accounts.User | accounts.ApiKey | administration.AdminToken) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}
