"""The compiled rules: an immutable tree, built once per load and swapped whole.

    domain: edge                              Node edge
    descriptors:                               ├─ exact     ("plan", "free") ──► Node ─ by_key "user" ──► Node ● 10/min
      - key: plan                              │
        value: free                            ├─ wildcards ("path", "/v1/*") ─► Node ● 5/s
        descriptors: [{key: user, ...}]        │
      - {key: path, value: /v1/*, ...}         └─ by_key    "plan" ────────────► Node ● 100/min
      - {key: plan, ...}

One level is looked up in four steps, the first that finds something wins and is never taken back: exact pair, then the
first wildcard in file order, then the pattern that says most (the longest network, the longest prefix, the first
expression), then the key alone. ● marks a rule.

Nodes are found by (key, value) pairs, never by a joined string: the reference joins with "_", so that there the pair
("a", "b_c") also meets a rule for ("a_b", "c").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

from ratelimit_rls.core.attributes import AttributeMapping
from ratelimit_rls.core.identity import IdentityTerms
from ratelimit_rls.core.keys import ShardBy
from ratelimit_rls.core.model import Entry, OnStoreFailure, Position, Rule
from ratelimit_rls.core.pattern import Pattern, parse_address
from ratelimit_rls.core.style import PLAIN, AnswerStyle, Deny

WILDCARD = "*"

_NO_CHILDREN: Mapping[Any, Any] = {}  # one for all leaves, which nearly all nodes of large rules are


@dataclass(frozen=True, slots=True)
class Glob:
    """A pattern in which each `*` stands for zero or more of any character, anchored at both ends."""

    pattern: str
    parts: tuple[str, ...]

    @classmethod
    def of(cls, pattern: str) -> Glob:
        return cls(pattern, tuple(pattern.split(WILDCARD)))

    def matches(self, text: str) -> bool:
        """Linear in the text: taking each middle part at its first place never loses a match."""
        first, *middle = self.parts
        if not middle:
            return text == first
        last = middle.pop()
        if len(text) < len(first) + len(last) or not (text.startswith(first) and text.endswith(last)):
            return False
        at, end = len(first), len(text) - len(last)
        for part in middle:
            found = text.find(part, at, end)
            if found < 0:
                return False
            at = found + len(part)
        return True


class Node(NamedTuple):
    """One descriptor of the rules; the root of a domain is a Node too, with the domain's name as its key."""

    key: str
    value: str = ""  # "": any value, or those that the pattern meets
    pattern: Pattern | None = None
    rule: Rule | None = None
    share_threshold: bool = False
    value_to_metric: bool = False
    position: Position | None = None
    overrode: tuple[Position, ...] = ()  # what weaker sources say of it, and is left out
    style: AnswerStyle = PLAIN  # of a domain: of limits that arrive in requests, since each rule has its own
    deny: Deny | None = None  # likewise
    on_store_failure: OnStoreFailure | None = None  # likewise
    shard_by: ShardBy = ShardBy.DESCRIPTOR  # of a domain
    exact: Mapping[tuple[str, str], Node] = _NO_CHILDREN
    wildcards: tuple[Wildcard, ...] = ()  # in file order
    patterns: Mapping[str, tuple[Node, ...]] = _NO_CHILDREN  # by key, in the order they are tried
    by_key: Mapping[str, Node] = _NO_CHILDREN

    @property
    def label(self) -> str:
        """As the reference writes it in metric names and /rlconfig."""
        return f"{self.key}_{self.shared_value}" if self.shared_value else self.key

    @property
    def shared_value(self) -> str:
        """What stands for every value that meets this node, where they share a counter."""
        return self.pattern.label if self.pattern else self.value

    @property
    def is_level(self) -> bool:
        """Whether it has children."""
        return bool(self.exact or self.patterns or self.by_key)

    def children(self) -> Iterator[Node]:
        of_patterns = chain.from_iterable(self.patterns.values())
        return chain(self.exact.values(), of_patterns, self.by_key.values())


@dataclass(frozen=True, slots=True)
class Wildcard:
    """A child with a `*` in its key or value. A child without a value takes any."""

    key: Glob
    value: Glob | None
    node: Node

    def matches(self, entry: Entry) -> bool:
        return self.key.matches(entry.key) and (self.value is None or self.value.matches(entry.value))


@dataclass(frozen=True, slots=True)
class Tree:
    """Every domain's rules, as one load found them."""

    domains: Mapping[str, Node] = field(default_factory=dict)
    mappings: Mapping[str, AttributeMapping] = field(default_factory=dict)  # `ext_authz` of the domains that have one
    identities: Mapping[str, IdentityTerms] = field(default_factory=dict)  # `identity`, likewise

    def rules(self) -> list[Rule]:
        """Every rule, sorted by path."""
        found = [node.rule for level in self.levels() for node in level.children() if node.rule is not None]
        return sorted(found, key=attrgetter("path"))

    def count_rules(self) -> int:
        """Without a list of them, to say nothing of sorting it: of large rules that takes longer than to swap them."""
        return sum(node.rule is not None for level in self.levels() for node in level.children())

    def levels(self) -> Iterator[Node]:
        """Every node that has children, and every root: all others are one step away from these."""
        waiting = list(self.domains.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend([child for child in node.children() if child.is_level])


def find(node: Node, entry: Entry) -> tuple[Node | None, bool]:
    """The child of `node` that `entry` meets, and whether it is one of many values that do."""
    child = node.exact.get(entry)
    if child is not None:
        return child, False
    for wildcard in node.wildcards:
        if wildcard.matches(entry):
            return wildcard.node, True
    if entry.key in node.patterns:
        address = parse_address(entry.value)
        for child in node.patterns[entry.key]:
            if child.pattern is not None and child.pattern.matches(entry.value, address):
                return child, True
    return node.by_key.get(entry.key), False
