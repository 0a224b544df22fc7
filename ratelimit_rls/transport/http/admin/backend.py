"""What the API needs of the process around it, by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ratelimit_rls.core.accounts import StoredRule
    from ratelimit_rls.core.identity import Verifier
    from ratelimit_rls.core.plan import Policy
    from ratelimit_rls.identity.directory import Directory
    from ratelimit_rls.records.database import Database
    from ratelimit_rls.records.desk import Desk
    from ratelimit_rls.rules.compile import Compiled
    from ratelimit_rls.rules.snapshot import Rules
    from ratelimit_rls.service import RateLimiter
    from ratelimit_rls.store.base import Store


class Counters(Protocol):
    """The states of counters apart from deciding."""

    async def present(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of the keys that have a state. Raises StoreError."""
        ...

    async def forget(self, keys: Sequence[bytes]) -> list[bytes]:
        """Drop their states; returns those that had one. Raises StoreError."""
        ...


@dataclass(frozen=True, slots=True)
class SourceState:
    """How one source of rules or accounts stands. What does not apply to it is None."""

    name: str  # files | xds | database
    connected: bool | None = None
    version: int | None = None  # of the rules in force
    digest: str | None = None
    sequence: int | None = None  # of the feed of changes, as far as this process has it
    lag: int | None = None  # how many changes it is behind
    loaded_from: str | None = None  # where what is held came from: database or snapshot
    changed_s: float | None = None  # when it last brought something
    failures: int = 0  # refused updates since the last good one
    last_error: str | None = None


@dataclass(frozen=True, slots=True)
class AdminBackend:
    desk: Desk
    database: Database
    directory: Directory
    rules: Rules  # in force
    limiter: RateLimiter  # the service itself
    store: Store  # that the service and the API's own limits count in
    counters: Counters
    policy: Policy  # as the service's
    check_rules: Callable[[Sequence[StoredRule]], Compiled]
    """Compiles these in place of the stored ones, with everything else in force. Raises RulesError. Called in a thread,
    since it is not quick."""
    sources: Callable[[], Sequence[SourceState]]
    verifier: Verifier | None  # as the service's: whose credentials descriptors carry
    key_secret: bytes = field(repr=False)
    first_token: str = field(default="", repr=False)  # RLS_ADMIN_TOKEN
    needs_tokens: bool = True  # False: only this machine can reach the port, and whoever does may do anything
    clock: Callable[[], float] = time.time
