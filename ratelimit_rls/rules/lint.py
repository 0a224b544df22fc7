"""What is allowed but hardly meant. Each kind of warning has a code; none of them stops a load.

    unreachable     another descriptor always answers first       no-effect   a key that changes nothing where it is
    zero-limit      every request is refused                      replaces    the name of no rate_limit
    unmapped        ext_authz makes what no descriptor meets      hidden      a targeted rule does not hold for some of
                                                                              those it is for

(`misplaced` and `duplicate-key` are found by the grammar, while the text is at hand; `unread`, a second document, when
a file is read; `overridden`, what a stronger source says instead, where sources are merged.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from ratelimit_rls.core.attributes import Fixed, MappedEntry
from ratelimit_rls.core.model import Entry, Position
from ratelimit_rls.core.tree import WILDCARD, Glob, Node, Tree, Wildcard, find
from ratelimit_rls.errors import Problem
from ratelimit_rls.rules import offences
from ratelimit_rls.rules.document import DescriptorDocument, Document, LikeDocument, RateLimitDocument
from ratelimit_rls.rules.limit import is_unlimited
from ratelimit_rls.rules.node import YamlList, YamlMap, YamlNode, YamlScalar
from ratelimit_rls.rules.rule import Action
from ratelimit_rls.rules.written import Written

MOST_COMPARED = 500
"""Earlier wildcards each wildcard of a level is compared with: the comparison is quadratic, and rules with more have
a different problem."""

_NEEDS_REFUSALS = ("penalty", "warn_at", "answer", "deny")
_NEEDS_LIMIT = ("charge", "shadow_mode", "quota_mode", "detailed_metric", "metadata", "hot", *_NEEDS_REFUSALS)
_NEEDS_COUNTER = ("unit", "requests_per_unit", "algorithm", "burst", "unit_multiplier", "calendar", "timezone")


def lint(
    tree: Tree,
    documents: Iterable[Document],
    mappings: Mapping[str, Written[YamlNode]],
    targeted: Collection[str] = (),
) -> Iterator[Problem]:
    """`mappings` are those that count, by domain; `targeted` are the names of sources that have a targeting."""
    for level in tree.levels():
        yield from _unreachable(level)
    if targeted:
        yield from _hidden(tree, targeted)
    for domain, written in mappings.items():
        yield from _mapped_to_nothing(domain, written, tree)
    names: dict[str, set[str]] = {}
    replacing: list[tuple[str, RateLimitDocument]] = []
    for document in documents:
        domain = document.domain.value if document.domain else ""
        known = names.setdefault(domain, set())
        for descriptor in _descriptors(document):
            limits = descriptor.rate_limits
            known.update([limit.name.value for limit in limits if limit.name])
            replacing.extend([(domain, limit) for limit in limits if limit.replaces])
            yield from _odd(descriptor)
    for domain, limit in replacing:
        yield from _replacing_nobody(limit, names[domain])


def _unreachable(level: Node) -> Iterator[Problem]:
    """Of the node's children."""
    for index, later in enumerate(level.wildcards):
        for earlier in level.wildcards[: min(index, MOST_COMPARED)]:
            if covers(earlier, later.key.pattern, later.node.value):
                yield _shadowed(later.node, earlier.node)
                break
    for key, child in level.by_key.items():
        if WILDCARD not in key:
            for wildcard in level.wildcards[:MOST_COMPARED]:
                if covers(wildcard, key, ""):
                    yield _shadowed(child, wildcard.node)
                    break


def _hidden(tree: Tree, targeted: Collection[str]) -> Iterator[Problem]:
    """Of several that an entry would meet, one is taken and never taken back: what the others have below is not met.

    Whoever writes descriptors says so by what is written where; whoever targets a rule at paths and networks does not.
    """
    told: set[int] = set()
    for level in tree.levels():
        for wide, narrow in _overlaps(level):
            assert wide.position is not None
            assert narrow.position is not None
            if wide.position.file in targeted and id(wide) not in told and _lacks(narrow, wide):
                told.add(id(wide))
                message = offences.hidden(_named(wide), _named(narrow), narrow.position)
                yield _warning(wide.position, "hidden", message)


