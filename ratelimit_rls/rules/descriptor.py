"""Compile descriptor documents to nodes of the tree, and merge those of several sources.

Two descriptors are the same if key and value (or pattern) are equal, at the same level. In files that is an error (as
in envoyproxy/ratelimit). If one of the two belongs to a stored rule:

    both have a rule (a limit, an exemption, …)              the one with precedence applies, with everything below
                                                             it; the other is ignored, with everything below it
    one only groups others (key, value and `descriptors`)    they are merged, with the descriptors below both
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from ratelimit_rls.core.model import Position, Rule
from ratelimit_rls.core.pattern import WILDCARD, Glob, Pattern, PatternKind
from ratelimit_rls.core.pattern_index import PatternIndex, Wildcard
from ratelimit_rls.core.tree import Node
from ratelimit_rls.rules import diagnostics
from ratelimit_rls.rules.diagnostics import MAX_EXPRESSIONS
from ratelimit_rls.rules.document import DescriptorDocument, RepeatedDescriptor
from ratelimit_rls.rules.pattern import compile_pattern
from ratelimit_rls.rules.positioned_fields import Positioned
from ratelimit_rls.rules.rule import Inherited, compile_rule, is_on
from ratelimit_rls.yaml.findings import Findings

OVERRIDDEN = "overridden"
"""Code of the warning that something is ignored because a source with precedence defines it."""

_STRUCTURAL_FIELDS = (
    "position",
    "key",
    "value",
    "match",
    "descriptors",
    "share_threshold",
    "value_to_metric",
    "is_broken",
)
_RULE_FIELDS = tuple(one.name for one in fields(DescriptorDocument) if one.name not in _STRUCTURAL_FIELDS)
"""Fields that make up a descriptor's rule."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Source of a descriptor."""

    found: Findings
    rank: int
    is_stored: bool


@dataclass(slots=True)
class Level:
    """Children of one node while they are being collected."""

    exact: dict[tuple[str, str], _NodeBuilder | _BuiltNode] = field(default_factory=dict)
    wildcards: list[_NodeBuilder] = field(default_factory=list)
    patterns: dict[str, dict[Hashable, _NodeBuilder]] = field(default_factory=dict)  # by key and identity
    expressions: dict[str, int] = field(default_factory=dict)  # number of regular expressions by key
    by_key: dict[str, _NodeBuilder] = field(default_factory=dict)

    def find(self, key: str, value: str, pattern: Pattern | None) -> _NodeBuilder | None:
        if pattern is not None:
            return self.patterns.get(key, {}).get(pattern.identity)
        if not value:
            return self.by_key.get(key)
        one = self.exact.get((key, value))
        if isinstance(one, _BuiltNode):
            one = self.exact[key, value] = one.to_builder()
        return one

    def add(self, one: _NodeBuilder) -> None:
        if one.pattern is not None:
            self.patterns.setdefault(one.key, {})[one.pattern.identity] = one
            if _is_expression(one.pattern):
                self.expressions[one.key] = self.expressions.get(one.key, 0) + 1
            return
        if one.value:
            self.exact[one.key, one.value] = one
        else:
            self.by_key[one.key] = one
        if WILDCARD in one.key or WILDCARD in one.value:
            self.wildcards.append(one)

    def attach_to(self, node: Node) -> Node:
        """Return the node with this level below it."""
        exact = {pair: one.node() for pair, one in self.exact.items()}
        by_key = {key: one.node() for key, one in self.by_key.items()}
        wildcards = [
            Wildcard(Glob.of(one.key), Glob.of(one.value), exact[one.key, one.value])
            if one.value
            else Wildcard(Glob.of(one.key), None, by_key[one.key])
            for one in self.wildcards
        ]
        patterns = {key: [one.node() for one in ones.values()] for key, ones in self.patterns.items()}
        return node._replace(exact=exact, pattern_index=PatternIndex.of(wildcards, patterns), by_key=by_key)


@dataclass(slots=True)
class _NodeBuilder:
    """A node that further sources may extend."""

    key: str
    value: str
    pattern: Pattern | None
    share_threshold: bool
    value_to_metric: bool
    rule: Rule | None
    document: DescriptorDocument  # the one with the rule
    origin: Origin  # the source of `document`
    inherited: Inherited  # by the descriptors below
    described_by: list[tuple[Origin, Position]]  # all sources that have it, in order of precedence
    below: Level | None = None
    overrode: list[Position] | None = None

    def node(self) -> Node:
        node = Node(
            self.key,
            self.value,
            self.pattern,
            self.rule,
            self.share_threshold,
            self.value_to_metric,
            self.described_by[0][1],  # position in matching order; the rule has its own position
            tuple(self.overrode or ()),
        )
        return node if self.below is None else self.below.attach_to(node)

    def join(self, path: str, document: DescriptorDocument, origin: Origin) -> bool:
        """Return whether `document` is merged into this node. If not, it is ignored, and the reason is reported."""
        found = origin.found
        if _is_broken(document):
            return False
        for other, place in self.described_by:
            if other is origin or not (other.is_stored or origin.is_stored):
                found.error(document.position, diagnostics.duplicate_descriptor(path, place))
                return False
        if not _is_pass_through(document) and not _is_pass_through(self.document):
            at = self.document.position
            if self.origin.rank == origin.rank:
                found.error(document.position, diagnostics.duplicate_with_same_priority(path, at))
            else:
                found.warn(document.position, OVERRIDDEN, diagnostics.overridden(path, at))
                self.overrode = self.overrode or []
                self.overrode.append(document.position)
            return False
        self._compare(path, document, origin)
        return True

    def _compare(self, path: str, document: DescriptorDocument, origin: Origin) -> None:
        """Report switches that differ between merged documents.

        They define how values share counters, and the first source wins.
        """
        strongest, at = self.described_by[0]
        for name in ("share_threshold", "value_to_metric"):
            if is_on(getattr(document, name)) is not getattr(self, name):
                message = diagnostics.overridden_switch(name, path, at)
                if strongest.rank == origin.rank:
                    origin.found.error(document.position, message)
                else:
                    origin.found.warn(document.position, OVERRIDDEN, message)


