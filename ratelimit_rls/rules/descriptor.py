"""One descriptor of a document to a node of the tree, among its neighbours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ratelimit_rls.core.pattern import Pattern
from ratelimit_rls.core.tree import WILDCARD, Glob, Node, Wildcard
from ratelimit_rls.rules import offences
from ratelimit_rls.rules.document import DescriptorDocument, Written
from ratelimit_rls.rules.grammar import Findings
from ratelimit_rls.rules.pattern import compile_pattern
from ratelimit_rls.rules.rule import Inherited, compile_rule, is_on


@dataclass(slots=True)
class Level:
    """The children of one node while they are being collected."""

    exact: dict[tuple[str, str], Node] = field(default_factory=dict)
    wildcards: list[Wildcard] = field(default_factory=list)
    patterns: dict[str, list[Node]] = field(default_factory=dict)
    by_key: dict[str, Node] = field(default_factory=dict)

    def present(self, key: str, value: str, pattern: Pattern | None) -> Node | None:
        if pattern is not None:
            same = (node for node in self.patterns.get(key, ()) if node.pattern and node.pattern.is_same(pattern))
            return next(same, None)
        return self.exact.get((key, value)) if value else self.by_key.get(key)

    def add(self, node: Node) -> None:
        if node.pattern is not None:
            self.patterns.setdefault(node.key, []).append(node)
            return
        if node.value:
            self.exact[node.key, node.value] = node
        else:
            self.by_key[node.key] = node
        if WILDCARD in node.label:
            self.wildcards.append(Wildcard(Glob.of(node.key), Glob.of(node.value) if node.value else None, node))

    def node(self, key: str, **fields: Any) -> Node:
        """The node above this level."""
        patterns = {key: tuple(sorted(nodes, key=_precedence)) for key, nodes in self.patterns.items()}
        wildcards = tuple(self.wildcards)
        return Node(key, exact=self.exact, wildcards=wildcards, patterns=patterns, by_key=self.by_key, **fields)


def _precedence(node: Node) -> tuple[int, int]:
    assert node.pattern is not None
    return node.pattern.precedence


def add_descriptor(
    level: Level,
    parent_path: str,
    document: DescriptorDocument,
    found: Findings,
    inherited: Inherited,
) -> None:
    """Compile `document` and everything below it into `level`; what is wrong goes to `found`."""
    key, value = _text(document.key), _text(document.value)
    pattern = compile_pattern(document, found)
    shared = pattern.label if pattern else value
    label = f"{key}_{shared}" if shared else key
    path = f"{parent_path}.{label}"
    if not key:
        if not document.is_broken:
            found.error(document.key.position if document.key else document.position, offences.empty_key())
    elif (first := level.present(key, value, pattern)) is not None and not _is_broken(document):
        assert first.position is not None
        found.error(document.position, offences.duplicate_descriptor(path, first.position))
    share_threshold = is_on(document.share_threshold)
    if share_threshold and key and WILDCARD not in label and document.match is None:
        assert document.share_threshold is not None
        found.error(document.share_threshold.position, offences.share_without_wildcard(label))
    inherited = inherited.below(document, found)
    rule = compile_rule(path, document, found, inherited)
    below = Level()
    for child in document.descriptors:
        add_descriptor(below, path, child, found, inherited)
    if key and level.present(key, value, pattern) is None:
        level.add(
            below.node(
                key,
                value=value,
                pattern=pattern,
                rule=rule,
                share_threshold=share_threshold,
                value_to_metric=is_on(document.value_to_metric),
                position=document.position,
            )
        )


def _is_broken(document: DescriptorDocument) -> bool:
    """Whether something that tells it from its neighbours could not be read, which was reported."""
    return document.is_broken or (document.match is not None and document.match.is_broken)


def _text(written: Written[str] | None) -> str:
    return written.value if written else ""
