"""One mapping, read strictly: a key that is unknown, written twice or of the wrong kind is an error.

For what the reference does not know (the mappings that are new in rules, and test files), where nothing has to be
forgiven. All is reported to the findings of the file, with its place, and reading goes on, so that one look finds all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar

from ratelimit_rls.rules import offences
from ratelimit_rls.rules.grammar import Findings
from ratelimit_rls.rules.node import YamlList, YamlMap, YamlNode, YamlScalar, excerpt, is_null
from ratelimit_rls.rules.scalars import Kind

T = TypeVar("T")


class Fields:
    """The values of one mapping. Null is the same as absent."""

    def __init__(
        self, node: YamlNode, keys: tuple[str, ...], found: Findings, refused: Mapping[str, str] | None = None
    ) -> None:
        """`refused` are keys that somebody may well try, each with the sentence that says what to do instead."""
        self.node = node
        self._found = found
        self._refused = refused or {}
        self._values: dict[str, YamlNode] = {}
        if not isinstance(node, YamlMap):
            found.error(node, f"{excerpt(node)} is not a mapping; its keys are {', '.join(keys)}")
            return
        for key, value in node.fields():
            self._add(key, value, keys)
        written = Counter(key.text for key, _ in node.pairs if isinstance(key, YamlScalar))
        for name in sorted(name for name in keys if written[name] > 1):
            found.error(node, f"'{name}' is written twice")

    def _add(self, key: YamlNode, value: YamlNode, keys: tuple[str, ...]) -> None:
        if isinstance(key, YamlScalar) and key.text in self._refused:
            self._found.error(key, self._refused[key.text])
        elif not isinstance(key, YamlScalar) or key.text not in keys:
            self._found.error(key, offences.unknown_key(excerpt(key), keys, ()))
        elif not is_null(value):
            self._values[key.text] = value

    def has(self, key: str) -> bool:
        return key in self._values

    def value(self, key: str) -> YamlNode | None:
        return self._values.get(key)

    def required(self, key: str, example: str) -> YamlNode | None:
        node = self._values.get(key)
        if node is None and isinstance(self.node, YamlMap):
            self._found.error(self.node, f"'{key}' is missing; write '{example}'")
        return node

    def required_list(self, key: str, example: str) -> None:
        node = self.required(key, example)
        if isinstance(node, YamlList) and not node.items:
            self._found.error(node, f"'{key}' is empty; write '{example}'")

    def text(self, key: str) -> str | None:
        return self.read(key, str)

    def whole(self, key: str, least: int) -> int | None:
        node = self._values.get(key)
        return None if node is None else whole(node, key, least, self._found)

    def truth(self, key: str) -> bool:
        node = self._values.get(key)
        if node is None:
            return False
        if isinstance(node, YamlScalar) and isinstance(node.value, bool):
            return node.value
        self._found.error(node, f"{key}: {excerpt(node)} is not true or false")
        return False

    def read(self, key: str, parse: Callable[[str], T]) -> T | None:
        """What `parse` makes of the text under `key`; its ValueError is the end of a sentence that starts with it."""
        node = self._values.get(key)
        if node is None:
            return None
        if not isinstance(node, YamlScalar):
            self._found.error(node, f"{key}: {excerpt(node)} is not text")
            return None
        try:
            return parse(node.text)
        except ValueError as fault:
            self._found.error(node, f"{key}: {excerpt(node)} {fault}")
            return None

    def items(self, key: str) -> tuple[YamlNode, ...]:
        """The elements of a list."""
        node = self._values.get(key)
        if node is None:
            return ()
        if isinstance(node, YamlList):
            return node.items
        self._found.error(node, f"{key}: {excerpt(node)} is not a list")
        return ()


def whole(node: YamlNode, key: str, least: int, found: Findings) -> int | None:
    if isinstance(node, YamlScalar) and node.kind is Kind.INT and isinstance(node.value, int) and node.value >= least:
        return node.value
    found.error(node, f"{key}: {excerpt(node)} is not a whole number from {least} on")
    return None
