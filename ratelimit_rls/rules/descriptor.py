"""One descriptor of a document to a node of the tree, among its neighbours and those of other sources.

Two descriptors are the same if key and value (or pattern) are, at the same level. In files that is an error (the
reference's). Where one of the two is a stored rule's:

    both say something of it (a limit, that there is none, …)    the stronger stands, with all that is below it; the
                                                                  other is left out, with all that is below it
    one only leads to others (key, value and `descriptors`)       they are one, with what is below either
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from ratelimit_rls.core.model import Position, Rule
from ratelimit_rls.core.pattern import Pattern
from ratelimit_rls.core.tree import WILDCARD, Glob, Node, Wildcard
from ratelimit_rls.rules import offences
from ratelimit_rls.rules.document import DescriptorDocument, LikeDocument
from ratelimit_rls.rules.grammar import Findings
from ratelimit_rls.rules.pattern import compile_pattern
from ratelimit_rls.rules.rule import Inherited, compile_rule, is_on
from ratelimit_rls.rules.written import Written

OVERRIDDEN = "overridden"
"""The code of the warning that something is left out because a stronger source says it."""

_OF_THE_WAY = ("position", "key", "value", "match", "descriptors", "share_threshold", "value_to_metric", "is_broken")
_SAYINGS = tuple(one.name for one in fields(DescriptorDocument) if one.name not in _OF_THE_WAY)
"""What a descriptor can say of those that meet it."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The source that a descriptor is from."""

    found: Findings
    rank: int
    is_stored: bool


@dataclass(slots=True)
class Level:
    """The children of one node while they are being collected."""

    exact: dict[tuple[str, str], _Growing | _Settled] = field(default_factory=dict)
    wildcards: list[_Growing] = field(default_factory=list)
    patterns: dict[str, list[_Growing]] = field(default_factory=dict)
    by_key: dict[str, _Growing] = field(default_factory=dict)

    def present(self, key: str, value: str, pattern: Pattern | None) -> _Growing | None:
        if pattern is not None:
            same = (one for one in self.patterns.get(key, ()) if one.pattern and one.pattern.is_same(pattern))
            return next(same, None)
        if not value:
            return self.by_key.get(key)
        one = self.exact.get((key, value))
        if isinstance(one, _Settled):
            one = self.exact[key, value] = one.growing()
        return one

    def add(self, one: _Growing) -> None:
        if one.pattern is not None:
            self.patterns.setdefault(one.key, []).append(one)
            return
        if one.value:
            self.exact[one.key, one.value] = one
        else:
            self.by_key[one.key] = one
        if WILDCARD in one.key or WILDCARD in one.value:
            self.wildcards.append(one)

    def under(self, node: Node) -> Node:
        """The node with this level below it."""
        exact = {pair: one.node() for pair, one in self.exact.items()}
        by_key = {key: one.node() for key, one in self.by_key.items()}
        patterns = {
            key: tuple(sorted((one.node() for one in ones), key=_precedence)) for key, ones in self.patterns.items()
        }
        wildcards = tuple(
            Wildcard(Glob.of(one.key), Glob.of(one.value), exact[one.key, one.value])
            if one.value
            else Wildcard(Glob.of(one.key), None, by_key[one.key])
            for one in self.wildcards
        )
        return node._replace(exact=exact, wildcards=wildcards, patterns=patterns, by_key=by_key)


@dataclass(slots=True)
class _Growing:
    """A node to which further sources may add."""

    key: str
    value: str
    pattern: Pattern | None
    share_threshold: bool
    value_to_metric: bool
    rule: Rule | None
    document: DescriptorDocument  # the one that says what is said of it
    origin: Origin  # whose document that is
    inherited: Inherited  # by what is below it
    described: list[tuple[Origin, Position]]  # by all of these, the strongest first
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
            self.described[0][1],  # so that it stands where it is tried; its rule has its own place
            tuple(self.overrode or ()),
        )
        return node if self.below is None else self.below.under(node)

    def join(self, path: str, document: DescriptorDocument, origin: Origin) -> bool:
        """Whether `document` is one with this; if not, it is left out, and it is told why."""
        found = origin.found
        if _is_broken(document):
            return False
        for other, place in self.described:
            if other is origin or not (other.is_stored or origin.is_stored):
                found.error(document.position, offences.duplicate_descriptor(path, place))
                return False
        if not _only_leads(document) and not _only_leads(self.document):
            at = self.document.position
            if self.origin.rank == origin.rank:
                found.error(document.position, offences.duplicate_of_priority(path, at))
            else:
                found.warn(document.position, OVERRIDDEN, offences.overridden(path, at))
                self.overrode = self.overrode or []
                self.overrode.append(document.position)
            return False
        self._compare(path, document, origin)
        return True

    def _compare(self, path: str, document: DescriptorDocument, origin: Origin) -> None:
        """What is not said of a limit but of how values are told apart counts from the strongest, too."""
        strongest, at = self.described[0]
        for name in ("share_threshold", "value_to_metric"):
            if is_on(getattr(document, name)) is not getattr(self, name):
                message = offences.other_switch(name, path, at)
                if strongest.rank == origin.rank:
                    origin.found.error(document.position, message)
                else:
                    origin.found.warn(document.position, OVERRIDDEN, message)


