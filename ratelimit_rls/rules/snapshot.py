"""The rules in force: one tree, swapped whole, and the record of how the last attempts to change it went."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from ratelimit_rls.core.tree import Tree
from ratelimit_rls.errors import RateLimitRlsError
from ratelimit_rls.telemetry.collected import Series
from ratelimit_rls.telemetry.instruments import RULES_AGE, RULES_DOMAINS, RULES_IN_FORCE, RULES_REFUSED


@dataclass(frozen=True, slots=True)
class Loaded:
    """A tree that compiled, and when."""

    tree: Tree
    version: int  # 1 for the first load of the process, and one more for each after it
    digest: str  # of the documents it was compiled from: the same text, the same digest, on every replica
    loaded_at: datetime
    files: int
    rules: int  # how many the tree has


class Rules:
    """Readers take `current` once per request and keep it: a swap never changes a decision under way."""

    def __init__(self) -> None:
        self.current: Loaded | None = None
        self.failures = 0  # refused updates since the last good one
        self.last_error: RateLimitRlsError | None = None
        self.on_change: Callable[[Rules], None] = lambda rules: None  # after every update, taken or refused
        self.on_swap: Callable[[], None] = lambda: None  # after those that were taken

    def swap(self, tree: Tree, *, digest: str, files: int, loaded_at: datetime) -> Loaded:
        version = self.current.version + 1 if self.current else 1
        self.current = Loaded(tree, version, digest, loaded_at, files, tree.count_rules())
        self.failures = 0
        self.last_error = None
        self.on_swap()
        self.on_change(self)
        return self.current

    def measured(self) -> Iterator[tuple[Series, float]]:
        """How they stand, as metrics have it."""
        yield Series(RULES_REFUSED.name, ()), self.failures
        if self.current is not None:
            yield Series(RULES_IN_FORCE.name, ()), self.current.rules
            yield Series(RULES_DOMAINS.name, ()), len(self.current.tree.domains)
            yield Series(RULES_AGE.name, ()), (datetime.now(UTC) - self.current.loaded_at).total_seconds()

    def refuse(self, error: RateLimitRlsError) -> None:
        """Keep what is in force, and remember why the update was not taken."""
        self.failures += 1
        self.last_error = error
        self.on_change(self)
