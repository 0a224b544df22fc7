"""Users in bulk: import, export and lists, from one consistent snapshot of the database."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from ratelimit_rls.identity.accounts import User

if TYPE_CHECKING:
    from ratelimit_rls.database.repository import Actor, Reader, Repository

TRANSACTION_TIMEOUT_S: Final = 600.0
"""Timeout of a transaction. An import may have 100,000 users or more, on a busy database."""

MAX_SINGLE_LOOKUPS = 500
"""Maximum number of users that are looked up one by one; for more, reading all users is as fast."""

PAGE = 1000


class UserComparison:
    """Compares given users with those in the database. Of the latter only ids are kept."""

    def __init__(self, imported: Mapping[str, User]) -> None:
        self._imported = imported
        self.same: set[str] = set()
        self.other: set[str] = set()
        self.without_limits: set[str] = set()
        """Changed users that have custom limits in the database but not among the given ones."""

    @property
    def created(self) -> int:
        """Number of given users that are not in the database."""
        return len(self._imported) - len(self.same) - len(self.other)

    def compare(self, user_id: str, stored: User | None) -> None:
        """Compare one user; None means that the user does not exist, or no longer."""
        imported = self._imported.get(user_id)
        if imported is None:
            return
        for group in (self.same, self.other, self.without_limits):
            group.discard(user_id)
        if stored is None:
            return
        is_same = (stored.tier, stored.org, stored.limits) == (imported.tier, imported.org, imported.limits)
        (self.same if is_same else self.other).add(user_id)
        if stored.limits and not imported.limits:
            self.without_limits.add(user_id)

    async def refresh(self, reader: Reader) -> None:
        for group in (self.same, self.other, self.without_limits):
            group.clear()
        if len(self._imported) <= MAX_SINGLE_LOOKUPS:
            for user_id in self._imported:
                self.compare(user_id, await reader.find_user(user_id))
            return
        async for page in _pages(reader):
            for user in page:
                self.compare(user.user_id, user)

    def changed_users(self) -> list[User]:
        return [user for user_id, user in self._imported.items() if user_id not in self.same]


async def import_users(
    repository: Repository, actor: Actor, users: Mapping[str, User], *, dry_run: bool
) -> UserComparison:
    """Create these users, given by id, or replace the tier, org and custom limits of existing ones: all or none.

    Return how they compare with those that were in the database. Users that are equal are not written.
    """
    comparison = UserComparison(users)
    # Compare before taking the write lock, which blocks other writers. Users that change meanwhile are in the change
    # feed and are compared again.
    async with repository.reading(TRANSACTION_TIMEOUT_S) as reader:
        sequence = await reader.sequence()
        await comparison.refresh(reader)
    if dry_run:
        return comparison
    async with repository.change(actor, timeout_s=TRANSACTION_TIMEOUT_S) as change:
        changed = await change.changed_since(sequence)
        if changed is None:
            await comparison.refresh(change)
        else:
            for user_id, user in changed.users.items():
                comparison.compare(user_id, user)
        if changed_users := comparison.changed_users():  # without changes servers need not reload
            await change.put_users(changed_users)
    return comparison


async def export_users(repository: Repository, write: Callable[[Sequence[User]], object]) -> int:
    """Call `write` with all users, page by page, by id. Return their number."""
    written = 0
    async with repository.reading(TRANSACTION_TIMEOUT_S) as reader:
        async for page in _pages(reader):
            write(page)
            written += len(page)
    return written


async def list_users(
    repository: Repository, limit: int, now_s: float, *, tier: str | None = None, blocked: bool = False
) -> list[User]:
    """Return up to `limit` users by id.

    `tier`: only users of this tier; "": only users without one. `blocked`: only users that are blocked at `now_s`.
    """
    found: list[User] = []
    last = ""
    async with repository.reading(TRANSACTION_TIMEOUT_S) as reader:
        while len(found) < limit and (
            page := await reader.users(last, min(PAGE, limit), tier=tier, blocked=blocked or None)
        ):
            found += [user for user in page if not blocked or is_blocked(user, now_s)]
            last = page[-1].user_id
    return found[:limit]


async def tier_names(repository: Repository) -> set[str]:
    found: list[str] = []
    async with repository.reading() as reader:
        while page := await reader.tiers(found[-1] if found else "", PAGE):
            found += [tier.name for tier in page]
    return set(found)


def is_blocked(user: User, now_s: float) -> bool:
    return user.block is not None and (user.block.until_s is None or user.block.until_s > now_s)


async def _pages(reader: Reader) -> AsyncIterator[list[User]]:
    """Yield all users by id, in pages."""
    last = ""
    while page := await reader.users(last, PAGE):
        yield page
        last = page[-1].user_id
