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

    items: list[T] = Field(description="The items of this page.")
    next: str | None = Field(None, description="Cursor of the next page; null on the last page.")


class ErrorDetail(ResponseBody):
    """An error in the request, or in a rules document."""

    message: str = Field(description="What is wrong, and what would be right.")
    field: str | None = Field(None, description="Path of the field in the body, or name of the parameter or header.")
    file: str | None = Field(None, description="File or stored rule (database:name) with an error in a rules document.")
    line: int | None = Field(None, description="Line of the error in the document, from 1.")
    column: int | None = Field(None, description="Column of the error in the line, from 1.")


class ProblemDetails(ResponseBody):
    """An error response (RFC 9457)."""

    model_config = ConfigDict(title="Problem")

    type: str = Field(description="Identifies the kind of error: urn:ratelimit-rls:problem:…")
    title: str = Field(description="Phrase of the HTTP status.")
    status: int = Field(description="HTTP status of the response.")
    detail: str = Field(description="What is wrong with this request.")
    errors: list[ErrorDetail] = Field(default_factory=list, description="All errors, if there may be several.")
    request_id: str = Field(
        "", description="X-Request-Id of the request, or one that was generated; it is also in logs and audit entries."
    )


class Tier(ResponseBody):
    """A named set of limits."""

    name: str = Field(description="Unique name of the tier.")
    limits: LimitList = Field(description="Limits of each user of the tier.")
    description: str = Field(description="Text for administrators.")
    version: Version


class Override(ResponseBody):
    """Temporary limits of a user, which replace all others."""

    limits: LimitList = Field(description="The temporary limits.")
    until: TimestampText = Field(description="End of the override.", validation_alias="until_s")
    reason: str = Field(description="Text for administrators.")


class Block(ResponseBody):
    """A block of a user: all requests are denied."""

    reason: str = Field(description="Text for administrators.")
    until: TimestampText | None = Field(description="End of the block; null: none.", validation_alias="until_s")


class UsageSummary(ResponseBody):
    """Recorded usage of a user. It does not affect the version."""

    requests_today: int = Field(description="Requests since midnight (UTC).", validation_alias="today")
    requests_month: int = Field(description="Requests in the current month (UTC).", validation_alias="total")
    denied: int = Field(
        description="Requests denied since the user was created: throttled and blocked ones (see `UsageByName`)."
    )
    last: TimestampText | None = Field(description="Last recorded request.", validation_alias="last_s")


class User(ResponseBody):
    """A user with its tier, limits, override, block and usage."""

    user_id: str = Field(description="Id of the user, as in descriptors.")
    tier: str = Field(description="Name of the tier; empty: none.")
    org: str = Field(description="Organisation of the user; empty: none.")
    limits: LimitList = Field(description="Custom limits, which replace those of the tier; empty: none.")
    override: Override | None = Field(description="Temporary limits; null: none.")
    block: Block | None = Field(description="The block; null: not blocked.")
    usage: UsageSummary = Field(description="Recorded usage.")
    version: Version

    @classmethod
    def build(cls, user: accounts.User, use: AccountUsage) -> Self:
        return cls.model_validate({**_attributes(user), "usage": use})


class LimitsCandidate(ResponseBody):
    """One possible source of the limits of a user."""

    source: LimitSource = Field(description="The source: block, override, custom, tier <name>, or rule.")
    limits: LimitList | None = Field(description="Limits of this source; null: those of the rules, or none.")
    why_not: str = Field(description="Why these limits do not apply; empty for those that do.")


class UserLimitsRule(ResponseBody):
    """An active rule with `limits_of: user` that applies to requests that name the user as it requires."""

    domain: str = Field(description="Domain of the rule.")
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

    user_id: str = Field(description="Id of the user.")
    limits: LimitList | None = Field(description="The limits; null: those of the rules.")
    source: LimitSource = Field(description="Source of the limits: block, override, custom, tier <name>, or rule.")
    until: Annotated[TimestampText | None, BeforeValidator(lambda at_s: None if at_s == inf else at_s)] = Field(
        description="End of the block or override; null: until changed.", validation_alias="until_s"
    )
    block: Block | None = Field(description="The block; null: not blocked.")
    considered: list[LimitsCandidate] = Field(description="All possible sources, in order of precedence.")
    rules: list[UserLimitsRule] = Field(
        description="The rules that apply these limits. For a blocked user: those that apply once the block ends."
    )

    @classmethod
    def build(cls, user_id: str, found: LimitsOfUser) -> Self:
        return cls.model_validate({**found.effective._asdict(), "user_id": user_id, "rules": found.rules})


class ApiKey(ResponseBody):
    """An API key, without its secret."""

    key_id: str = Field(description="Public id: the first part of the key after `rlk_`.")
    user_id: str = Field(description="User that the key belongs to.")
    name: str = Field(description="Text for administrators.")
    tier: str = Field(description="Name of the tier of the key; empty: that of its user.")
    limits: LimitList = Field(description="Limits of the key, in addition to those of its user.")
    expires: TimestampText | None = Field(description="Expiry; null: never.", validation_alias="expires_s")
    revoked: TimestampText | None = Field(
        description="Time of the revocation; null: not revoked.", validation_alias="revoked_s"
    )
    total_requests: int = Field(description="Recorded requests since the key was created.")
    last_used: TimestampText | None = Field(description="Last recorded use.")
    version: Version

    @classmethod
    def build(cls, key: accounts.ApiKey, use: AccountUsage = NO_USE, /, **more: Any) -> Self:
        return cls.model_validate({**_attributes(key), "total_requests": use.total, "last_used": use.last_s, **more})


