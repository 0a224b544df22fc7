"""The wildcards and patterns of one level, compiled, so that a lookup does not depend on how many there are.

    level ─► by_key["path"] ─► ValueIndex ─► wildcards     WildcardIndex   heads ► tails ► the first in file order
                                          ─► networks      NetworkIndex    by bisection
                                          ─► prefixes      PrefixTree      the longest
                                          ─► expressions   a tuple         one after the other
          ─► by_key_glob   [(x-*, WildcardIndex)]          wildcards with a `*` in their key, one after the other

The steps of a lookup are those of `find_child` in tree.py, and so is their order. What is still tried one after the
other: the regular expressions of a key, which are few (`MAX_EXPRESSIONS`); wildcards with more than one `*` that begin
alike and end alike; and the different keys with a `*`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from ratelimit_rls.core.pattern import Glob, Pattern, PatternKind, parse_address


class PatternChild(Protocol):
    """A child of a level. It is a `Node` of tree.py, which imports this module."""

    @property
    def pattern(self) -> Pattern | None: ...


ChildT = TypeVar("ChildT", bound=PatternChild)
ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class Wildcard(Generic[ChildT]):
    """A child with a `*` in its key or value. A child without a value matches any value."""

    key: Glob
    value: Glob | None
    node: ChildT

    def matches(self, key: str, value: str) -> bool:
        return self.key.matches(key) and (self.value is None or self.value.matches(value))


@dataclass(frozen=True, slots=True)
class PatternIndex(Generic[ChildT]):
    """Finds the child that a key and a value select by a wildcard or a pattern."""

    wildcards: tuple[Wildcard[ChildT], ...]  # in file order
    patterns: Mapping[str, tuple[ChildT, ...]]  # by key, in order of precedence
    by_key: Mapping[str, ValueIndex[ChildT]] = field(compare=False, repr=False)
    by_key_glob: tuple[tuple[Glob, WildcardIndex[ChildT]], ...] = field(compare=False, repr=False)  # in file order

    @classmethod
    def of(
        cls, wildcards: Sequence[Wildcard[ChildT]], patterns: Mapping[str, Sequence[ChildT]]
    ) -> PatternIndex[ChildT] | None:
        """Compile the wildcards and the patterns of a level. Return None if it has neither."""
        if not wildcards and not patterns:
            return None
        of_key: dict[str, list[_Ranked[ChildT]]] = {}
        of_key_glob: dict[Glob, list[_Ranked[ChildT]]] = {}
        for ranked in enumerate(wildcards):
            key = ranked[1].key
            if key.is_literal:
                of_key.setdefault(key.pattern, []).append(ranked)
            else:
                of_key_glob.setdefault(key, []).append(ranked)
        in_precedence = {key: tuple(sorted(nodes, key=_precedence)) for key, nodes in patterns.items()}
        return cls(
            tuple(wildcards),
            in_precedence,
            {key: ValueIndex(of_key.get(key, ()), in_precedence.get(key, ())) for key in {**of_key, **in_precedence}},
            tuple((key, WildcardIndex(ones)) for key, ones in of_key_glob.items()),
        )

    @property
    def has_key_globs(self) -> bool:
        """Return whether a wildcard has a `*` in its key.

        Otherwise `by_key` alone says which child a value selects: `by_key[key].find(value)`, or none.
        """
        return bool(self.by_key_glob)

    def find(self, key: str, value: str) -> ChildT | None:
        """Return the node of the first wildcard that matches, or else that of the most specific pattern."""
        of_key = self.by_key.get(key)
        if not self.by_key_glob:
            return None if of_key is None else of_key.find(value)
        child = self.first_wildcard(key, value)
        if child is None and of_key is not None:
            return of_key.find_pattern(value)
        return child

    def first_wildcard(self, key: str, value: str) -> ChildT | None:
        """Return the node of the first wildcard that matches."""
        of_key = self.by_key.get(key)
        first = None if of_key is None else of_key.first_wildcard(value)
        for glob, index in self.by_key_glob:
            if first is not None and first.rank < index.first_rank:
                break
            if glob.matches(key):
                other = index.find(value)
                if other is not None and (first is None or other.rank < first.rank):
                    first = other
        return None if first is None else first.node


_Ranked: TypeAlias = tuple[int, Wildcard[ChildT]]
"""A wildcard and its place in file order among those of its level."""


class ValueIndex(Generic[ChildT]):
    """Finds the child that a value selects among the wildcards and patterns of one key."""

    __slots__ = ("_expressions", "_networks", "_prefixes", "_wildcards")

    def __init__(self, wildcards: Sequence[_Ranked[ChildT]], patterns: Sequence[ChildT]) -> None:
        self._wildcards = WildcardIndex(wildcards) if wildcards else None
        networks: dict[int, dict[IPv4Network | IPv6Network, ChildT]] = {}
        prefixes: dict[str, ChildT] = {}
        expressions: list[ChildT] = []
        for child in patterns:
            assert child.pattern is not None
            subject = child.pattern.subject
            if child.pattern.kind is PatternKind.CIDR:
                networks.setdefault(subject.version, {})[subject] = child
            elif child.pattern.kind is PatternKind.PREFIX:
                prefixes[subject] = child
            else:
                expressions.append(child)
        self._networks = {version: NetworkIndex(of_version) for version, of_version in networks.items()}
        self._prefixes = PrefixTree.of(prefixes) if prefixes else None
        self._expressions = tuple(expressions)

    def find(self, value: str) -> ChildT | None:
        """Return the node of the first wildcard that matches, or else that of the most specific pattern."""
        if self._wildcards is not None:
            first = self._wildcards.find(value)
            if first is not None:
                return first.node
        return self.find_pattern(value)

    def first_wildcard(self, value: str) -> _Candidate[ChildT] | None:
        return None if self._wildcards is None else self._wildcards.find(value)

    def find_pattern(self, value: str) -> ChildT | None:
        """Return the node of the longest network, or else the longest prefix, or else the first expression."""
        if self._networks:
            address = parse_address(value)
            if address is not None and address.version in self._networks:
                child = self._networks[address.version].find(int(address))
                if child is not None:
                    return child
        if self._prefixes is not None:
            prefixes = self._prefixes.prefixes_of(value)
            if prefixes:
                return prefixes[-1]
        for child in self._expressions:
            assert child.pattern is not None
            if child.pattern.matches(value, None):
                return child
        return None


class WildcardIndex(Generic[ChildT]):
    """Finds the first wildcard in file order whose value matches, among those of one key.

    `/a/*/b/*.json` has the head `/a/` and the tail `.json`. A value leads to the heads that it begins with, and from
    each to the tails that it ends with. What remains to be matched are those with several `*`.
    """

    __slots__ = ("_heads", "_longest_tail", "first_rank")

    def __init__(self, wildcards: Sequence[_Ranked[ChildT]]) -> None:
        self.first_rank, _ = wildcards[0]
        self._longest_tail = 0
        heads: dict[str, dict[str, list[_Candidate[ChildT]]]] = {}
        for rank, wildcard in wildcards:
            head, tail = ("", "") if wildcard.value is None else wildcard.value.ends
            candidate = _Candidate(rank, len(head) + len(tail), _beyond_its_ends(wildcard.value), wildcard.node)
            heads.setdefault(head, {}).setdefault(tail[::-1], []).append(candidate)
            self._longest_tail = max(self._longest_tail, len(tail))
        self._heads = PrefixTree.of({head: PrefixTree.of(tails) for head, tails in heads.items()})

    def find(self, value: str) -> _Candidate[ChildT] | None:
        backwards = value[: -self._longest_tail - 1 : -1]
        first = None
        for tails in self._heads.prefixes_of(value):
            for candidates in tails.prefixes_of(backwards):
                first = _first_match(candidates, value, first)
        return first


class _Candidate(NamedTuple, Generic[ChildT]):
    """A wildcard of a value that begins and ends as it does."""

    rank: int  # in file order, among the wildcards of its level
    length: int  # of its head and tail together
    value: Glob | None  # None: nothing else has to match
    node: ChildT


def _beyond_its_ends(value: Glob | None) -> Glob | None:
    """Return the value, or None if head and tail are all there is to match: it has one `*`, or is not written."""
    return None if value is None or len(value.parts) == 2 else value


def _first_match(
    candidates: Iterable[_Candidate[ChildT]], value: str, first: _Candidate[ChildT] | None
) -> _Candidate[ChildT] | None:
    """Return the first candidate that matches, or `first` if that one comes earlier in the file."""
    for candidate in candidates:
        rank, length, glob, _ = candidate
        if first is not None and first.rank < rank:
            break
        if len(value) >= length and (glob is None or glob.matches(value)):
            return candidate
    return first


class PrefixTree(Generic[ItemT]):
    """Finds the texts of a set that another text begins with.

    Each node takes as many characters at once as the shortest text below it has. So a lookup takes two or three steps
    for texts that are not prefixes of each other, and at most one more for each that is. It never takes more than
    there are characters.
    """

    __slots__ = ("_below", "_item", "_only", "_piece", "_step")

    def __init__(self) -> None:
        self._item: ItemT | None = None  # of the text that ends here
        self._step = 0  # characters to the nodes below
        self._below: dict[str, PrefixTree[ItemT]] | None = None
        self._piece = ""  # the way to the only node below, without a dictionary: most nodes have one or none
        self._only: PrefixTree[ItemT] | None = None

    @classmethod
    def of(cls, items: Mapping[str, ItemT]) -> PrefixTree[ItemT]:
        root = cls()
        waiting = [(root, 0, list(items.items()))]
        while waiting:  # no recursion: a text may have thousands of prefixes
            node, at, inside = waiting.pop()
            longer = []
            for text, item in inside:
                if len(text) == at:
                    node._item = item
                else:
                    longer.append((text, item))
            if longer:
                end = min([len(text) for text, _ in longer])
                groups: dict[str, list[tuple[str, ItemT]]] = {}
                for text, item in longer:
                    groups.setdefault(text[at:end], []).append((text, item))
                below = node._grow(end - at, groups)
                waiting.extend((child, end, groups[piece]) for piece, child in below.items())
        return root

    def _grow(self, step: int, pieces: Iterable[str]) -> dict[str, PrefixTree[ItemT]]:
        """Add empty nodes below this one. Return them by the pieces that lead to them."""
        below: dict[str, PrefixTree[ItemT]] = {piece: type(self)() for piece in pieces}
        self._step = step
        if len(below) > 1:
            self._below = below
        else:
            ((self._piece, self._only),) = below.items()
        return below

    def prefixes_of(self, text: str) -> list[ItemT]:
        """Return the items of all texts that `text` begins with, the shortest first."""
        found: list[ItemT] = []
        node: PrefixTree[ItemT] | None = self
        at = 0
        while node is not None:
            if node._item is not None:
                found.append(node._item)
            end = at + node._step
            if node._below is not None:
                node = node._below.get(text[at:end])
            elif text.startswith(node._piece, at):
                node = node._only
            else:
                break
            at = end
        return found


class NetworkIndex(Generic[ItemT]):
    """Finds the longest network that contains an address, among networks of one IP version.

    Networks contain each other or are disjoint. So they divide the addresses into ranges with one answer each, and a
    lookup is a bisection.
    """

    __slots__ = ("_longest", "_starts")

    def __init__(self, items: Mapping[IPv4Network | IPv6Network, ItemT]) -> None:
        self._starts = [0]
        self._longest: list[ItemT | None] = [None]  # of the range that begins at the start of the same position
        around: list[tuple[int, ItemT]] = []  # the networks around the current one, with their ends, outermost first
        for network in sorted(items, key=_outermost_first):
            start, end = int(network.network_address), int(network.broadcast_address) + 1
            self._leave(around, start)
            self._begin(start, items[network])
            around.append((end, items[network]))
        self._leave(around, None)

    def find(self, address: int) -> ItemT | None:
        return self._longest[bisect_right(self._starts, address) - 1]

    def _leave(self, around: list[tuple[int, ItemT]], until: int | None) -> None:
        """Drop the networks that end by `until` (None: all), and begin the range behind each."""
        while around and (until is None or around[-1][0] <= until):
            end, _ = around.pop()
            self._begin(end, around[-1][1] if around else None)

    def _begin(self, start: int, item: ItemT | None) -> None:
        if self._starts[-1] == start:
            self._longest[-1] = item
        else:
            self._starts.append(start)
            self._longest.append(item)


def _outermost_first(network: IPv4Network | IPv6Network) -> tuple[int, int]:
    return int(network.network_address), network.prefixlen


def _precedence(child: PatternChild) -> tuple[int, int]:
    assert child.pattern is not None
    return child.pattern.precedence