class _Settled(NamedTuple):
    """A node to which hardly ever anything is added, since it is one of many that are alike."""

    made: Node
    document: LikeDocument
    origin: Origin
    inherited: Inherited

    def node(self) -> Node:
        return self.made

    def growing(self) -> _Growing:
        made = self.made
        return _Growing(
            made.key,
            made.value,
            made.pattern,
            made.share_threshold,
            made.value_to_metric,
            made.rule,
            self.document.exact(),
            self.origin,
            self.inherited,
            [(self.origin, self.document.position)],
        )


def _precedence(node: Node) -> tuple[int, int]:
    assert node.pattern is not None
    return node.pattern.precedence


def add_descriptors(
    level: Level,
    parent_path: str,
    documents: Iterable[DescriptorDocument | LikeDocument],
    origin: Origin,
    inherited: Inherited,
) -> None:
    """Compile `documents` and everything below them into `level`; what is wrong goes to the findings of their source.

    Sources come strongest first. What a descriptor hands down reaches what the same source and weaker ones have below.
    """
    for document in documents:
        if isinstance(document, LikeDocument):
            _add_alike(level, parent_path, document, origin, inherited)
        else:
            _add(level, parent_path, document, origin, inherited)


def _add_alike(level: Level, parent_path: str, document: LikeDocument, origin: Origin, inherited: Inherited) -> None:
    """As one of its shape was compiled, if nothing was to be told of that, and the level has none of the same value."""
    value, made_of_it = document.alike.value, document.alike.shape.made_of_it
    like: _Growing | None = made_of_it.get(inherited)
    if like is None:
        told = origin.found.told
        like = _add(level, parent_path, document.exact(), origin, inherited)
        if like is not None and origin.found.told == told and WILDCARD not in like.key:
            made_of_it[inherited] = like
    elif (like.key, value) in level.exact:
        _add(level, parent_path, document.exact(), origin, inherited)
    else:
        position = document.position
        rule = like.rule and like.rule._replace(path=f"{parent_path}.{like.key}_{value}", position=position)
        node = Node(like.key, value, None, rule, like.share_threshold, like.value_to_metric, position)
        level.exact[like.key, value] = _Settled(node, document, origin, like.inherited)


def _add(
    level: Level, parent_path: str, document: DescriptorDocument, origin: Origin, inherited: Inherited
) -> _Growing | None:
    """What was added to `level` for it alone."""
    key, value = _text(document.key), _text(document.value)
    found = origin.found
    pattern = compile_pattern(document, found)
    shared = pattern.label if pattern else value
    label = f"{key}_{shared}" if shared else key
    path = f"{parent_path}.{label}"
    if not key and not document.is_broken:
        found.error(document.key.position if document.key else document.position, offences.empty_key())
    share_threshold = is_on(document.share_threshold)
    if share_threshold and key and WILDCARD not in label and document.match is None:
        assert document.share_threshold is not None
        found.error(document.share_threshold.position, offences.share_without_wildcard(label))
    first = level.present(key, value, pattern) if key else None
    joined = first if first is not None and first.join(path, document, origin) else None
    is_way = joined is not None and _only_leads(document)
    inherited = joined.inherited if joined is not None and is_way else inherited.below(document, found)
    rule = compile_rule(path, document, found, inherited)
    described = (origin, document.position)
    if joined is None:
        told = is_on(document.value_to_metric)
        one = _Growing(key, value, pattern, share_threshold, told, rule, document, origin, inherited, [described])
    else:
        one = joined
        one.described.append(described)
        if not is_way:
            one.rule, one.document, one.origin, one.inherited = rule, document, origin, inherited
    is_new = first is None and bool(key)
    if is_new:
        level.add(one)
    if document.descriptors:
        below = one.below = one.below or Level()
        # Of what is left out, too: what is wrong with it is told all the same.
        add_descriptors(below, path, document.descriptors, origin, inherited)
    return one if is_new else None


def _only_leads(document: DescriptorDocument) -> bool:
    """Whether it says nothing itself. One without anything below it says that there is no limit."""
    return bool(document.descriptors) and all(getattr(document, name) is None for name in _SAYINGS)


def _is_broken(document: DescriptorDocument) -> bool:
    """Whether something that tells it from its neighbours could not be read, which was reported."""
    return document.is_broken or (document.match is not None and document.match.is_broken)


def _text(written: Written[str] | None) -> str:
    return written.value if written else ""
