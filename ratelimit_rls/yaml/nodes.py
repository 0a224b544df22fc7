"""Nodes of a YAML document as written. Every node has its position; tags never construct objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, overload

from ratelimit_rls.yaml.scalars import ScalarKind, ScalarValue

MERGE_KEY = "<<"


# Tuples, because large rules have hundreds of thousands of nodes.


class YamlScalar(NamedTuple):
    line: int
    column: int
    text: str  # as written, for fields that expect text
    kind: ScalarKind
    value: ScalarValue
    is_merge_key: bool = False


class YamlList(NamedTuple):
    line: int
    column: int
    items: tuple[YamlNode, ...]


class YamlMap(NamedTuple):
    line: int
    column: int
    pairs: Sequence[Pair]
    may_merge: bool = True  # False: no key is `<<`

    def fields(self) -> Iterable[Pair]:
        """Return all pairs of key and value with `<<` replaced by the merged pairs. Of equal keys, the last one counts.

        A merge takes effect at its position: a merge after a key overrides it (as in go-yaml; the YAML specification
        lets the key win). In a list of merges the earlier map wins.
        """
        return self._merged() if self.may_merge else self.pairs

    @property
    def variant(self) -> Variant | None:
        """The pairs, if this map is a variant of others."""
        return self.pairs if isinstance(self.pairs, Variant) else None

    def _merged(self) -> Iterator[Pair]:
        for key, value in self.pairs:
            if not (isinstance(key, YamlScalar) and key.is_merge_key):
                yield key, value
            elif isinstance(value, YamlMap):
                yield from value.fields()
            elif isinstance(value, YamlList):
                for item in reversed(value.items):
                    assert isinstance(item, YamlMap)  # checked by the parser
                    yield from item.fields()


YamlNode = YamlScalar | YamlList | YamlMap
Pair = tuple[YamlNode, YamlNode]
"""A key and its value."""


class VariantFamily(Protocol):
    """Maps of one document that are equal but for the scalar under `value`, and their positions."""

    @property
    def shared(self) -> dict[object, Any]:
        """Results that hold for the whole family, by the function, type or name of what they are the result of."""

    def read(self, line: int, value: str) -> Sequence[Pair]:
        """Return the keys and values of the map with that value, which begins on that line."""

    def to_map(self, line: int, value: str) -> YamlMap:
        """Return the map with that value, which is not read until it is accessed."""


class Variant(Sequence[Pair]):
    """Keys and values of one map of a family, read on first access.

    A large document has thousands of variants of a few maps, and what is found out about one often holds for all.
    """

    __slots__ = ("_family", "_line", "_pairs", "shared", "value")

    def __init__(self, family: VariantFamily, line: int, value: str) -> None:
        self._family = family
        self._line = line
        self._pairs: Sequence[Pair] | None = None
        self.value = value
        self.shared = family.shared

    def to_map(self) -> YamlMap:
        """Return a map of its own with these keys and values: what is read from it is not retained here."""
        return self._family.to_map(self._line, self.value)

    @property
    def _read(self) -> Sequence[Pair]:
        if self._pairs is None:
            self._pairs = self._family.read(self._line, self.value)
        return self._pairs

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)

    @overload
    def __getitem__(self, at: int) -> Pair: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Pair]: ...
    def __getitem__(self, at: int | slice) -> Pair | Sequence[Pair]:
        return self._read[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)


def is_null(node: YamlNode) -> bool:
    return isinstance(node, YamlScalar) and node.value is None


def tag(node: YamlNode) -> str:
    """Return the node's tag, as messages show it."""
    if isinstance(node, YamlScalar):
        return node.kind.value
    return "!!map" if isinstance(node, YamlMap) else "!!seq"


def excerpt(node: YamlNode) -> str:
    """Return a short excerpt of the node for messages, whatever its size."""
    if isinstance(node, YamlMap):
        return "a mapping"
    if isinstance(node, YamlList):
        return "a list"
    text = node.text if node.kind is not ScalarKind.NULL else "null"
    return text if len(text) <= 60 else text[:57] + "..."
