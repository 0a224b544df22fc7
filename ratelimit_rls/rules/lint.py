"""Warnings for rules that are valid but probably not intended.

Each kind of warning has a code; none of them stops a load.

    unreachable     another descriptor always matches first       no-effect   a key that changes nothing where it is
    zero-limit      every request is denied                       replaces    the name of no rate_limit
    unmapped        ext_authz builds a descriptor that            hidden      a targeted rule does not apply to some of
                    matches no rule                                           the requests it is for

Other modules report the remaining codes: the grammar reports `misplaced` and `duplicate-key` while it has the text,
reading a file reports `unread` (a second document), and merging sources reports `overridden` (a source with precedence
says otherwise).
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from ratelimit_rls.core.attributes import FixedSource, MappedEntry
from ratelimit_rls.core.model import Entry, Position
from ratelimit_rls.core.pattern import WILDCARD, Glob
from ratelimit_rls.core.pattern_index import PatternIndex, Wildcard
from ratelimit_rls.core.tree import Node, Tree, find_child
from ratelimit_rls.errors import Problem
from ratelimit_rls.rules import diagnostics
from ratelimit_rls.rules.document import DescriptorDocument, Document, RateLimitDocument, RepeatedDescriptor
from ratelimit_rls.rules.limit import is_unlimited
from ratelimit_rls.rules.positioned_fields import Positioned
from ratelimit_rls.rules.rule import Action
from ratelimit_rls.yaml.nodes import YamlList, YamlMap, YamlNode, YamlScalar

MAX_COMPARED = 500
"""Descriptors of a level that `hidden` compares with each other, since that is quadratic."""

_NEEDS_DENIALS = ("penalty", "warn_at", "answer", "deny")
_NEEDS_LIMIT = ("charge", "shadow_mode", "quota_mode", "detailed_metric", "metadata", "hot", *_NEEDS_DENIALS)
_NEEDS_COUNTER = ("unit", "requests_per_unit", "algorithm", "burst", "unit_multiplier", "calendar", "timezone")


def lint(
    tree: Tree,
    documents: Iterable[Document],
    mappings: Mapping[str, Positioned[YamlNode]],
    targeted: Collection[str] = (),
) -> Iterator[Problem]:
    """Yield all warnings for compiled rules.

    `mappings` are the effective ext_authz mappings by domain. `targeted` are the names of sources that have a
    targeting.
    """
    for level in tree.levels():
        yield from _unreachable(level)
    if targeted:
        yield from _hidden(tree, targeted)
    for domain, written in mappings.items():
        yield from _unmapped(domain, written, tree)
    names: dict[str, set[str]] = {}
    replacing: list[tuple[str, RateLimitDocument]] = []
    for document in documents:
        domain = document.domain.value if document.domain else ""
        known = names.setdefault(domain, set())
        for descriptor in _descriptors(document):
            limits = descriptor.rate_limits
            known.update([limit.name.value for limit in limits if limit.name])
            replacing.extend([(domain, limit) for limit in limits if limit.replaces])
            yield from _lint_descriptor(descriptor)
    for domain, limit in replacing:
        yield from _unknown_replaces(limit, names[domain])


def _unreachable(level: Node) -> Iterator[Problem]:
    """Yield a warning for each child of `level` that another child always precedes."""
    index = level.pattern_index
    if index is None or not index.wildcards:
        return
    placeholder = _absent_character([*map(_written, index.wildcards), *level.by_key])
    for later in index.wildcards:
        yield from _preceded(later.node, index, placeholder)
    for key, child in level.by_key.items():
        if WILDCARD not in key:
            yield from _preceded(child, index, placeholder)


def _preceded(child: Node, index: PatternIndex[Node], placeholder: str) -> Iterator[Problem]:
    """Yield a warning if the first wildcard that matches what `child` matches is another one.

    For the same reason as in `_contains`, a value with the placeholder is matched by those wildcards that match
    everything that `child` matches.
    """
    key, value = (text.replace(WILDCARD, placeholder) for text in (child.key, child.value or WILDCARD))
    first = index.first_wildcard(key, value)
    if first is not None and first is not child:
        yield _shadowed(child, first)


def _written(wildcard: Wildcard[Node]) -> str:
    return wildcard.node.key + wildcard.node.value


def _hidden(tree: Tree, targeted: Collection[str]) -> Iterator[Problem]:
    """Yield a warning for each targeted rule that an overlapping, narrower descriptor hides for some requests.

    Matching takes one of several candidates and never backtracks, so rules below the other candidates are not reached.
    The author of descriptors sees that from the nesting; the author of a rule that targets paths and networks does not.
    """
    reported: set[int] = set()
    for level in tree.levels():
        for wide, narrow in _overlaps(level):
            assert wide.position is not None
            assert narrow.position is not None
            if wide.position.file in targeted and id(wide) not in reported and _misses_rules_of(narrow, wide):
                reported.add(id(wide))
                message = diagnostics.hidden(_label(wide), _label(narrow), narrow.position)
                yield _warning(wide.position, "hidden", message)


def _overlaps(node: Node) -> Iterator[tuple[Node, Node]]:
    """Yield pairs of children (wide, narrow).

    `wide` matches everything that `narrow` matches, and `narrow` is tried first.
    """
    for index, later in enumerate(node.wildcards[:MAX_COMPARED]):
        for earlier in node.wildcards[:index]:
            if covers(later, earlier.key.pattern, earlier.node.value):
                yield later.node, earlier.node
        for child in islice(node.exact.values(), MAX_COMPARED):
            if WILDCARD not in child.label and later.matches(child.key, child.value):
                yield later.node, child
    for ones in node.patterns.values():
        for index, wide in enumerate(ones[:MAX_COMPARED]):
            for narrow in ones[:index]:
                if wide.pattern and narrow.pattern and wide.pattern.contains(narrow.pattern):
                    yield wide, narrow


def _misses_rules_of(narrow: Node, wide: Node) -> bool:
    """Return whether `wide` leads to a rule to which `narrow` has no counterpart."""
    if wide.rule is not None and narrow.rule is None:
        return True
    for child in wide.children():
        matched = find_child(narrow, Entry(child.key, child.value))[0] if child.value else narrow.by_key.get(child.key)
        if matched is None or _misses_rules_of(matched, child):
            return True
    return False


def covers(wildcard: Wildcard[Node], key: str, value: str) -> bool:
    """Return whether the wildcard matches everything that (key, value), as written in the rules, matches.

    A value of "" is any value.
    """
    return _contains(wildcard.key, key) and (wildcard.value is None or _contains(wildcard.value, value or WILDCARD))


def _contains(outer: Glob, inner: str) -> bool:
    """Return whether `outer` matches everything that the pattern `inner` matches.

    That is the case exactly if `outer` matches `inner` with each `*` replaced by a character that occurs nowhere in
    `outer`: only a `*` of `outer` can match such a character, and a `*` that matches it matches anything.
    """
    return outer.matches(inner.replace(WILDCARD, _absent_character([outer.pattern, inner])))


def _absent_character(texts: Iterable[str]) -> str:
    """Return a character that occurs in none of the texts."""
    present = set().union(*texts)
    return next(char for char in map(chr, range(0xE000, sys.maxunicode)) if char not in present)


def _shadowed(node: Node, by: Node) -> Problem:
    assert node.position is not None
    assert by.position is not None
    return _warning(node.position, "unreachable", diagnostics.unreachable(_label(node), _label(by), by.position))


def _label(node: Node) -> str:
    return f"key '{node.key}' value '{node.shared_value}'" if node.shared_value else f"key '{node.key}'"


def _lint_descriptor(descriptor: DescriptorDocument) -> Iterator[Problem]:
    """Yield the warnings that depend only on the descriptor and its descendants."""
    limits = descriptor.rate_limits
    yield from _no_effect(descriptor, limits)
    if not _is_allowed(descriptor):
        yield from _zero_limits(limits)


def _no_effect(descriptor: DescriptorDocument, limits: Sequence[RateLimitDocument]) -> Iterator[Problem]:
    if not limits and descriptor.limits_of is None:
        for key in _NEEDS_LIMIT:
            written = getattr(descriptor, key)
            if written is not None and written.value:
                yield _warning(written.position, "no-effect", diagnostics.no_effect_without_limit(key))
    elif _allows_everything(descriptor):
        for key in _NEEDS_DENIALS:
            written = getattr(descriptor, key)
            if written is not None:
                yield _warning(written.position, "no-effect", diagnostics.no_effect_when_unlimited(key))
    failure = descriptor.on_store_failure
    if failure is not None and not any(map(_is_counted, _with_descendants(descriptor))):
        yield _warning(failure.position, "no-effect", diagnostics.no_effect_without_store("on_store_failure"))
    if _is_allowed(descriptor) and any(not is_unlimited(limit) for limit in limits):
        for name, limited in (("rate_limit", descriptor.rate_limit), ("limits", descriptor.limits)):
            if limited is not None:
                yield _warning(limited.position, "no-effect", diagnostics.limit_beside_allow(name))
    for limit in limits:
        if is_unlimited(limit):
            for key in _NEEDS_COUNTER:
                written = getattr(limit, key)
                if written is not None:
                    yield _warning(written.position, "no-effect", diagnostics.no_effect_when_unlimited(key))


def _is_counted(descriptor: DescriptorDocument) -> bool:
    is_limited = bool(descriptor.rate_limits) or descriptor.limits_of is not None
    return is_limited and not _allows_everything(descriptor)


def _allows_everything(descriptor: DescriptorDocument) -> bool:
    return _is_allowed(descriptor) or any(map(is_unlimited, descriptor.rate_limits))


def _is_allowed(descriptor: DescriptorDocument) -> bool:
    return descriptor.action is not None and descriptor.action.value == Action.ALLOW.value


def _zero_limits(limits: Iterable[RateLimitDocument]) -> Iterator[Problem]:
    for limit in limits:
        if is_unlimited(limit):
            continue
        if limit.requests_per_unit is None:
            yield _warning(limit.position, "zero-limit", diagnostics.denies_everything(is_written=False))
        elif limit.requests_per_unit.value == 0:
            yield _warning(
                limit.requests_per_unit.position, "zero-limit", diagnostics.denies_everything(is_written=True)
            )


def _unknown_replaces(limit: RateLimitDocument, names: Collection[str]) -> Iterator[Problem]:
    for replaced in limit.replaces:
        if replaced.value not in names:
            yield _warning(replaced.position, "replaces", diagnostics.unknown_replaces(replaced.value))


def _unmapped(domain: str, written: Positioned[YamlNode], tree: Tree) -> Iterator[Problem]:
    mapping, root = tree.mappings[domain], tree.domains[domain]
    assert isinstance(written.value, YamlMap)
    fields = {key.text: value for key, value in written.value.fields() if isinstance(key, YamlScalar)}
    nodes = fields["descriptors"]
    assert isinstance(nodes, YamlList)  # it has compiled, so it is a list with one element per descriptor
    # Not strict: stored rules may have added descriptors.
    for node, descriptor in zip(nodes.items, mapping.descriptors, strict=False):
        if not _can_match(root, descriptor.entries):
            message = diagnostics.unmapped_descriptor(entry.key for entry in descriptor.entries)
            yield _warning(Position(written.position.file, node.line, node.column), "unmapped", message)


def _can_match(node: Node, entries: Sequence[MappedEntry]) -> bool:
    """Return whether the entries can lead to a rule, or to a leaf that only exempts requests from other rules."""
    if not entries:
        return node.rule is not None or next(node.children(), None) is None
    first, *others = entries
    return any(_can_match(child, others) for child in _matching_children(node, first))


def _matching_children(node: Node, entry: MappedEntry) -> Iterator[Node]:
    """Yield the children that the entry may match. A fixed value is known; otherwise any value is possible."""
    if isinstance(entry.source, FixedSource):
        child, _ = find_child(node, Entry(entry.key, entry.source.text))
        if child is not None:
            yield child
        return
    if entry.key in node.by_key:
        yield node.by_key[entry.key]
    yield from node.patterns.get(entry.key, ())
    yield from (wildcard.node for wildcard in node.wildcards if wildcard.key.matches(entry.key))
    yield from (child for (key, _), child in node.exact.items() if key == entry.key)


def _descriptors(document: Document) -> Iterator[DescriptorDocument]:
    """Yield all descriptors that may have warnings. Of repeated descriptors, only the first if it has none."""
    waiting = list(document.descriptors)
    while waiting:
        descriptor = waiting.pop()
        if isinstance(descriptor, RepeatedDescriptor):
            if not _needs_lint(descriptor):
                continue
            descriptor = descriptor.expand()
        yield descriptor
        waiting.extend(descriptor.descriptors)


def _needs_lint(descriptor: RepeatedDescriptor) -> bool:
    shared, prototype = descriptor.variant.shared, descriptor.prototype
    if _lint_descriptor not in shared:
        shared[_lint_descriptor] = any(_lint_descriptor(prototype)) or any(
            limit.replaces for limit in prototype.rate_limits
        )
    return bool(shared[_lint_descriptor])


def _with_descendants(descriptor: DescriptorDocument) -> Iterator[DescriptorDocument]:
    """Yield the descriptor and its descendants. Positions of repeated descriptors are those of the first one."""
    waiting: list[DescriptorDocument | RepeatedDescriptor] = [descriptor]
    while waiting:
        one = waiting.pop()
        descriptor = one.prototype if isinstance(one, RepeatedDescriptor) else one
        yield descriptor
        waiting.extend(descriptor.descriptors)


def _warning(at: Position, code: str, message: str) -> Problem:
    return Problem(at.file, at.line, at.column, message, "warning", code)
