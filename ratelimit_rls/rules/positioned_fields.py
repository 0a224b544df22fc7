"""Reader for one YAML mapping: converts each value to its expected type and keeps its position."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, Generic, NamedTuple, TypeVar

from ratelimit_rls.core.model import MAX_REQUESTS_PER_UNIT, Position
from ratelimit_rls.rules import diagnostics, grammar
from ratelimit_rls.yaml.findings import Findings
from ratelimit_rls.yaml.nodes import Pair, YamlList, YamlMap, YamlNode, YamlScalar, is_null, tag
from ratelimit_rls.yaml.scalars import ScalarKind

T = TypeVar("T")
EnumT = TypeVar("EnumT", bound=Enum)


class Positioned(NamedTuple, Generic[T]):
    value: T
    file: str
    line: int
    column: int

    @property
    def position(self) -> Position:
        return Position(self.file, self.line, self.column)


class PositionedFields:
    """Values of one mapping by key, converted to their expected types. Null is the same as absent."""

    def __init__(self, fields: Iterable[Pair], found: Findings) -> None:
        self.found = found
        self._values: dict[str, YamlNode] = {}  # the last value of each key
        self._earlier: dict[str, list[YamlNode]] = {}
        self.is_broken = False
        for key, value in fields:
            if isinstance(key, YamlScalar) and isinstance(key.value, str):
                if key.text in self._values:
                    self._earlier.setdefault(key.text, []).append(self._values[key.text])
                self._values[key.text] = value

    def read(self, readers: Mapping[str, Callable[[PositionedFields, str], object]]) -> dict[str, Any]:
        """Return all values that are present and have a reader, by key. A mapping has a few of dozens of keys."""
        return {key: readers[key](self, key) for key in self._values if key in readers}

    def text(self, key: str) -> Positioned[str] | None:
        node = self._last(key)
        if node is None:
            return None
        if isinstance(node, YamlScalar):
            if grammar.is_unusable(node):
                self.is_broken = True  # reported by the grammar
                return None
            return Positioned(node.text, self.found.file, node.line, node.column)
        self.reject(node, "string", diagnostics.TEXT)
        return None

    def boolean(self, key: str) -> Positioned[bool] | None:
        node = self._last(key)
        if node is None:
            return None
        if isinstance(node, YamlScalar) and isinstance(node.value, bool):
            return Positioned(node.value, self.found.file, node.line, node.column)
        self.reject(node, "bool", diagnostics.BOOLEAN)
        return None

    def count(self, key: str) -> Positioned[int] | None:
        node = self._last(key)
        if node is None:
            return None
        if isinstance(node, YamlScalar) and node.kind is ScalarKind.INT:
            assert isinstance(node.value, int)
            if 0 <= node.value <= MAX_REQUESTS_PER_UNIT:
                return Positioned(node.value, self.found.file, node.line, node.column)
        self.reject(node, "uint32", diagnostics.COUNT)
        return None

    def node(self, key: str) -> Positioned[YamlNode] | None:
        """Return the node itself, for a specialised reader. It replaces a merged one as a whole."""
        node = self._last(key)
        return None if node is None else Positioned(node, self.found.file, node.line, node.column)

    def maps(self, key: str, go_type: str, read: Callable[[YamlMap, Findings], T]) -> tuple[T, ...]:
        node = self._last(key)
        if node is None:
            return ()
        if not isinstance(node, YamlList):
            self.reject(node, go_type, "must be a list of mappings")
            return ()
        return tuple(read(item, self.found) for item in node.items if isinstance(item, YamlMap))

    def merged(self, key: str, go_type: str, wanted: str) -> YamlMap | None:
        """Return the mapping under `key`, merged over earlier ones of the same key (as in go-yaml).

        So `<<: *base` followed by `rate_limit: {requests_per_unit: 5}` keeps the base's unit.
        """
        merged: YamlMap | None = None
        last = self._values.get(key)
        for node in (*self._earlier.get(key, ()), *(() if last is None else (last,))):
            if is_null(node):
                merged = None
            elif isinstance(node, YamlMap):
                merged = node if merged is None else YamlMap(node.line, node.column, (*merged.pairs, *node.pairs))
            else:
                self.reject(node, go_type, wanted, is_last=node is last)
        return merged

    def reject(self, node: YamlNode, go_type: str, wanted: str, is_last: bool = True) -> None:
        self.is_broken = True
        # The grammar may have reported it already, except where it does not check: metadata, the file itself, and
        # values that are overridden by a later key.
        if is_last and grammar.is_reported(node) and not go_type.startswith("map["):
            return
        text = node.text if isinstance(node, YamlScalar) else None
        self.found.error(node, diagnostics.wrong_type(node.line, tag(node), text, go_type, wanted))

    def _last(self, key: str) -> YamlNode | None:
        node = self._values.get(key)
        return None if node is None or is_null(node) else node


def read_enum(key: str, written: Positioned[str] | None, enum: type[EnumT], found: Findings) -> EnumT | None:
    """Read a key with an enumeration of values, such as `charge`. None if it is absent or its value is invalid."""
    if written is None:
        return None
    known = {member.value: member for member in enum}
    if written.value not in known:
        found.error(written.position, diagnostics.unknown_choice(key, written.value, known))
    return known.get(written.value)
