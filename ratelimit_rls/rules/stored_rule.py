"""Rules that are stored in the database, and the requests that they apply to. Value types only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class CounterScope(Enum):
    """Whose requests share a counter of a targeted rule: everyone's, or those of one tenant, user, API key, address or
    endpoint."""

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
    scope: CounterScope | None = None

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
