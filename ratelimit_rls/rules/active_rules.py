"""The active rules: one immutable tree, replaced as a whole, and the results of recent updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from ratelimit_rls.core.tree import Tree
from ratelimit_rls.errors import RateLimitRlsError
from ratelimit_rls.telemetry.instruments import RULES_AGE, RULES_DOMAINS, RULES_IN_FORCE, RULES_REJECTED_UPDATES
from ratelimit_rls.telemetry.series import Series


@dataclass(frozen=True, slots=True)
class RulesVersion:
    """A compiled tree, and when it was loaded."""

    tree: Tree
    version: int  # 1 for the first load of the process, then incremented by one
    digest: str  # of the source documents; equal text has an equal digest on every replica
    loaded_at: datetime
    files: int
    rules: int  # number of rules in the tree


class ActiveRules:
    """Holder of the active rules.

    Readers take `current` once per request, so a swap never changes a decision in progress.
    """

    def __init__(self) -> None:
        self.current: RulesVersion | None = None
        self.failures = 0  # rejected updates since the last successful one
        self.last_error: RateLimitRlsError | None = None
        self.on_change: Callable[[ActiveRules], None] = lambda rules: None  # after every update, accepted or rejected
        self.on_swap: Callable[[], None] = lambda: None  # after accepted updates only

    def swap(self, tree: Tree, *, digest: str, files: int, loaded_at: datetime) -> RulesVersion:
        version = self.current.version + 1 if self.current else 1
        self.current = RulesVersion(tree, version, digest, loaded_at, files, tree.count_rules())
        self.failures = 0
        self.last_error = None
        self.on_swap()
        self.on_change(self)
        return self.current

    def measured(self) -> Iterator[tuple[Series, float]]:
        """Yield the metrics of the active rules."""
        yield Series(RULES_REJECTED_UPDATES.name, ()), self.failures
        if self.current is not None:
            yield Series(RULES_IN_FORCE.name, ()), self.current.rules
            yield Series(RULES_DOMAINS.name, ()), len(self.current.tree.domains)
            yield Series(RULES_AGE.name, ()), (datetime.now(UTC) - self.current.loaded_at).total_seconds()

    def reject(self, error: RateLimitRlsError) -> None:
        """Keep the active rules, and record why the update was rejected."""
        self.failures += 1
        self.last_error = error
        self.on_change(self)
