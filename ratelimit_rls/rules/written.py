"""What one mapping says, key by key, each value read as what it should be and with its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from ratelimit_rls.core.model import MAX_REQUESTS_PER_UNIT, Position
from ratelimit_rls.rules import grammar, offences
from ratelimit_rls.rules.grammar import Findings
from ratelimit_rls.rules.node import Pair, YamlList, YamlMap, YamlNode, YamlScalar, is_null, tag
from ratelimit_rls.rules.scalars import Kind

T = TypeVar("T")


class Written(NamedTuple, Generic[T]):
    value: T
    file: str
    line: int
    column: int

    @property
    def position(self) -> Position:
        return Position(self.file, self.line, self.column)


class WrittenFields:
    """The values of one mapping by key, read as what they should be. Null is the same as absent."""

    def __init__(self, fields: Iterable[Pair], found: Findings) -> None:
        self.found = found
        self._values: dict[str, YamlNode] = {}  # the last of each
        self._earlier: dict[str, list[YamlNode]] = {}
        self.is_broken = False
        for key, value in fields:
            if isinstance(key, YamlScalar) and isinstance(key.value, str):
                if key.text in self._values:
                    self._earlier.setdefault(key.text, []).append(self._values[key.text])
                self._values[key.text] = value

    def read(self, readers: Mapping[str, Callable[[WrittenFields, str], object]]) -> dict[str, Any]:
        """By key, all that is written and has a reader: of dozens of keys, a mapping has a few."""
        return {key: readers[key](self, key) for key in self._values if key in readers}

    def text(self, key: str) -> Written[str] | None:
        node = self._last(key)
        if node is None:
            return None
        if isinstance(node, YamlScalar):
            if grammar.is_unusable(node):
                self.is_broken = True  # reported by the grammar
                return None
            return Written(node.text, self.found.file, node.line, node.column)
        self.refuse(node, "string", offences.TEXT)
        return None

    def truth(self, key: str) -> Written[bool] | None:
        node = self._last(key)
        if node is None:
            return None
        if isinstance(node, YamlScalar) and isinstance(node.value, bool):
            return Written(node.value, self.found.file, node.line, node.column)
        self.refuse(node, "bool", offences.TRUTH)
        return None

    def count(self, key: str) -> Written[int] | None:
        node = self._last(key)
        if node is None:
            return None
        if isinstance(node, YamlScalar) and node.kind is Kind.INT:
            assert isinstance(node.value, int)
            if 0 <= node.value <= MAX_REQUESTS_PER_UNIT:
                return Written(node.value, self.found.file, node.line, node.column)
        self.refuse(node, "uint32", offences.COUNT)
        return None

    def node(self, key: str) -> Written[YamlNode] | None:
        """As it stands there, for whoever reads it: taken whole, never laid over one that was merged."""
        node = self._last(key)
        return None if node is None else Written(node, self.found.file, node.line, node.column)

    def maps(self, key: str, go_type: str, read: Callable[[YamlMap, Findings], T]) -> tuple[T, ...]:
        node = self._last(key)
        if node is None:
            return ()
        if not isinstance(node, YamlList):
            self.refuse(node, go_type, "it is a list of mappings")
            return ()
        return tuple(read(item, self.found) for item in node.items if isinstance(item, YamlMap))

    def joined(self, key: str, go_type: str, wanted: str) -> YamlMap | None:
        """The mapping under `key`, laid over those written for it before (the reference's dialect).

        So `<<: *base` followed by `rate_limit: {requests_per_unit: 5}` keeps the base's unit.
        """
        joined: YamlMap | None = None
        last = self._values.get(key)
        for node in (*self._earlier.get(key, ()), *(() if last is None else (last,))):
            if is_null(node):
                joined = None
            elif isinstance(node, YamlMap):
                joined = node if joined is None else YamlMap(node.line, node.column, (*joined.pairs, *node.pairs))
            else:
                self.refuse(node, go_type, wanted, is_last=node is last)
        return joined

    def refuse(self, node: YamlNode, go_type: str, wanted: str, is_last: bool = True) -> None:
        self.is_broken = True
        # The grammar may have reported it already, except where it does not look: metadata, the file itself, and what
        # is written again later.
        if is_last and grammar.is_refused(node) and not go_type.startswith("map["):
            return
        text = node.text if isinstance(node, YamlScalar) else None
        self.found.error(node, offences.wrong_type(node.line, tag(node), text, go_type, wanted))

    def _last(self, key: str) -> YamlNode | None:
        node = self._values.get(key)
        return None if node is None or is_null(node) else node
