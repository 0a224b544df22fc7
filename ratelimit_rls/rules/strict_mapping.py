"""Strict reader for one YAML mapping: unknown keys, keys written twice and values of the wrong type are errors.

For mappings that envoyproxy/ratelimit does not have (the new ones in rules, and test files), where nothing has to be
tolerated for compatibility. All errors go to the file's findings with their positions, and reading continues, so that
one pass finds all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar

from ratelimit_rls.rules import diagnostics
from ratelimit_rls.rules.grammar import Findings
from ratelimit_rls.rules.yaml.nodes import YamlList, YamlMap, YamlNode, YamlScalar, excerpt, is_null
from ratelimit_rls.rules.yaml.scalars import ScalarKind

T = TypeVar("T")


class StrictMapping:
    """Values of one mapping by key. Null is the same as absent."""

    def __init__(
        self, node: YamlNode, keys: tuple[str, ...], found: Findings, unsupported: Mapping[str, str] | None = None
    ) -> None:
        """Read `node`. `unsupported` are keys that users may try, each with a message that says what to use."""
        self.node = node
        self._found = found
        self._unsupported = unsupported or {}
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
        if isinstance(key, YamlScalar) and key.text in self._unsupported:
            self._found.error(key, self._unsupported[key.text])
        elif not isinstance(key, YamlScalar) or key.text not in keys:
            self._found.error(key, diagnostics.unknown_key(excerpt(key), keys, ()))
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

    def integer(self, key: str, least: int) -> int | None:
        node = self._values.get(key)
        return None if node is None else read_integer(node, key, least, self._found)

    def boolean(self, key: str) -> bool:
        node = self._values.get(key)
        if node is None:
            return False
        if isinstance(node, YamlScalar) and isinstance(node.value, bool):
            return node.value
        self._found.error(node, f"{key}: {excerpt(node)} is not true or false")
        return False

    def read(self, key: str, parse: Callable[[str], T]) -> T | None:
        """Return `parse` of the text under `key`.

        The message of its ValueError must complete a sentence that starts with the text.
        """
        node = self._values.get(key)
        if node is None:
            return None
        if not isinstance(node, YamlScalar):
            self._found.error(node, f"{key}: {excerpt(node)} is not text")
            return None
        try:
            return parse(node.text)
        except ValueError as error:
            self._found.error(node, f"{key}: {excerpt(node)} {error}")
            return None

    def items(self, key: str) -> tuple[YamlNode, ...]:
        """Return the elements of the list under `key`; () if it is absent."""
        node = self._values.get(key)
        if node is None:
            return ()
        if isinstance(node, YamlList):
            return node.items
        self._found.error(node, f"{key}: {excerpt(node)} is not a list")
        return ()


def read_integer(node: YamlNode, key: str, least: int, found: Findings) -> int | None:
    if (
        isinstance(node, YamlScalar)
        and node.kind is ScalarKind.INT
        and isinstance(node.value, int)
        and node.value >= least
    ):
        return node.value
    found.error(node, f"{key}: {excerpt(node)} is not a whole number from {least} on")
    return None
