"""explain: the walk that match takes for one descriptor, and at each level why the others were not taken.

It looks the levels up with the same `find`, and its answer is match's own: it can be incomplete, never different.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from ratelimit_rls.core.match import NO_MATCH, match_descriptor
from ratelimit_rls.core.model import Descriptor, Entry, Match, Position
from ratelimit_rls.core.pattern import parse_address
from ratelimit_rls.core.tree import Node, Tree, find


class Way(Enum):
    """The ways to meet an entry, in the order they are tried."""

    EXACT = "exact"
    WILDCARD = "wildcard"
    CIDR = "cidr"
    PREFIX = "prefix"
    REGEX = "regex"
    KEY_ONLY = "key only"


class Outcome(Enum):
    MET = "met"
    ABSENT = "none"  # the rules have nothing of this kind for the key
    DIFFERENT = "no such value"
    NOT_TRIED = "not tried"  # it would have been met, had nothing come before it


@dataclass(frozen=True, slots=True)
class Attempt:
    way: Way
    pattern: str  # as the rules write it; "" where they have none
    outcome: Outcome
    position: Position | None = None
    overrode: tuple[Position, ...] = ()  # what weaker sources say of it, and is left out


@dataclass(frozen=True, slots=True)
class LevelWalked:
    entry: Entry
    attempts: tuple[Attempt, ...]

    @property
    def met(self) -> Attempt | None:
        return next((attempt for attempt in self.attempts if attempt.outcome is Outcome.MET), None)


@dataclass(frozen=True, slots=True)
class Explanation:
    domain: str
    descriptor: Descriptor
    levels: tuple[LevelWalked, ...]
    match: Match
    conclusion: str  # one sentence: how the walk ended


def explain(tree: Tree, domain: str, descriptor: Descriptor) -> Explanation:
    root = tree.domains.get(domain)
    if root is None:
        return Explanation(domain, descriptor, (), NO_MATCH, f"no rules for domain '{domain}': no limit applies")
    found = match_descriptor(root, descriptor)
    if descriptor.limit is not None:
        return Explanation(domain, descriptor, (), found, "the request brings its own limit: the rules are not asked")
    levels: list[LevelWalked] = []
    node: Node | None = root
    for entry in descriptor.entries:
        assert node is not None
        levels.append(LevelWalked(entry, tuple(_attempts(node, entry))))
        node, _ = find(node, entry)
        if node is None:
            break
    return Explanation(domain, descriptor, tuple(levels), found, _conclude(descriptor, levels, node))


def _attempts(node: Node, entry: Entry) -> Iterator[Attempt]:
    met, is_one_of_many = find(node, entry)
    yield _exact(node, entry, met)
    wildcards = [wildcard for wildcard in node.wildcards if wildcard.key.matches(entry.key)]
    for wildcard in wildcards:
        pattern = wildcard.node.value or wildcard.node.key
        outcome = Outcome.DIFFERENT
        if wildcard.node is met and is_one_of_many:
            outcome = Outcome.MET
        elif wildcard.matches(entry):
            outcome = Outcome.NOT_TRIED
        yield Attempt(Way.WILDCARD, pattern, outcome, _place(wildcard.node), wildcard.node.overrode)
    yield from _patterns(node, entry, met)
    alone = node.by_key.get(entry.key)
    if alone is not None and alone is not met and any(wildcard.node is alone for wildcard in wildcards):
        return  # a key with a `*`, already told as a wildcard
    if alone is None:
        yield Attempt(Way.KEY_ONLY, "", Outcome.ABSENT)
    elif not (is_one_of_many and alone is met):
        outcome = Outcome.MET if alone is met else Outcome.NOT_TRIED
        yield Attempt(Way.KEY_ONLY, alone.key, outcome, _place(alone), alone.overrode)


def _patterns(node: Node, entry: Entry, met: Node | None) -> Iterator[Attempt]:
    address = parse_address(entry.value)
    for child in node.patterns.get(entry.key, ()):
        pattern = child.pattern
        assert pattern is not None
        outcome = Outcome.DIFFERENT
        if child is met:
            outcome = Outcome.MET
        elif pattern.matches(entry.value, address):
            outcome = Outcome.NOT_TRIED
        yield Attempt(Way[pattern.way.name], pattern.text, outcome, _place(child), child.overrode)


def _exact(node: Node, entry: Entry, met: Node | None) -> Attempt:
    exact = node.exact.get(entry)
    if exact is not None:
        assert exact is met
        return Attempt(Way.EXACT, entry.value, Outcome.MET, _place(exact), exact.overrode)
    knows_key = any(key == entry.key for key, _ in node.exact)
    return Attempt(Way.EXACT, entry.value, Outcome.DIFFERENT if knows_key else Outcome.ABSENT)


def _place(node: Node) -> Position | None:
    """Several sources may describe a node: of those, the one whose limit it has."""
    return node.rule.position if node.rule is not None else node.position


def _conclude(descriptor: Descriptor, levels: list[LevelWalked], node: Node | None) -> str:
    if not levels:
        return "the descriptor has no entries: no limit applies"
    if node is None:
        key, value = levels[-1].entry
        if len(levels) > 1 and all(attempt.outcome is Outcome.ABSENT for attempt in levels[-1].attempts):
            return f"the rules end before {key}={value}, and a limit counts only for the last entry: no limit applies"
        return f"nothing is met by {key}={value}, and earlier levels are not reconsidered: no limit applies"
    if node.rule is None:
        has_children = any(node.children())
        more = "; its limits lie deeper" if has_children else ""
        return f"the descriptor ends on {node.label}, which has no rate_limit{more}: no limit applies"
    told = f"rule {node.rule.path}: unlimited" if node.rule.unlimited else f"rule {node.rule.path}"
    return f"{told}, but for whoever has limits as {node.rule.limits_of.value}" if node.rule.limits_of else told