class ApiKeyWithSecret(ApiKey):
    """A newly created API key, with its secret."""

    key: str | None = Field(description="The key itself. Returned only here and not stored; null in a dry run.")


class AdminToken(ResponseBody):
    """A token of an administrator, without its secret."""

    token_id: str = Field(description="Public id: the first part of the token after `rla_`.")
    name: str = Field(description="Name under which audit entries record changes.")
    role: EnumValue = Field(description="read, write or admin; each includes those before it.")
    expires: TimestampText | None = Field(description="Expiry; null: never.", validation_alias="expires_s")
    revoked: TimestampText | None = Field(
        description="Time of the revocation; null: not revoked.", validation_alias="revoked_s"
    )
    last_used: TimestampText | None = Field(
        description="Last recorded use; null: not used yet.", validation_alias="last_used_s"
    )
    version: Version


class AdminTokenWithSecret(AdminToken):
    """A newly created token, with its secret."""

    token: str | None = Field(description="The token itself. Returned only here and not stored; null in a dry run.")

    @classmethod
    def build(cls, token: administration.AdminToken, text: str | None) -> Self:
        return cls.model_validate({**_attributes(token), "version": token.version, "token": text})


class Targeting(ResponseBody):
    """The requests that a rule applies to. Empty fields restrict nothing."""

    tiers: list[str] = Field(description="Names of tiers.")
    endpoints: list[str] = Field(description="Paths; `*` matches any text.")
    methods: list[str] = Field(description="HTTP methods.")
    cidrs: list[str] = Field(description="Networks of client addresses.")
    scope: EnumValue | None = Field(description="Whose requests share a counter (`CounterScope`); null: not set.")


class Rule(ResponseBody):
    """A rule stored in the database."""

    rule_id: str = Field(description="Id of the rule, a UUID.")
    name: str = Field(description="Unique name, used in positions and errors: database:name:line:column.")
    document: str = Field(description="The rules document, as YAML.")
    priority: int = Field(description="Lower numbers take precedence; rules of other sources come last.")
    enabled: bool = Field(description="A disabled rule has no effect.")
    targeting: Targeting = Field(description="The requests that the rule applies to.")
    created_by: str = Field(description="Administrator who created the rule.")
    created: TimestampText = Field(description="Time of the creation.", validation_alias="created_s")
    updated: TimestampText = Field(description="Time of the last change.", validation_alias="updated_s")
    version: Version


class AuditEntry(ResponseBody):
    """One change by an administrator."""

    audit_id: int = Field(description="Number of the entry; later entries have higher ones.")
    at: TimestampText = Field(description="Time of the change.", validation_alias="at_s")
    actor: str = Field(description="Name of the token that the administrator used, or cli:<name> on the command line.")
    token_id: str = Field(description="Public id of the token; empty: none.", validation_alias="actor_token")
    address: str = Field(description="Address of the administrator; empty: unknown.")
    action: str = Field(description="What was done, e.g. create, replace, delete, revoke, import or reset.")
    kind: str = Field(description="Kind of the resource: rule, tier, user, key, token or counters.")
    subject: str = Field(description="Id or name of the resource; the domain of counters; * for an import.")
    before: dict[str, JsonValue] | None = Field(description="State before the change; null: it did not exist.")
    after: dict[str, JsonValue] | None = Field(description="State after the change; null: it was deleted.")
    request_id: str = Field(description="X-Request-Id of the request, as in logs and problems.")


class SourceStatus(ResponseBody):
    """Status of a source of rules or accounts in the process that answers. Fields that do not apply are null."""

    name: str = Field(description="files, xds or database.")
    connected: bool | None = Field(description="The database can be reached.")
    version: int | None = Field(description="Number of times that this process has loaded rules.")
    digest: str | None = Field(description="Digest of the active rules; equal rules have the same on every replica.")
    sequence: int | None = Field(description="Last change of the change feed that this process has applied.")
    lag: int | None = Field(description="Number of changes that this process is behind.")
    loaded_from: str | None = Field(description="Origin of the current accounts: database or snapshot.")
    changed: TimestampText | None = Field(
        description="Time of the last change that took effect.", validation_alias="changed_s"
    )
    failures: int = Field(description="Updates rejected since the last successful one.")
    last_error: str | None = Field(description="Error of the last update; null: it succeeded.")
    writable: bool | None = Field(
        description="Whether the last write transaction succeeded. Reads may succeed even if writes fail."
    )
    write_error: str | None = Field(description="Error of the last write transaction.")


class SourceStatusList(ResponseBody):
    """All sources of rules and accounts."""

    sources: list[SourceStatus] = Field(description="The sources.")


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

    status: str = Field(description="ok.")


def _attributes(value: accounts.User | accounts.ApiKey | administration.AdminToken) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}
