"""Descriptors that the rules need, and which of them Envoy can send by the mapping.

A rule is matched by a descriptor with exactly the keys that lead to it (core/match.py). So the rules of a domain need
one descriptor per chain of keys, whatever their values: Envoy sends the values it finds, and the service compares them.
A rule with a value is unreachable only if its source can never have that value: the source has few values (a constant,
or the templates of a path), or all its values have another form (unreachable_values.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from ratelimit_rls.core.model import Position, Rule
from ratelimit_rls.core.pattern import WILDCARD, Glob
from ratelimit_rls.core.tree import Node
from ratelimit_rls.envoy_config.mapping import KeyMapping
from ratelimit_rls.envoy_config.unreachable_values import matches, possible_values, unreachable_reason
from ratelimit_rls.envoy_config.value_sources import ActionSource, FixedValueAction, PathTemplateAction


class SentEntry(NamedTuple):
    key: str
    source: ActionSource
    template: int = -1  # index of the template, for a source with templates


SentDescriptor = tuple[SentEntry, ...]
"""A descriptor that Envoy is configured to send."""


class MappingWarning(NamedTuple):
    """Warning about a probable mistake in the rules or in the mapping."""

    place: str
    code: str  # "unproduced" or "unused"
    message: str

    def __str__(self) -> str:
        return f"{self.place}: warning[{self.code}]: {self.message}"


@dataclass(frozen=True, slots=True)
class DomainDescriptors:
    """Descriptors that Envoy sends for one domain."""

    domain: str
    descriptors: tuple[SentDescriptor, ...]
    max_wait_us: int  # maximum delay of a response by `action: throttle`


class _RulePath(NamedTuple):
    nodes: tuple[Node, ...]
    rule: Rule

    def __str__(self) -> str:
        return ",".join(f"{node.key}={node.shared_value}" if node.shared_value else node.key for node in self.nodes)


def plan_descriptors(root: Node, mapping: KeyMapping) -> tuple[DomainDescriptors, list[MappingWarning]]:
    """Return the descriptors of the domain `root`, and warnings for rules that none of them can match."""
    sent: dict[SentDescriptor, None] = {}
    warnings: list[MappingWarning] = []
    for shape in sorted(_rule_paths(root, ()), key=_place):
        missing = [node for node in shape.nodes if not _entries(node, mapping)]
        if missing:
            warnings.append(_unproduced(shape, missing, mapping))
            continue
        sent.update(dict.fromkeys(product(*(_entries(node, mapping) for node in shape.nodes))))
    return DomainDescriptors(root.key, tuple(sent), max_wait_us(root)), warnings


def max_wait_us(root: Node) -> int:
    """Return the maximum delay of a response by `action: throttle`, in microseconds."""
    return max((shape.rule.max_delay_us for shape in _rule_paths(root, ())), default=0)


def unused_keys(roots: list[Node], mapping: KeyMapping) -> list[MappingWarning]:
    """Return warnings for keys of the mapping that no rule uses."""
    keys = [Glob.of(node.key) for root in roots for shape in _rule_paths(root, ()) for node in shape.nodes]
    return [
        MappingWarning(mapped.place, "unused", f"no rule has a descriptor with the key '{key}'")
        for key, mapped in mapping.items()
        if mapped.place and not any(glob.matches(key) for glob in keys)
    ]


def _rule_paths(node: Node, above: tuple[Node, ...]) -> Iterator[_RulePath]:
    for child in node.children():
        nodes = (*above, child)
        if child.rule is not None:
            yield _RulePath(nodes, child.rule)
        yield from _rule_paths(child, nodes)


def _place(shape: _RulePath) -> tuple[str, int, int]:
    """Sort key: file order, so that equal rules give equal output."""
    position = _position(shape)
    return position.file, position.line, position.column


def _position(shape: _RulePath) -> Position:
    position = shape.nodes[-1].position
    assert position is not None  # every node compiled from a file has one
    return position


def _entries(node: Node, mapping: KeyMapping) -> list[SentEntry]:
    """Return all entries that may match `node`: several if its key has a `*` or the path has several templates."""
    key = Glob.of(node.key)
    return [
        entry
        for name, mapped in mapping.items()
        if key.matches(name)
        for entry in _entries_of(name, mapped.source)
        if _may_match(node, entry)
    ]


def _entries_of(key: str, source: ActionSource) -> list[SentEntry]:
    if isinstance(source, PathTemplateAction):
        return [SentEntry(key, source, number) for number in range(len(source.templates))]
    return [SentEntry(key, source)]


def _may_match(node: Node, entry: SentEntry) -> bool:
    value = _only_value(entry)
    return not unreachable_reason(node, entry.source) if value is None else matches(node, value)


def _only_value(entry: SentEntry) -> str | None:
    if isinstance(entry.source, FixedValueAction):
        return entry.source.text
    return entry.source.templates[entry.template].text if isinstance(entry.source, PathTemplateAction) else None


def _unproduced(shape: _RulePath, missing: list[Node], mapping: KeyMapping) -> MappingWarning:
    reasons = "; ".join(dict.fromkeys(_missing_reason(node, mapping) for node in missing))
    return MappingWarning(str(_position(shape)), "unproduced", f"no route makes the descriptor {shape}: {reasons}")


def _missing_reason(node: Node, mapping: KeyMapping) -> str:
    if matching := [key for key in mapping if Glob.of(node.key).matches(key)]:
        return "; ".join(f"'{key}' {_mismatch_reason(node, key, mapping[key].source)}" for key in matching)
    if WILDCARD in node.key:
        return f"no key of the mapping matches '{node.key}'"
    return f"nothing says where '{node.key}' comes from; add e.g. --from {node.key}={_suggested_source(node)}"


def _mismatch_reason(node: Node, key: str, source: ActionSource) -> str:
    values = [value for entry in _entries_of(key, source) if (value := _only_value(entry)) is not None]
    return possible_values(values) if values else unreachable_reason(node, source)


_SUGGESTIONS = {
    "method": "method",
    "path": "path",
    "host": "host",
    "authority": "host",
    "scheme": "scheme",
    "masked_remote_address": "masked_remote_address:24,64",
}


def _suggested_source(node: Node) -> str:
    if node.key == "generic_key":
        return f"value:{node.value or 'TEXT'}"
    name = re.sub(r"[^a-z0-9-]+", "-", node.key.lower()).strip("-")
    return _SUGGESTIONS.get(node.key, f"header:x-{name}" if name else "header:NAME")
