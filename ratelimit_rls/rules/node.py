"""A YAML document as it was written: every node knows its place, and nothing in it was ever constructed from a tag."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ratelimit_rls.rules.scalars import Kind, Value

MERGE_KEY = "<<"


# Tuples because there are hundreds of thousands of them in large rules.


class YamlScalar(NamedTuple):
    line: int
    column: int
    text: str  # as written: what a place for text takes
    kind: Kind
    value: Value
    is_merge_key: bool = False


class YamlList(NamedTuple):
    line: int
    column: int
    items: tuple[YamlNode, ...]


class YamlMap(NamedTuple):
    line: int
    column: int
    pairs: Sequence[Pair]
    may_merge: bool = True  # False: no key is `<<`, and nobody has to look

    def fields(self) -> Iterable[Pair]:
        """Every key with its value, `<<` replaced by what it merges, so that of equal keys the last one counts.

        A merge takes effect where it stands: one written after a key overrides it (the reference's dialect; YAML's
        own text would let the key win). In a list of merges the earlier map wins.
        """
        return self._merged() if self.may_merge else self.pairs

    def _merged(self) -> Iterator[Pair]:
        for key, value in self.pairs:
            if not (isinstance(key, YamlScalar) and key.is_merge_key):
                yield key, value
            elif isinstance(value, YamlMap):
                yield from value.fields()
            elif isinstance(value, YamlList):
                for item in reversed(value.items):
                    assert isinstance(item, YamlMap)  # load has checked it
                    yield from item.fields()


YamlNode = YamlScalar | YamlList | YamlMap
Pair = tuple[YamlNode, YamlNode]
"""A key with its value."""


def is_null(node: YamlNode) -> bool:
    return isinstance(node, YamlScalar) and node.value is None


def tag(node: YamlNode) -> str:
    """The name messages give the kind of a node."""
    if isinstance(node, YamlScalar):
        return node.kind.value
    return "!!map" if isinstance(node, YamlMap) else "!!seq"


def excerpt(node: YamlNode) -> str:
    """The node as a message shows it: short, whatever its size."""
    if isinstance(node, YamlMap):
        return "a mapping"
    if isinstance(node, YamlList):
        return "a list"
    text = node.text if node.kind is not Kind.NULL else "null"
    return text if len(text) <= 60 else text[:57] + "..."
