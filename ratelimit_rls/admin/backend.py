"""The dependencies of the admin API on the process that serves it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ratelimit_rls.core.identity import Verifier
    from ratelimit_rls.core.plan import Policy
    from ratelimit_rls.database.database import Database
    from ratelimit_rls.database.repository import Repository
    from ratelimit_rls.identity.directory import Directory
    from ratelimit_rls.pipeline.limiter import RateLimiter
    from ratelimit_rls.rules.active_rules import ActiveRules
    from ratelimit_rls.rules.compile import CompiledRules
    from ratelimit_rls.rules.source_document import SourceDocument
    from ratelimit_rls.rules.stored_rule import StoredRule
    from ratelimit_rls.store.base import Store


class Counters(Protocol):
    """Access to counter states outside of decisions."""

    async def present(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys that have a state. Raises StoreError."""
        ...

    async def forget(self, keys: Sequence[bytes]) -> list[bytes]:
        """Delete the states of the keys; return those that had one. Raises StoreError."""
        ...


@dataclass(frozen=True, slots=True)
class SourceState:
    """Status of one source of rules or accounts. Fields that do not apply to it are None."""

    name: str  # files | xds | database
    connected: bool | None = None
    version: int | None = None  # of the active rules
    digest: str | None = None
    sequence: int | None = None  # last change of the feed that this process has applied
    lag: int | None = None  # number of changes it is behind
    loaded_from: str | None = None  # origin of the current accounts: database or snapshot
    changed_s: float | None = None  # time of the last update
    failures: int = 0  # rejected updates since the last good one
    last_error: str | None = None
    writable: bool | None = None  # whether the last write transaction succeeded
    write_error: str | None = None


@dataclass(frozen=True, slots=True)
class AdminBackend:
    """The dependencies of the admin API."""

    repository: Repository
    database: Database
    directory: Directory
    rules: ActiveRules  # the active rules
    limiter: RateLimiter  # that serves requests
    store: Store  # counts for the service and for the limits of the API itself
    counters: Counters
    policy: Policy  # same as the service's
    compile_rules: Callable[[Sequence[SourceDocument]], CompiledRules]
    """Compile documents alone, with the options of the service. Raises RulesError. Must be called in a thread."""
    check_rules: Callable[[Sequence[StoredRule]], CompiledRules]
    """Compile these stored rules together with the active rules of all other sources. Raises RulesError. Must be called
    in a thread because it is slow."""
    sources: Callable[[], Sequence[SourceState]]
    verifier: Verifier | None  # same as the service's: verifies credentials in descriptors
    key_secret: bytes = field(repr=False)
    bootstrap_token: str = field(default="", repr=False)  # RLS_ADMIN_TOKEN
    needs_tokens: bool = True  # False: only this machine can reach the port, and every caller is an admin
    clock: Callable[[], float] = time.time
