"""Explain a match: the path taken for one descriptor, and at each level why the alternatives were not chosen.

It uses the same child lookup as `match`, and the match it reports is that of `match_descriptor`, so an explanation can
be incomplete but never disagree with the decision.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from ratelimit_rls.core.match import NO_MATCH, match_descriptor
from ratelimit_rls.core.model import Descriptor, Entry, Match, Position
from ratelimit_rls.core.pattern import parse_address
from ratelimit_rls.core.tree import Node, Tree, find_child


class MatchKind(Enum):
    """Kinds of lookup for an entry, in the order they are tried."""

    EXACT = "exact"
    WILDCARD = "wildcard"
    CIDR = "cidr"
    PREFIX = "prefix"
    REGEX = "regex"
    KEY_ONLY = "key only"


class AttemptOutcome(Enum):
    MATCHED = "matched"
    ABSENT = "none"  # the rules define nothing of this kind for the key
    DIFFERENT = "no such value"
    NOT_TRIED = "not tried"  # it would match, but an earlier lookup did


@dataclass(frozen=True, slots=True)
class Attempt:
    kind: MatchKind
    pattern: str  # as written in the rules; "" if there is none
    outcome: AttemptOutcome
    position: Position | None = None
    overrode: tuple[Position, ...] = ()  # overridden definitions from sources of lower priority


@dataclass(frozen=True, slots=True)
class MatchLevel:
    entry: Entry
    attempts: tuple[Attempt, ...]

    @property
    def matched(self) -> Attempt | None:
        return next((attempt for attempt in self.attempts if attempt.outcome is AttemptOutcome.MATCHED), None)


@dataclass(frozen=True, slots=True)
class Explanation:
    domain: str
    descriptor: Descriptor
    levels: tuple[MatchLevel, ...]
    match: Match
    conclusion: str  # one sentence: the outcome


def explain(tree: Tree, domain: str, descriptor: Descriptor) -> Explanation:
    root = tree.domains.get(domain)
    if root is None:
        return Explanation(domain, descriptor, (), NO_MATCH, f"no rules for domain '{domain}': no limit applies")
    found = match_descriptor(root, descriptor)
    if descriptor.limit is not None:
        return Explanation(domain, descriptor, (), found, "the request carries its own limit: the rules are not used")
    levels: list[MatchLevel] = []
    node: Node | None = root
    for entry in descriptor.entries:
        assert node is not None
        levels.append(MatchLevel(entry, tuple(_attempts(node, entry))))
        node, _ = find_child(node, entry)
        if node is None:
            break
    return Explanation(domain, descriptor, tuple(levels), found, _conclude(descriptor, levels, node))


def _attempts(node: Node, entry: Entry) -> Iterator[Attempt]:
    matched, is_pattern = find_child(node, entry)
    yield _exact(node, entry, matched)
    wildcards = [wildcard for wildcard in node.wildcards if wildcard.key.matches(entry.key)]
    for wildcard in wildcards:
        pattern = wildcard.node.value or wildcard.node.key
        outcome = AttemptOutcome.DIFFERENT
        if wildcard.node is matched and is_pattern:
            outcome = AttemptOutcome.MATCHED
        elif wildcard.matches(entry.key, entry.value):
            outcome = AttemptOutcome.NOT_TRIED
        yield Attempt(MatchKind.WILDCARD, pattern, outcome, _position(wildcard.node), wildcard.node.overrode)
    yield from _patterns(node, entry, matched)
    key_only = node.by_key.get(entry.key)
    if key_only is not None and key_only is not matched and any(wildcard.node is key_only for wildcard in wildcards):
        return  # a key with a `*`, already reported as a wildcard
    if key_only is None:
        yield Attempt(MatchKind.KEY_ONLY, "", AttemptOutcome.ABSENT)
    elif not (is_pattern and key_only is matched):
        outcome = AttemptOutcome.MATCHED if key_only is matched else AttemptOutcome.NOT_TRIED
        yield Attempt(MatchKind.KEY_ONLY, key_only.key, outcome, _position(key_only), key_only.overrode)


def _patterns(node: Node, entry: Entry, matched: Node | None) -> Iterator[Attempt]:
    address = parse_address(entry.value)
    for child in node.patterns.get(entry.key, ()):
        pattern = child.pattern
        assert pattern is not None
        outcome = AttemptOutcome.DIFFERENT
        if child is matched:
            outcome = AttemptOutcome.MATCHED
        elif pattern.matches(entry.value, address):
            outcome = AttemptOutcome.NOT_TRIED
        yield Attempt(MatchKind[pattern.kind.name], pattern.text, outcome, _position(child), child.overrode)


def _exact(node: Node, entry: Entry, matched: Node | None) -> Attempt:
    exact = node.exact.get(entry)
    if exact is not None:
        assert exact is matched
        return Attempt(MatchKind.EXACT, entry.value, AttemptOutcome.MATCHED, _position(exact), exact.overrode)
    knows_key = any(key == entry.key for key, _ in node.exact)
    return Attempt(MatchKind.EXACT, entry.value, AttemptOutcome.DIFFERENT if knows_key else AttemptOutcome.ABSENT)


def _position(node: Node) -> Position | None:
    """Return the position of a node. If several sources define it, it is that of the limit in effect."""
    return node.rule.position if node.rule is not None else node.position


def _conclude(descriptor: Descriptor, levels: list[MatchLevel], node: Node | None) -> str:
    if not levels:
        return "the descriptor has no entries: no limit applies"
    if node is None:
        key, value = levels[-1].entry
        if len(levels) > 1 and all(attempt.outcome is AttemptOutcome.ABSENT for attempt in levels[-1].attempts):
            return f"the rules end before {key}={value}, and only the last entry can have a limit: no limit applies"
        return f"nothing matches {key}={value}, and earlier levels are not reconsidered: no limit applies"
    if node.rule is None:
        has_children = any(node.children())
        more = "; its limits are on deeper levels" if has_children else ""
        return f"the descriptor ends on {node.label}, which has no rate_limit{more}: no limit applies"
    conclusion = f"rule {node.rule.path}: unlimited" if node.rule.unlimited else f"rule {node.rule.path}"
    if node.rule.limits_of is None:
        return conclusion
    return f"{conclusion}, except for subjects with limits as {node.rule.limits_of.value}"
