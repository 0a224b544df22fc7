"""Who may call, and what each is allowed: tiers, users, keys and rules as administrators keep them. Values only.

They come from the database (records/), are held in memory by every process (identity/directory.py), and are asked for
when a request is planned, so that no decision waits for the database. Moments are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

from ratelimit_rls.core.model import Algorithm, Limit, Unit

LONGEST_ID = 255
"""Characters of the name of a user, a tier or a rule."""


@dataclass(frozen=True, slots=True)
class Tier:
    """A named set of limits."""

    name: str
    limits: tuple[Limit, ...]
    description: str = ""
    version: int = 1


@dataclass(frozen=True, slots=True)
class Override:
    """Limits for a while, in place of any other."""

    limits: tuple[Limit, ...]
    until_s: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Block:
    """Nothing passes."""

    reason: str = ""
    until_s: float | None = None  # None: until it is lifted


@dataclass(frozen=True, slots=True)
class User:
    user_id: str
    tier: str = ""  # "": none
    limits: tuple[Limit, ...] = ()  # custom ones, in place of the tier's
    override: Override | None = None
    block: Block | None = None
    org: str = ""
    version: int = 1


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key without its secret: `digest` is the keyed hash that a secret is compared with."""

    key_id: str  # public: what stands before the secret, and what the key is called everywhere
    digest: bytes = field(repr=False)
    user_id: str
    name: str = ""
    tier: str = ""  # "": its user's
    limits: tuple[Limit, ...] = ()  # its own, beside its user's
    expires_s: float | None = None
    revoked_s: float | None = None
    version: int = 1


class Scope(Enum):
    """Whose counter a targeted rule moves: what the innermost entry of its descriptor is."""

    GLOBAL = "global"
    TENANT = "tenant"
    USER = "user"
    API_KEY = "api_key"
    IP = "ip"
    ENDPOINT = "endpoint"


@dataclass(frozen=True, slots=True)
class Targeting:
    """Which requests a stored rule is for; nothing said means all. Several of one kind are alternatives."""

    tiers: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()  # paths, `*` for anything
    methods: tuple[str, ...] = ()
    cidrs: tuple[str, ...] = ()
    scope: Scope | None = None

    def __bool__(self) -> bool:
        return bool(self.tiers or self.endpoints or self.methods or self.cidrs or self.scope)


@dataclass(frozen=True, slots=True)
class StoredRule:
    """One document of rules as the database has it."""

    rule_id: str
    name: str  # unique; what errors and `explain` call it
    document: str  # YAML, in the grammar of descriptors/
    priority: int = 100  # lower comes first
    enabled: bool = True
    targeting: Targeting = Targeting()
    version: int = 1
    created_by: str = ""
    created_s: float = 0.0
    updated_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Accounts:
    """All that processes hold, as of one moment of the database's feed of changes."""

    sequence: int = 0
    tiers: tuple[Tier, ...] = ()
    users: tuple[User, ...] = ()
    keys: tuple[ApiKey, ...] = ()
    rules: tuple[StoredRule, ...] = ()
    at_s: float = 0.0  # of that change: in a database that was brought back another one has the number


@dataclass(frozen=True, slots=True)
class Changed:
    """What is different since another moment. None in place of a value: it is gone."""

    sequence: int
    tiers: Mapping[str, Tier | None] = field(default_factory=dict)
    users: Mapping[str, User | None] = field(default_factory=dict)
    keys: Mapping[str, ApiKey | None] = field(default_factory=dict)
    rules: Mapping[str, StoredRule | None] = field(default_factory=dict)  # by rule_id
    at_s: float = 0.0  # as in Accounts

    def __bool__(self) -> bool:
        return bool(self.tiers or self.users or self.keys or self.rules)


def limit_fields(limit: Limit) -> dict[str, Any]:
    """A limit as rules write it (`rate_limit`), with nothing that is a default: how it is stored and shown."""
    fields: dict[str, Any] = {"requests_per_unit": limit.requests_per_unit, "unit": limit.unit.name.lower()}
    if limit.unit_multiplier != 1:
        fields["unit_multiplier"] = limit.unit_multiplier
    if limit.algorithm.value != "fixed_window":
        fields["algorithm"] = limit.algorithm.value
    if limit.algorithm.has_burst and limit.burst != limit.requests_per_unit:
        fields["burst"] = limit.burst
    if limit.timezone:
        fields["calendar"] = True
        fields["timezone"] = limit.timezone
    return fields


def limit_from_fields(fields: Mapping[str, Any]) -> Limit:
    """The opposite of limit_fields, for what it wrote: a tenth of the time that the rules' compiler takes.

    ValueError for anything it would not have written.
    """
    try:
        requests, unit = fields["requests_per_unit"], Unit[fields["unit"].upper()]
        algorithm = Algorithm(fields.get("algorithm", "fixed_window"))
        burst = fields.get("burst", requests) if algorithm.has_burst else 0
        limit = Limit(
            requests, unit, algorithm, burst, "", fields.get("unit_multiplier", 1), fields.get("timezone", "")
        )
        if limit_fields(limit) == fields and all(
            type(number) is int and number >= 0 for number in (requests, burst, limit.unit_multiplier)
        ):
            return limit
    except (KeyError, AttributeError, TypeError, ValueError):
        pass
    raise ValueError("this is not how a limit is stored")


class Role(StrEnum):
    """What the holder of a token may do at the API of administrators. Each may do what the ones before it may."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"  # tokens, too


@dataclass(frozen=True, slots=True)
class AdminToken:
    """A token of an administrator without its secret."""

    token_id: str
    digest: bytes = field(repr=False)
    name: str = ""
    role: Role = Role.READ
    expires_s: float | None = None
    revoked_s: float | None = None
    last_used_s: float | None = None
    created_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AuditRow:
    """Who changed what, and how it was before and after; None: it was not there, or is not any more."""

    audit_id: int
    at_s: float
    actor: str
    actor_token: str
    address: str
    action: str
    kind: str
    subject: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    request_id: str


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """What was answered to a request with an Idempotency-Key, for whoever sends it again."""

    request_digest: str
    status: int
    headers: Mapping[str, str]
    body: bytes
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Use:
    """How much a user or a key was used, as far as it has been written down."""

    total: int = 0  # of a key, ever; of a user, this month (UTC)
    today: int = 0  # of a user (UTC)
    refused: int = 0  # of a user, ever
    last_s: float | None = None
