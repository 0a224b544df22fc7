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
alone. ● marks a rule. The second and third step are those of a `PatternIndex`, which does not try them one by one.

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
from ratelimit_rls.core.pattern import Pattern
from ratelimit_rls.core.pattern_index import PatternIndex, Wildcard
from ratelimit_rls.core.response_policy import DEFAULT_RESPONSE_POLICY, DenyResponse, ResponsePolicy
from ratelimit_rls.core.storage_keys import ShardBy, Sharding

_NO_CHILDREN: Mapping[Any, Any] = {}  # shared by all leaves, which are nearly all nodes of large rules


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
    pattern_index: PatternIndex[Node] | None = None  # None: there are no wildcards and no patterns
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
        return bool(self.exact or self.pattern_index or self.by_key)

    @property
    def wildcards(self) -> tuple[Wildcard[Node], ...]:
        """The children with a `*` in key or value, in file order. They are in `exact` or `by_key`, too."""
        return self.pattern_index.wildcards if self.pattern_index else ()

    @property
    def patterns(self) -> Mapping[str, tuple[Node, ...]]:
        """The children with a `match`, by key, in the order they are tried."""
        return self.pattern_index.patterns if self.pattern_index else _NO_CHILDREN

    def children(self) -> Iterator[Node]:
        of_patterns = chain.from_iterable(self.patterns.values())
        return chain(self.exact.values(), of_patterns, self.by_key.values())


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
    """Return the child of `node` that matches `entry`, and whether it has a wildcard or pattern."""
    child = node.exact.get(entry)
    if child is not None:
        return child, False
    if node.pattern_index is not None:
        child = node.pattern_index.find(entry.key, entry.value)
        if child is not None:
            return child, True
    return node.by_key.get(entry.key), False
