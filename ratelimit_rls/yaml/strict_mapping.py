"""Strict reader for one YAML mapping: unknown keys, keys written twice and values of the wrong type are errors.

It reads every mapping that envoyproxy/ratelimit does not have: new ones in rules, test files, and the files that
settings name. All errors go to the file's findings with their positions, and reading continues, so that one pass finds
all of them. Mappings that envoyproxy/ratelimit has are read by rules/positioned_fields.py, which tolerates what it
tolerates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, TypeVar, overload

from ratelimit_rls.yaml import messages
from ratelimit_rls.yaml.findings import Findings
from ratelimit_rls.yaml.nodes import YamlList, YamlMap, YamlNode, YamlScalar, excerpt, is_null
from ratelimit_rls.yaml.scalars import ScalarKind

T = TypeVar("T")


class StrictMapping:
    """Values of one mapping by key. Null is the same as absent.

    A file format with rules or sentences of its own overrides the attributes and methods that are marked so.
    """

    may_repeat_keys: ClassVar[bool] = False
    """Override: a key may be written twice; the last one counts."""

    accepts_empty_text: ClassVar[bool] = True
    """Override: "" is a text. If it is not, a key without a text must be omitted."""

    def __init__(
        self, node: YamlNode, keys: Sequence[str], found: Findings, unsupported: Mapping[str, str] | None = None
    ) -> None:
        """Read `node`. `unsupported` are keys that users may try, each with a message that says what to use."""
        self.node = node
        self.found = found
        self._values: dict[str, YamlNode] = {}
        if not isinstance(node, YamlMap):
            found.error(node, self.not_a_mapping(keys))
            return
        for key, value in node.fields():
            name = key.text if isinstance(key, YamlScalar) else None
            if name is not None and unsupported and name in unsupported:
                found.error(key, unsupported[name])
            elif name is None or name not in keys:
                found.error(key, self.unknown_key(excerpt(key), keys))
            elif not is_null(value):
                self._values[name] = value
        if not self.may_repeat_keys:
            self._reject_repeated_keys(node, keys)

    def _reject_repeated_keys(self, node: YamlMap, keys: Sequence[str]) -> None:
        """Report keys written twice, each once. Overriding keys merged by `<<` is the purpose of merging."""
        written: Counter[str] = Counter()
        for key, _ in node.pairs:
            if isinstance(key, YamlScalar) and key.text in keys:
                written[key.text] += 1
                if written[key.text] == 2:
                    self.found.error(key, f"'{key.text}' is written twice")

    def not_a_mapping(self, keys: Sequence[str]) -> str:
        """Override: format the message for a node that is not a mapping."""
        return f"{excerpt(self.node)} is not a mapping; its keys are {', '.join(keys)}"

    def unknown_key(self, key: str, keys: Sequence[str]) -> str:
        """Override: format the message for an unknown key."""
        return messages.unknown_key(key, keys)

    def has(self, key: str) -> bool:
        return key in self._values

    def value(self, key: str) -> YamlNode | None:
        return self._values.get(key)

    def required(self, key: str, example: str) -> YamlNode | None:
        node = self._values.get(key)
        if node is None and isinstance(self.node, YamlMap):
            self.found.error(self.node, f"'{key}' is missing; write '{example}'")
        return node

    def required_list(self, key: str, example: str) -> None:
        node = self.required(key, example)
        if isinstance(node, YamlList) and not node.items:
            self.found.error(node, f"'{key}' is empty; write '{example}'")

    def text(self, key: str) -> str | None:
        return self.read(key, str)

    def integer(self, key: str, least: int, most: int | None = None) -> int | None:
        node = self._values.get(key)
        if node is None:
            return None
        number = read_integer(node, key, least, self.found)
        if number is not None and most is not None and number > most:
            self.found.error(node, f"{key}: {number} is more than {most}")
            return None
        return number

    def boolean(self, key: str) -> bool:
        node = self._values.get(key)
        if node is None:
            return False
        if isinstance(node, YamlScalar) and isinstance(node.value, bool):
            return node.value
        self.found.error(node, f"{key}: {excerpt(node)} is not true or false")
        return False

    def choice(self, key: str, known: Mapping[str, T]) -> T | None:
        """Return the value that `known` has for the text under `key`; None if it is absent or not among them."""
        return self.read(key, lambda text: _choose(text, known))

    @overload
    def read(self, key: str, parse: Callable[[str], T]) -> T | None: ...
    @overload
    def read(self, key: str, parse: Callable[[str], T], default: T) -> T: ...
    def read(self, key: str, parse: Callable[[str], T], default: T | None = None) -> T | None:
        """Return `parse` of the text under `key`; `default` if it is absent or invalid.

        The message of its ValueError must complete a sentence that starts with the text.
        """
        node = self._values.get(key)
        text = None if node is None else self._text(key, node)
        if node is None or text is None:
            return default
        try:
            return parse(text)
        except ValueError as error:
            self.found.error(node, f"{key}: {excerpt(node)} {error}")
            return default

    def items(self, key: str, most: int | None = None) -> tuple[YamlNode, ...]:
        """Return the elements of the list under `key`, at most `most` of them; () if it is absent."""
        node = self._values.get(key)
        if node is None:
            return ()
        if not isinstance(node, YamlList):
            self.found.error(node, f"{key}: {excerpt(node)} is not a list")
            return ()
        if most is not None and len(node.items) > most:
            message = f"'{key}' has {len(node.items)} elements; at most {most} are allowed"
            self.found.error(node.items[most], message)
        return node.items[:most]

    def texts(self, key: str) -> tuple[str, ...]:
        """Return the texts of the list under `key`; () if it is absent."""
        texts = [self._text(key, item) for item in self.items(key)]
        return tuple(text for text in texts if text is not None)

    def _text(self, key: str, node: YamlNode) -> str | None:
        if isinstance(node, YamlScalar) and (node.text or self.accepts_empty_text):
            return node.text
        self.found.error(node, f"{key}: {excerpt(node) or 'nothing'} is not text")
        return None


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


def _choose(text: str, known: Mapping[str, T]) -> T:
    if text not in known:
        raise ValueError(f"is not one of {', '.join(known)}")
    return known[text]
