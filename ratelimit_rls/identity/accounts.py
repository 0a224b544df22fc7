"""Accounts: tiers, users and API keys, and their limits. Value types only.

They are stored in the database (database/) and mirrored in the memory of every process (identity/directory.py). They
are looked up when a request is planned, so no decision waits for the database. Times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ratelimit_rls.core.entitlements import Block
from ratelimit_rls.core.model import Algorithm, Limit, Unit


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


@dataclass(frozen=True, slots=True)
class Accounts:
    """All accounts, as of one position in the change feed of the database."""

    sequence: int = 0
    tiers: tuple[Tier, ...] = ()
    users: tuple[User, ...] = ()
    keys: tuple[ApiKey, ...] = ()


@dataclass(frozen=True, slots=True)
class AccountChanges:
    """Changes to accounts since an earlier position in the change feed. None as a value: deleted."""

    sequence: int
    tiers: Mapping[str, Tier | None] = field(default_factory=dict)
    users: Mapping[str, User | None] = field(default_factory=dict)
    keys: Mapping[str, ApiKey | None] = field(default_factory=dict)


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