def _overlaps(node: Node) -> Iterator[tuple[Node, Node]]:
    """Of the children, each that meets all that another one meets that is tried before it."""
    for index, later in enumerate(node.wildcards[:MOST_COMPARED]):
        for earlier in node.wildcards[:index]:
            if covers(later, earlier.key.pattern, earlier.node.value):
                yield later.node, earlier.node
        for child in islice(node.exact.values(), MOST_COMPARED):
            if WILDCARD not in child.label and later.matches(Entry(child.key, child.value)):
                yield later.node, child
    for ones in node.patterns.values():
        for index, wide in enumerate(ones[:MOST_COMPARED]):
            for narrow in ones[:index]:
                if wide.pattern and narrow.pattern and wide.pattern.contains(narrow.pattern):
                    yield wide, narrow


def _lacks(narrow: Node, wide: Node) -> bool:
    """Whether `wide` has a rule for what comes next, and `narrow` has nothing."""
    if wide.rule is not None and narrow.rule is None:
        return True
    for child in wide.children():
        met = find(narrow, Entry(child.key, child.value))[0] if child.value else narrow.by_key.get(child.key)
        if met is None or _lacks(met, child):
            return True
    return False


def covers(wildcard: Wildcard, key: str, value: str) -> bool:
    """Whether whatever meets (key, value), as written in the rules, would meet the wildcard. No value: any value."""
    return _contains(wildcard.key, key) and (wildcard.value is None or _contains(wildcard.value, value or WILDCARD))


def _contains(outer: Glob, inner: str) -> bool:
    """Whether `outer` matches everything that the pattern `inner` does.

    It does exactly if it matches `inner` with each `*` read as one character that stands nowhere in `outer`: such a
    character can only be taken by a `*` of `outer`, and what takes it takes anything.
    """
    stranger = next(chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in outer.pattern + inner)
    return outer.matches(inner.replace(WILDCARD, stranger))


def _shadowed(node: Node, by: Node) -> Problem:
    assert node.position is not None
    assert by.position is not None
    return _warning(node.position, "unreachable", offences.unreachable(_named(node), _named(by), by.position))


def _named(node: Node) -> str:
    return f"key '{node.key}' value '{node.shared_value}'" if node.shared_value else f"key '{node.key}'"


def _odd(descriptor: DescriptorDocument) -> Iterator[Problem]:
    """What can be told by the descriptor alone, with those below it."""
    limits = descriptor.rate_limits
    yield from _without_effect(descriptor, limits)
    if not _is_allowed(descriptor):
        yield from _refusing_everything(limits)


def _without_effect(descriptor: DescriptorDocument, limits: Sequence[RateLimitDocument]) -> Iterator[Problem]:
    if not limits and descriptor.limits_of is None:
        for key in _NEEDS_LIMIT:
            written = getattr(descriptor, key)
            if written is not None and written.value:
                yield _warning(written.position, "no-effect", offences.no_effect_without_limit(key))
    elif _allows_everything(descriptor):
        for key in _NEEDS_REFUSALS:
            written = getattr(descriptor, key)
            if written is not None:
                yield _warning(written.position, "no-effect", offences.no_effect_when_unlimited(key))
    failure = descriptor.on_store_failure
    if failure is not None and not any(map(_is_counted, _and_below(descriptor))):
        yield _warning(failure.position, "no-effect", offences.no_effect_without_store("on_store_failure"))
    if _is_allowed(descriptor) and any(not is_unlimited(limit) for limit in limits):
        for name, limited in (("rate_limit", descriptor.rate_limit), ("limits", descriptor.limits)):
            if limited is not None:
                yield _warning(limited.position, "no-effect", offences.limit_beside_allow(name))
    for limit in limits:
        if is_unlimited(limit):
            for key in _NEEDS_COUNTER:
                written = getattr(limit, key)
                if written is not None:
                    yield _warning(written.position, "no-effect", offences.no_effect_when_unlimited(key))


def _is_counted(descriptor: DescriptorDocument) -> bool:
    is_limited = bool(descriptor.rate_limits) or descriptor.limits_of is not None
    return is_limited and not _allows_everything(descriptor)


