"""The limits that apply to a user, and the rules that apply them: those with `limits_of: user` that match its id."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ratelimit_rls.core.entitlements import Entitlement, Entitlements
from ratelimit_rls.core.model import Entry, Limit, Position, Rule, Subject
from ratelimit_rls.core.tree import Tree, find_child
from ratelimit_rls.errors import DatabaseUnavailable
from ratelimit_rls.identity.accounts import Accounts
from ratelimit_rls.identity.directory import Directory, EffectiveLimits, SubjectEntitlement

if TYPE_CHECKING:
    from ratelimit_rls.admin.backend import AdminBackend
    from ratelimit_rls.database.repository import Reader


class UnblockedEntitlements:
    """Implements core.entitlements.Entitlements as if no caller were blocked.

    Tells which counters a blocked caller has, and which limits apply once the block ends.
    """

    def __init__(self, entitlements: Entitlements) -> None:
        self._entitlements = entitlements

    def of(self, kind: Subject, subject: str, tier: str) -> Entitlement:
        entitlement = self._entitlements.of(kind, subject, tier)
        return entitlement if entitlement.block is None else SubjectEntitlement(entitlement.limits, entitlement.source)


class UserRule(NamedTuple):
    """A rule that applies the limits of a user."""

    domain: str
    path: str
    position: Position | None
    limits: Sequence[Limit]  # those that apply to the user: its own, or else those of the rule

    @property
    def unlimited(self) -> bool:
        return not self.limits


class LimitsOfUser(NamedTuple):
    """The limits of a user, and the rules that apply them, sorted by path."""

    effective: EffectiveLimits
    rules: Sequence[UserRule]  # of a blocked user: as once the block ends


async def limits_of_user(backend: AdminBackend, user_id: str) -> LimitsOfUser:
    """Return the limits of a user, who may be unknown. Without the database, they may be a second old."""
    now_s, loaded = backend.clock(), backend.rules.current
    try:
        async with backend.repository.reading() as reader:
            directory = await _read_directory(reader, user_id, now_s)
    except DatabaseUnavailable:
        directory = backend.directory
    own = UnblockedEntitlements(directory).of(Subject.USER, user_id, "").limits
    found = _rules_of_user(loaded.tree, user_id) if loaded is not None else []
    rules = [UserRule(domain, rule.path, rule.position, rule.limits if own is None else own) for domain, rule in found]
    return LimitsOfUser(directory.effective(user_id, now_s), rules)


async def _read_directory(reader: Reader, user_id: str, now_s: float) -> Directory:
    """Return a directory of one user, freshly read from the database, so that a client sees its own last change."""
    user = await reader.find_user(user_id)
    tier = await reader.find_tier(user.tier) if user is not None and user.tier else None
    directory = Directory(lambda: now_s)
    directory.load(Accounts(users=(user,) if user else (), tiers=(tier,) if tier else ()))
    return directory


def _rules_of_user(tree: Tree, user_id: str) -> list[tuple[str, Rule]]:
    """Return the rules with their domains.

    The entries before the user in a descriptor depend on the request, so every path to a rule counts. A rule does not
    count if another rule of its level takes precedence for this user.
    """
    found = {id(rule): (domain, rule) for domain, rule in _matching_rules(tree, user_id)}
    return sorted(found.values(), key=lambda one: one[1].path)


def _matching_rules(tree: Tree, user_id: str) -> Iterator[tuple[str, Rule]]:
    for domain, root in tree.domains.items():
        nodes = [root]
        while nodes:
            node = nodes.pop()
            for child in node.children():
                nodes.append(child)
                rule = child.rule
                if rule is not None and rule.limits_of is Subject.USER:
                    matched, _ = find_child(node, Entry(child.key, user_id))
                    if matched is child:
                        yield domain, rule
