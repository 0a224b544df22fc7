"""Accounts as administrators manage them: tiers, users, API keys and stored rules. Value types only.

They are stored in the database (database/) and mirrored in the memory of every process (identity/directory.py). They
are looked up when a request is planned, so no decision waits for the database. Times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ratelimit_rls.core.model import Algorithm, Limit, Unit

MAX_ID_LENGTH = 255
"""Maximum characters in the name of a user, a tier or a rule."""


@dataclass(frozen=True, slots=True)
class Tier:
    """A named set of limits."""

    name: str
    limits: tuple[Limit, ...]
    description: str = ""
    version: int = 1


@dataclass(frozen=True, slots=True)
class Override:
    """Temporary limits of a user, which replace all others."""

    limits: tuple[Limit, ...]
    until_s: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Block:
    """Block of a user: all calls are rejected."""

    reason: str = ""
    until_s: float | None = None  # None: until it is removed


@dataclass(frozen=True, slots=True)
class User:
    user_id: str
    tier: str = ""  # "": no tier
    limits: tuple[Limit, ...] = ()  # custom limits, which replace the tier's
    override: Override | None = None
    block: Block | None = None
    org: str = ""
    version: int = 1


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key without its secret. `digest` is the keyed hash that presented keys are compared with."""

    key_id: str  # public part before the secret; identifies the key everywhere
    digest: bytes = field(repr=False)
    user_id: str
    name: str = ""
    tier: str = ""  # "": the tier of its user
    limits: tuple[Limit, ...] = ()  # its own limits, in addition to its user's
    expires_s: float | None = None
    revoked_s: float | None = None
    version: int = 1


class Scope(Enum):
    """Scope of the counters of a targeted rule: the kind of the innermost entry of its descriptor."""

    GLOBAL = "global"
    TENANT = "tenant"
    USER = "user"
    API_KEY = "api_key"
    IP = "ip"
    ENDPOINT = "endpoint"


@dataclass(frozen=True, slots=True)
class Targeting:
    """Requests that a stored rule applies to. Empty fields match all; several values of one field are alternatives."""

    tiers: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()  # paths, `*` for anything
    methods: tuple[str, ...] = ()
    cidrs: tuple[str, ...] = ()
    scope: Scope | None = None

    def __bool__(self) -> bool:
        return bool(self.tiers or self.endpoints or self.methods or self.cidrs or self.scope)


@dataclass(frozen=True, slots=True)
class StoredRule:
    """One rules document as stored in the database."""

    rule_id: str
    name: str  # unique; used in errors and by `explain`
    document: str  # YAML, as in descriptors/
    priority: int = 100  # lower comes first
    enabled: bool = True
    targeting: Targeting = Targeting()
    version: int = 1
    created_by: str = ""
    created_s: float = 0.0
    updated_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Accounts:
    """All accounts, as of one position in the change feed of the database."""

    sequence: int = 0
    tiers: tuple[Tier, ...] = ()
    users: tuple[User, ...] = ()
    keys: tuple[ApiKey, ...] = ()
    rules: tuple[StoredRule, ...] = ()
    at_s: float = 0.0  # time of that change: in a restored database another change may have the same number


@dataclass(frozen=True, slots=True)
class AccountChanges:
    """Changes to accounts since an earlier position in the change feed. None as a value: deleted."""

    sequence: int
    tiers: Mapping[str, Tier | None] = field(default_factory=dict)
    users: Mapping[str, User | None] = field(default_factory=dict)
    keys: Mapping[str, ApiKey | None] = field(default_factory=dict)
    rules: Mapping[str, StoredRule | None] = field(default_factory=dict)  # by rule_id
    at_s: float = 0.0  # as in Accounts

    def __bool__(self) -> bool:
        return bool(self.tiers or self.users or self.keys or self.rules)


def limit_fields(limit: Limit) -> dict[str, Any]:
    """Return a limit as in `rate_limit` of the rules, without defaults. This is how limits are stored and shown."""
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
    """Return the limit that `limit_fields` wrote, in a tenth of the time of the rules compiler.

    Raises ValueError for anything that `limit_fields` would not have written.
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