class _BuiltNode(NamedTuple):
    """A finished node, one of many repeated ones. It is rarely extended."""

    built: Node
    document: RepeatedDescriptor
    origin: Origin
    inherited: Inherited

    def node(self) -> Node:
        return self.built

    def to_builder(self) -> _NodeBuilder:
        built = self.built
        return _NodeBuilder(
            built.key,
            built.value,
            built.pattern,
            built.share_threshold,
            built.value_to_metric,
            built.rule,
            self.document.expand(),
            self.origin,
            self.inherited,
            [(self.origin, self.document.position)],
        )


def add_descriptors(
    level: Level,
    parent_path: str,
    documents: Iterable[DescriptorDocument | RepeatedDescriptor],
    origin: Origin,
    inherited: Inherited,
) -> None:
    """Compile `documents` and everything below them into `level`; report errors to the findings of their source.

    Sources come in order of precedence. Inherited settings apply to descriptors below of the same source and of later
    ones.
    """
    for document in documents:
        if isinstance(document, RepeatedDescriptor):
            _add_repeated(level, parent_path, document, origin, inherited)
        else:
            _add(level, parent_path, document, origin, inherited)


def _add_repeated(
    level: Level, parent_path: str, document: RepeatedDescriptor, origin: Origin, inherited: Inherited
) -> None:
    """Add a repeated descriptor.

    It is copied from one already compiled, if that had no diagnostics and the level lacks the value.
    """
    value, shared = document.variant.value, document.variant.shared
    prototype: _NodeBuilder | None = shared.get(inherited)
    if prototype is None:
        problems_before = origin.found.problem_count
        prototype = _add(level, parent_path, document.expand(), origin, inherited)
        if prototype is not None and origin.found.problem_count == problems_before and WILDCARD not in prototype.key:
            shared[inherited] = prototype
    elif (prototype.key, value) in level.exact:
        _add(level, parent_path, document.expand(), origin, inherited)
    else:
        position = document.position
        rule = prototype.rule and prototype.rule._replace(
            path=f"{parent_path}.{prototype.key}_{value}", position=position
        )
        node = Node(prototype.key, value, None, rule, prototype.share_threshold, prototype.value_to_metric, position)
        level.exact[prototype.key, value] = _BuiltNode(node, document, origin, prototype.inherited)


def _add(
    level: Level, parent_path: str, document: DescriptorDocument, origin: Origin, inherited: Inherited
) -> _NodeBuilder | None:
    """Compile and add one descriptor. Return the node that was added for it alone; None if it was merged or ignored."""
    key, value = _text(document.key), _text(document.value)
    found = origin.found
    pattern = compile_pattern(document, found)
    shared = pattern.label if pattern else value
    label = f"{key}_{shared}" if shared else key
    path = f"{parent_path}.{label}"
    if not key and not document.is_broken:
        found.error(document.key.position if document.key else document.position, diagnostics.empty_key())
    share_threshold = is_on(document.share_threshold)
    if share_threshold and key and WILDCARD not in label and document.match is None:
        assert document.share_threshold is not None
        found.error(document.share_threshold.position, diagnostics.share_without_wildcard(label))
    first = level.find(key, value, pattern) if key else None
    joined = first if first is not None and first.join(path, document, origin) else None
    is_group = joined is not None and _is_pass_through(document)
    inherited = joined.inherited if joined is not None and is_group else inherited.for_descriptor(document, found)
    rule = compile_rule(path, document, found, inherited)
    described = (origin, document.position)
    if joined is None:
        value_to_metric = is_on(document.value_to_metric)
        one = _NodeBuilder(
            key, value, pattern, share_threshold, value_to_metric, rule, document, origin, inherited, [described]
        )
    else:
        one = joined
        one.described_by.append(described)
        if not is_group:
            one.rule, one.document, one.origin, one.inherited = rule, document, origin, inherited
    is_new = first is None and bool(key)
    if is_new:
        level.add(one)
        if _is_expression(pattern) and level.expressions[key] == MAX_EXPRESSIONS + 1:
            assert document.match is not None
            found.error(document.match.position, diagnostics.too_many_expressions(key))
    if document.descriptors:
        below = one.below = one.below or Level()
        # Ignored descriptors are compiled, too: their errors are reported nevertheless.
        add_descriptors(below, path, document.descriptors, origin, inherited)
    return one if is_new else None


def _is_pass_through(document: DescriptorDocument) -> bool:
    """Return whether it has no rule of its own and only groups others. A leaf without a rule is an exemption."""
    return bool(document.descriptors) and all(getattr(document, name) is None for name in _RULE_FIELDS)


def _is_broken(document: DescriptorDocument) -> bool:
    """Return whether a field that identifies the descriptor could not be read, which was reported."""
    return document.is_broken or (document.match is not None and document.match.is_broken)


def _is_expression(pattern: Pattern | None) -> bool:
    return pattern is not None and pattern.kind is PatternKind.REGEX


def _text(written: Positioned[str] | None) -> str:
    return written.value if written else ""
