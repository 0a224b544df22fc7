"""The compiled rules: an immutable tree, built once per load and swapped whole.

    domain: edge                              Node edge
    descriptors:                               ├─ exact     ("plan", "free") ──► Node ─ by_key "user" ──► Node ● 10/min
      - key: plan                              │
        value: free                            ├─ wildcards ("path", "/v1/*") ─► Node ● 5/s
        descriptors: [{key: user, ...}]        │
      - {key: path, value: /v1/*, ...}         └─ by_key    "plan" ────────────► Node ● 100/min
      - {key: plan, ...}

Each level is looked up in four steps, and the first hit is final: the exact pair, then the first wildcard in file
order, then the most specific pattern (the longest network, the longest prefix, the first expression), then the key
alone. ● marks a rule.

Nodes are found by (key, value) pairs, never by a joined string: envoyproxy/ratelimit joins with "_", so there the pair
("a", "b_c") also matches a rule for ("a_b", "c").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

from ratelimit_rls.core.attributes import AttributeMapping
from ratelimit_rls.core.identity import IdentityConfig
from ratelimit_rls.core.model import Entry, OnStoreFailure, Position, Rule
from ratelimit_rls.core.pattern import Pattern, parse_address
from ratelimit_rls.core.response_policy import DEFAULT_RESPONSE_POLICY, DenyResponse, ResponsePolicy
from ratelimit_rls.core.storage_keys import ShardBy, Sharding

WILDCARD = "*"

_NO_CHILDREN: Mapping[Any, Any] = {}  # shared by all leaves, which are nearly all nodes of large rules


@dataclass(frozen=True, slots=True)
class Glob:
    """A pattern anchored at both ends, in which each `*` matches zero or more characters."""

    pattern: str
    parts: tuple[str, ...]

    @classmethod
    def of(cls, pattern: str) -> Glob:
        return cls(pattern, tuple(pattern.split(WILDCARD)))

    def matches(self, text: str) -> bool:
        """Return whether the pattern matches, in time linear in the text.

        Taking each middle part at its first occurrence never misses a match.
        """
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
    """One descriptor of the rules. The root of a domain is also a Node, with the domain's name as its key."""

    key: str
    value: str = ""  # "": any value, or those that the pattern matches
    pattern: Pattern | None = None
    rule: Rule | None = None
    share_threshold: bool = False
    value_to_metric: bool = False
    position: Position | None = None
    overrode: tuple[Position, ...] = ()  # overridden definitions from sources of lower priority
    # Set on roots only, for limits carried by requests; each rule has its own.
    response_policy: ResponsePolicy = DEFAULT_RESPONSE_POLICY
    deny: DenyResponse | None = None
    on_store_failure: OnStoreFailure | None = None
    shard_by: Sharding = ShardBy.DESCRIPTOR  # roots only
    exact: Mapping[tuple[str, str], Node] = _NO_CHILDREN
    wildcards: tuple[Wildcard, ...] = ()  # in file order
    patterns: Mapping[str, tuple[Node, ...]] = _NO_CHILDREN  # by key, in the order they are tried
    by_key: Mapping[str, Node] = _NO_CHILDREN

    @property
    def label(self) -> str:
        """Name of the node in metric names and /rlconfig, as in envoyproxy/ratelimit."""
        return f"{self.key}_{self.shared_value}" if self.shared_value else self.key

    @property
    def shared_value(self) -> str:
        """Text that replaces the values that match this node where they share a counter."""
        return self.pattern.label if self.pattern else self.value

    @property
    def has_children(self) -> bool:
        return bool(self.exact or self.patterns or self.by_key)

    def children(self) -> Iterator[Node]:
        of_patterns = chain.from_iterable(self.patterns.values())
        return chain(self.exact.values(), of_patterns, self.by_key.values())


@dataclass(frozen=True, slots=True)
class Wildcard:
    """A child with a `*` in its key or value. A child without a value matches any value."""

    key: Glob
    value: Glob | None
    node: Node

    def matches(self, entry: Entry) -> bool:
        return self.key.matches(entry.key) and (self.value is None or self.value.matches(entry.value))


@dataclass(frozen=True, slots=True)
class Tree:
    """The rules of all domains, as of one load."""

    domains: Mapping[str, Node] = field(default_factory=dict)
    mappings: Mapping[str, AttributeMapping] = field(default_factory=dict)  # `ext_authz` of the domains that have one
    identities: Mapping[str, IdentityConfig] = field(default_factory=dict)  # `identity` of the domains that have one

    def rules(self) -> list[Rule]:
        """Return all rules, sorted by path."""
        found = [node.rule for level in self.levels() for node in level.children() if node.rule is not None]
        return sorted(found, key=attrgetter("path"))

    def count_rules(self) -> int:
        """Return the number of rules.

        It builds no list: for large rules that, and sorting it, takes longer than swapping the tree.
        """
        return sum(node.rule is not None for level in self.levels() for node in level.children())

    def levels(self) -> Iterator[Node]:
        """Yield every root and every node with children. All other nodes are children of these."""
        waiting = list(self.domains.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend([child for child in node.children() if child.has_children])


def find_child(node: Node, entry: Entry) -> tuple[Node | None, bool]:
    """Return the child of `node` that matches `entry`, and whether other values match it too (wildcard or pattern)."""
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
