"""Which descriptors the rules ask for, and which of them Envoy can make by the mapping.

A rule is met by a descriptor with exactly the keys that lead to it (core/match.py), so the rules of a domain ask for
one descriptor per chain of keys, whatever values they name: Envoy sends what it finds, and the service compares. A rule
with a value is out of reach only where its source never has it: it has few to offer (a fixed one, or the templates of a
path), or all that it has look otherwise (values.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from ratelimit_rls.core.model import Position, Rule
from ratelimit_rls.core.tree import WILDCARD, Glob, Node
from ratelimit_rls.envoy_config.mapping import KeyMapping
from ratelimit_rls.envoy_config.source import PathTemplates, Source, Value
from ratelimit_rls.envoy_config.values import meets, offered, why_never


class MadeEntry(NamedTuple):
    key: str
    source: Source
    template: int = -1  # of a source with templates: which one this entry is for


Made = tuple[MadeEntry, ...]
"""A descriptor that Envoy is told to make."""


class Remark(NamedTuple):
    """What the writer of the rules or of the mapping may not have meant."""

    place: str
    code: str  # "unproduced" or "unused"
    message: str

    def __str__(self) -> str:
        return f"{self.place}: warning[{self.code}]: {self.message}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What Envoy is to send for one domain."""

    domain: str
    descriptors: tuple[Made, ...]
    longest_wait_us: int  # that `action: throttle` may hold an answer for


class _Shape(NamedTuple):
    nodes: tuple[Node, ...]
    rule: Rule

    def __str__(self) -> str:
        return ",".join(f"{node.key}={node.shared_value}" if node.shared_value else node.key for node in self.nodes)


def plan(root: Node, mapping: KeyMapping) -> tuple[Plan, list[Remark]]:
    """The descriptors of the domain `root`, and the rules that none of them can meet."""
    made: dict[Made, None] = {}
    remarks: list[Remark] = []
    for shape in sorted(_shapes(root, ()), key=_place):
        lacking = [node for node in shape.nodes if not _entries(node, mapping)]
        if lacking:
            remarks.append(_unproduced(shape, lacking, mapping))
            continue
        made.update(dict.fromkeys(product(*(_entries(node, mapping) for node in shape.nodes))))
    return Plan(root.key, tuple(made), longest_wait_us(root)), remarks


def longest_wait_us(root: Node) -> int:
    """That `action: throttle` may hold an answer for."""
    return max((shape.rule.max_delay_us for shape in _shapes(root, ())), default=0)


def unused(roots: list[Node], mapping: KeyMapping) -> list[Remark]:
    """What the mapping says of keys that no rule has."""
    keys = [Glob.of(node.key) for root in roots for shape in _shapes(root, ()) for node in shape.nodes]
    return [
        Remark(mapped.place, "unused", f"no rule has a descriptor with the key '{key}'")
        for key, mapped in mapping.items()
        if mapped.place and not any(glob.matches(key) for glob in keys)
    ]


def _shapes(node: Node, above: tuple[Node, ...]) -> Iterator[_Shape]:
    for child in node.children():
        nodes = (*above, child)
        if child.rule is not None:
            yield _Shape(nodes, child.rule)
        yield from _shapes(child, nodes)


def _place(shape: _Shape) -> tuple[str, int, int]:
    """In the order of the files, so that the same rules give the same text."""
    position = _position(shape)
    return position.file, position.line, position.column


def _position(shape: _Shape) -> Position:
    position = shape.nodes[-1].position
    assert position is not None  # every node that was compiled from a file has one
    return position


def _entries(node: Node, mapping: KeyMapping) -> list[MadeEntry]:
    """All that may meet `node`; more than one where its key has a `*`, or where paths have several shapes."""
    key = Glob.of(node.key)
    return [
        entry
        for name, mapped in mapping.items()
        if key.matches(name)
        for entry in _entries_of(name, mapped.source)
        if _meets(node, entry)
    ]


def _entries_of(key: str, source: Source) -> list[MadeEntry]:
    if isinstance(source, PathTemplates):
        return [MadeEntry(key, source, number) for number in range(len(source.templates))]
    return [MadeEntry(key, source)]


def _meets(node: Node, entry: MadeEntry) -> bool:
    value = _only_value(entry)
    return not why_never(node, entry.source) if value is None else meets(node, value)


def _only_value(entry: MadeEntry) -> str | None:
    if isinstance(entry.source, Value):
        return entry.source.text
    return entry.source.templates[entry.template].text if isinstance(entry.source, PathTemplates) else None


def _unproduced(shape: _Shape, lacking: list[Node], mapping: KeyMapping) -> Remark:
    why = "; ".join(dict.fromkeys(_why(node, mapping) for node in lacking))
    return Remark(str(_position(shape)), "unproduced", f"no route makes the descriptor {shape}: {why}")


def _why(node: Node, mapping: KeyMapping) -> str:
    if alike := [key for key in mapping if Glob.of(node.key).matches(key)]:
        return "; ".join(f"'{key}' {_why_not_of(node, key, mapping[key].source)}" for key in alike)
    if WILDCARD in node.key:
        return f"no key of the mapping is like '{node.key}'"
    return f"nothing says where '{node.key}' comes from; add e.g. --from {node.key}={_likely(node)}"


def _why_not_of(node: Node, key: str, source: Source) -> str:
    values = [value for entry in _entries_of(key, source) if (value := _only_value(entry)) is not None]
    return offered(values) if values else why_never(node, source)


_LIKELY = {
    "method": "method",
    "path": "path",
    "host": "host",
    "authority": "host",
    "scheme": "scheme",
    "masked_remote_address": "masked_remote_address:24,64",
}


def _likely(node: Node) -> str:
    if node.key == "generic_key":
        return f"value:{node.value or 'TEXT'}"
    name = re.sub(r"[^a-z0-9-]+", "-", node.key.lower()).strip("-")
    return _LIKELY.get(node.key, f"header:x-{name}" if name else "header:NAME")
