"""Which rules take a user's own limits, where the user has some: those with `limits_of: user` that its id meets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ratelimit_rls.core.model import Entry, Rule, Subject
from ratelimit_rls.core.tree import Tree, find


class UserRule(NamedTuple):
    domain: str
    rule: Rule


def rules_of_user(tree: Tree, user_id: str) -> list[UserRule]:
    """By path. What stands before the user in a descriptor is up to the request, so every way to a rule counts; a rule
    whose place at its level another takes for this user does not."""
    found = {id(one.rule): one for one in _met(tree, user_id)}
    return sorted(found.values(), key=lambda one: one.rule.path)


def _met(tree: Tree, user_id: str) -> Iterator[UserRule]:
    for domain, root in tree.domains.items():
        nodes = [root]
        while nodes:
            node = nodes.pop()
            for child in node.children():
                nodes.append(child)
                rule = child.rule
                if rule is not None and rule.limits_of is Subject.USER:
                    met, _ = find(node, Entry(child.key, user_id))
                    if met is child:
                        yield UserRule(domain, rule)
