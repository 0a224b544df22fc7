"""Maps of a list that are written alike: letter by letter the same, but for what stands behind `value:`.

    - {key: user, value: alice, rate_limit: {unit: day, requests_per_unit: 5}}
    - {key: user, value: bob, rate_limit: {unit: day, requests_per_unit: 5}}      of one shape
    - {key: user, value: bob, rate_limit: {unit: day, requests_per_unit: 9}}      of another

Large rules have thousands of each shape. Whoever looks at one and finds nothing to tell need not look at the others:
what it means, they mean, of another value and at another place. Where there is something to tell, each is looked at,
since it is told of each at its own place. So nothing is read from those that are alike before somebody asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from ratelimit_rls.rules.node import Pair, YamlMap, YamlNode, YamlScalar
from ratelimit_rls.rules.scalars import MAX_INT64, resolve

Reader = Callable[[str, int], YamlMap]

ITEM = re.compile(
    # Up to the first `value:`, which is the one that counts, and the quote behind it if there is one …
    r"((?>(\ *+)-\ (?:[^\n]*+\n\2\ ++(?!-))*?[^\n]*?(?<=[{\ ])value:\ ++)([\"']?+))"
    r"([A-Za-z0-9_/][\w/.@+=$-]*+)"
    # … and the rest, of which no line begins another list, if what comes next is no part of it.
    r"(\3[^\n]*+(?:\n\2\ ++(?!-)[^\n]*+)*+)"
    r"(?=(?:\n\ *+(?:\#[^\n]*+)?(?=\n|\Z))*+(?:\Z|\n(?!\2\ )))",
    re.ASCII,
)
"""An item of a list, from where its line begins: the text before its value, with the indent and the quote, the value,
and the text behind it. Whether that is the value of the item itself, and all of it, is seen when the item is read."""


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """What maps that are alike have in common. Two shapes are equal only if they are the same object."""

    before: str
    after: str
    is_quoted: bool
    column: int  # of the map
    nodes: int  # of each
    read: Reader  # an item, by its text and the number of its first line
    # What was made of one of them, for the others, by who made it.
    made_of_it: dict[object, Any] = field(default_factory=dict, repr=False, init=False)

    @classmethod
    def of(cls, item: re.Match[str], number: int, node: YamlNode, nodes: int, read: Reader) -> Shape | None:
        """That of `item`, which was read as `node`; None: the value is not its own, or not all of it, or one of two."""
        before, _, quote, value, after = item.groups()
        if not isinstance(node, YamlMap):
            return None
        line, column = number + before.count("\n"), len(before) - len(quote) - before.rfind("\n")
        own = [given for key, given in node.pairs if isinstance(key, YamlScalar) and key.text == "value"]
        if [given[:3] for given in own] != [(line, column, value)]:
            return None
        return cls(before, after, bool(quote), node.column, nodes, read)

    def takes(self, value: str) -> bool:
        """Whether `value` is a text there, and neither nothing nor a number that is none of ours."""
        if self.is_quoted:
            return True
        _, meaning = resolve(value)
        return isinstance(meaning, str) or (isinstance(meaning, int) and meaning <= MAX_INT64)

    def map(self, line: int, value: str) -> YamlMap:
        return YamlMap(line, self.column, Alike(self, line, value), may_merge=False)


class Alike(Sequence[Pair]):
    """The keys and values of one of several maps that are alike, read when they are asked for."""

    __slots__ = ("_pairs", "line", "shape", "value")

    def __init__(self, shape: Shape, line: int, value: str) -> None:
        self.shape = shape
        self.line = line
        self.value = value
        self._pairs: Sequence[Pair] | None = None

    @property
    def pairs(self) -> Sequence[Pair]:
        if self._pairs is None:
            shape = self.shape
            self._pairs = shape.read(f"{shape.before}{self.value}{shape.after}", self.line).pairs
        return self._pairs

    def __iter__(self) -> Iterator[Pair]:
        return iter(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    @overload
    def __getitem__(self, at: int) -> Pair: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Pair]: ...
    def __getitem__(self, at: int | slice) -> Pair | Sequence[Pair]:
        return self.pairs[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)
