"""Strict reader for a mapping in a YAML settings file: unknown keys, missing keys and wrong types are problems.

Reading continues after a problem, so that all are reported at once. Rules have a reader of their own, which tolerates
what envoyproxy/ratelimit tolerates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import yaml

from ratelimit_rls.errors import Problem

MAX_BYTES = 2**20

T = TypeVar("T")


class ProblemCollector:
    """Collects the problems of one file."""

    def __init__(self, file: str) -> None:
        self._file = file
        self.found: list[Problem] = []

    def add(self, node: yaml.Node | None, message: str) -> None:
        mark = node.start_mark if node is not None else None
        line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
        self.found.append(Problem(self._file, line, column, message))


def compose(content: bytes, problems: ProblemCollector) -> yaml.Node | None:
    """Return the root node of the first document; None if there is none or it cannot be parsed."""
    if len(content) > MAX_BYTES:
        problems.add(None, f"the file is larger than {MAX_BYTES // 2**20} MiB")
        return None
    try:
        root = next(iter(yaml.compose_all(content.decode("utf-8-sig"), Loader=yaml.SafeLoader)), None)
    except yaml.MarkedYAMLError as error:
        detail = ", ".join(part for part in (error.context, error.problem) if part)
        mark = error.problem_mark or error.context_mark
        problems.add(yaml.Node("", "", mark, mark) if mark else None, f"this is not YAML: {detail}")
        return None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problems.add(None, f"this is not YAML: {error}")
        return None
    return root


class YamlMapping:
    """Values of a YAML mapping by key. Null is treated as absent."""

    def __init__(self, node: yaml.Node, keys: tuple[str, ...], problems: ProblemCollector) -> None:
        self.node = node
        self._problems = problems
        self._values: dict[str, yaml.Node] = {}
        if not isinstance(node, yaml.MappingNode):
            problems.add(node, f"this must be a mapping with the keys {', '.join(keys)}")
            return
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else None
            if name not in keys:
                problems.add(key, f"{excerpt(key)} is not a valid key; use {', '.join(keys)}")
            elif name in self._values:
                problems.add(key, f"'{name}' is written twice")
            elif value.tag != "tag:yaml.org,2002:null":
                self._values[name] = value

    def value(self, key: str) -> yaml.Node | None:
        return self._values.get(key)

    def required(self, key: str, example: str) -> yaml.Node | None:
        node = self._values.get(key)
        if node is None and isinstance(self.node, yaml.MappingNode):
            self._problems.add(self.node, f"'{key}' is missing; write '{example}'")
        return node

    def text(self, key: str) -> str:
        """Return the text of a key; "" if absent."""
        return self.read(key, str, "")

    def read(self, key: str, parse: Callable[[str], T], default: T) -> T:
        """Return the parsed text of a key. `parse` raises ValueError with the end of a sentence about the text."""
        node = self._values.get(key)
        if node is None:
            return default
        if not isinstance(node, yaml.ScalarNode) or not node.value:
            self._problems.add(node, f"{key}: {excerpt(node)} is not text")
            return default
        try:
            return parse(node.value)
        except ValueError as error:
            self._problems.add(node, f"{key}: {excerpt(node)} {error}")
            return default

    def texts(self, key: str, example: str) -> tuple[str, ...]:
        """Return a required list with at least one text."""
        node = self.required(key, example)
        if node is None:
            return ()
        if not isinstance(node, yaml.SequenceNode) or not node.value:
            self._problems.add(node, f"{key}: {excerpt(node)} must be a list with at least one text; write '{example}'")
            return ()
        for item in node.value:
            if not isinstance(item, yaml.ScalarNode) or not item.value:
                self._problems.add(item, f"{key}: {excerpt(item)} is not text")
        return tuple(item.value for item in node.value if isinstance(item, yaml.ScalarNode))


def excerpt(node: yaml.Node) -> str:
    """Return the node as short text for messages."""
    if isinstance(node, yaml.ScalarNode):
        text = str(node.value) or "nothing"
        return text if len(text) <= 60 else text[:57] + "..."
    return "a mapping" if isinstance(node, yaml.MappingNode) else "a list"