def _allows_everything(descriptor: DescriptorDocument) -> bool:
    return _is_allowed(descriptor) or any(map(is_unlimited, descriptor.rate_limits))


def _is_allowed(descriptor: DescriptorDocument) -> bool:
    return descriptor.action is not None and descriptor.action.value == Action.ALLOW.value


def _refusing_everything(limits: Iterable[RateLimitDocument]) -> Iterator[Problem]:
    for limit in limits:
        if is_unlimited(limit):
            continue
        if limit.requests_per_unit is None:
            yield _warning(limit.position, "zero-limit", offences.refuses_everything(is_written=False))
        elif limit.requests_per_unit.value == 0:
            yield _warning(limit.requests_per_unit.position, "zero-limit", offences.refuses_everything(is_written=True))


def _replacing_nobody(limit: RateLimitDocument, names: Collection[str]) -> Iterator[Problem]:
    for replaced in limit.replaces:
        if replaced.value not in names:
            yield _warning(replaced.position, "replaces", offences.replaces_nobody(replaced.value))


def _mapped_to_nothing(domain: str, written: Written[YamlNode], tree: Tree) -> Iterator[Problem]:
    mapping, root = tree.mappings[domain], tree.domains[domain]
    assert isinstance(written.value, YamlMap)
    fields = {key.text: value for key, value in written.value.fields() if isinstance(key, YamlScalar)}
    nodes = fields["descriptors"]
    assert isinstance(nodes, YamlList)  # what has compiled is one, with a descriptor for each of its elements
    for node, descriptor in zip(nodes.items, mapping.descriptors, strict=False):  # stored rules may have added some
        if not _is_met(root, descriptor.entries):
            message = offences.mapped_to_nothing(entry.key for entry in descriptor.entries)
            yield _warning(Position(written.position.file, node.line, node.column), "unmapped", message)


def _is_met(node: Node, entries: Sequence[MappedEntry]) -> bool:
    """Whether the entries can lead to a rule, or to a descriptor that is there only to be exempt from others."""
    if not entries:
        return node.rule is not None or next(node.children(), None) is None
    first, *others = entries
    return any(_is_met(child, others) for child in _children_met(node, first))


def _children_met(node: Node, entry: MappedEntry) -> Iterator[Node]:
    """What values a request brings is not known, so any value of the key will do; but a fixed value is."""
    if isinstance(entry.source, Fixed):
        child, _ = find(node, Entry(entry.key, entry.source.text))
        if child is not None:
            yield child
        return
    if entry.key in node.by_key:
        yield node.by_key[entry.key]
    yield from node.patterns.get(entry.key, ())
    yield from (wildcard.node for wildcard in node.wildcards if wildcard.key.matches(entry.key))
    yield from (child for (key, _), child in node.exact.items() if key == entry.key)


def _descriptors(document: Document) -> Iterator[DescriptorDocument]:
    """All that there may be something to tell of: of those that are alike, the first, if there is nothing."""
    waiting = list(document.descriptors)
    while waiting:
        descriptor = waiting.pop()
        if isinstance(descriptor, LikeDocument):
            if not _is_to_be_told(descriptor):
                continue
            descriptor = descriptor.exact()
        yield descriptor
        waiting.extend(descriptor.descriptors)


def _is_to_be_told(descriptor: LikeDocument) -> bool:
    made_of_it, like = descriptor.alike.shape.made_of_it, descriptor.like
    if _odd not in made_of_it:
        made_of_it[_odd] = any(_odd(like)) or any(limit.replaces for limit in like.rate_limits)
    return bool(made_of_it[_odd])


def _and_below(descriptor: DescriptorDocument) -> Iterator[DescriptorDocument]:
    """What they say, be it at other places."""
    waiting: list[DescriptorDocument | LikeDocument] = [descriptor]
    while waiting:
        one = waiting.pop()
        descriptor = one.like if isinstance(one, LikeDocument) else one
        yield descriptor
        waiting.extend(descriptor.descriptors)


def _warning(at: Position, code: str, message: str) -> Problem:
    return Problem(at.file, at.line, at.column, message, "warning", code)
