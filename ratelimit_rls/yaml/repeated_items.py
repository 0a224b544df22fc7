"""Repeated list items: maps with identical text except for the scalar after `value:`.

    - {key: user, value: alice, rate_limit: {unit: day, requests_per_unit: 5}}
    - {key: user, value: bob, rate_limit: {unit: day, requests_per_unit: 5}}      same shape
    - {key: user, value: bob, rate_limit: {unit: day, requests_per_unit: 9}}      another shape

Large rules have thousands of items of each shape. If the first item of a shape has no diagnostics, the rest are
compiled from it by substituting value and position. If it has diagnostics, each item is checked, since each needs its
own position. So repeated items are not parsed until they are accessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ratelimit_rls.yaml.nodes import Pair, Variant, YamlMap, YamlNode, YamlScalar
from ratelimit_rls.yaml.scalars import MAX_INT64, resolve

ItemReader = Callable[[str, int], YamlMap]

ITEM = re.compile(
    # Up to the first `value:`, which is the effective one, and the quote after it if there is one …
    r"((?>(\ *+)-\ (?:[^\n]*+\n\2\ ++(?!-))*?[^\n]*?(?<=[{\ ])value:\ ++)([\"']?+))"
    r"([A-Za-z0-9_/][\w/.@+=$-]*+)"
    # … and the rest, without nested lists, if the next line does not belong to the item.
    r"(\3[^\n]*+(?:\n\2\ ++(?!-)[^\n]*+)*+)"
    r"(?=(?:\n\ *+(?:\#[^\n]*+)?(?=\n|\Z))*+(?:\Z|\n(?!\2\ )))",
    re.ASCII,
)
"""Matches a list item from the start of its line. Groups: the text before the value (with indent and quote), the value,
and the text after it. Whether it is the item's own and whole value is known only after the item is read.
"""


@dataclass(frozen=True, slots=True, eq=False)
class ItemShape:
    """Common text of repeated items: a `VariantFamily`. Shapes compare by identity."""

    before: str
    after: str
    is_quoted: bool
    column: int  # column of the map
    nodes: int  # nodes per item
    read_item: ItemReader  # reads an item from its text and its first line number
    shared: dict[object, Any] = field(default_factory=dict, repr=False, init=False)

    @classmethod
    def of(cls, item: re.Match[str], number: int, node: YamlNode, nodes: int, read: ItemReader) -> ItemShape | None:
        """Return the shape of `item`, which was read as `node`.

        None if the value is not the item's own, not whole, or not unique.
        """
        before, _, quote, value, after = item.groups()
        if not isinstance(node, YamlMap):
            return None
        line, column = number + before.count("\n"), len(before) - len(quote) - before.rfind("\n")
        own = [given for key, given in node.pairs if isinstance(key, YamlScalar) and key.text == "value"]
        if [given[:3] for given in own] != [(line, column, value)]:
            return None
        return cls(before, after, bool(quote), node.column, nodes, read)

    def accepts(self, value: str) -> bool:
        """Return whether `value` is valid as text there: neither null nor an unsupported number."""
        if self.is_quoted:
            return True
        _, meaning = resolve(value)
        return isinstance(meaning, str) or (isinstance(meaning, int) and meaning <= MAX_INT64)

    def read(self, line: int, value: str) -> Sequence[Pair]:
        return self.read_item(f"{self.before}{value}{self.after}", line).pairs

    def to_map(self, line: int, value: str) -> YamlMap:
        return YamlMap(line, self.column, Variant(self, line, value), may_merge=False)
