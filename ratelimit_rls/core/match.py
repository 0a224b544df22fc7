"""match: which rule each descriptor of a request meets.

A limit applies only if it sits on the node of the descriptor's last entry, and a level once chosen is never
reconsidered (reference behaviour, both). So a descriptor longer or shorter than the rules meets none.
"""

from __future__ import annotations

from collections.abc import Iterator

from ratelimit_rls.core.model import Descriptor, Entry, Limit, Match, Request, Rule, filled
from ratelimit_rls.core.tree import Node, Tree, find

NO_MATCH = Match(rule=None)


def match(tree: Tree, request: Request) -> tuple[Match, ...]:
    """What each descriptor meets, in request order."""
    root = tree.domains.get(request.domain)
    if root is None:
        return (NO_MATCH,) * len(request.descriptors)
    return tuple([match_descriptor(root, descriptor) for descriptor in request.descriptors])


def match_descriptor(root: Node, descriptor: Descriptor) -> Match:
    if descriptor.limit is not None:
        return _match_override(root, descriptor)
    node, is_plain, entries = root, True, descriptor.entries
    for entry in entries:
        is_one_of_many = False
        if node.exact or node.wildcards or node.patterns:
            child, is_one_of_many = find(node, entry)
        else:  # a level that looks at keys alone is worth no call
            child = node.by_key.get(entry.key)
        if child is None:
            return NO_MATCH
        if is_one_of_many or child.value_to_metric:
            is_plain = False
        node = child
    rule = node.rule
    if rule is None:
        return NO_MATCH
    if is_plain and not rule.detailed_metric:  # as most are, and the rest of the work is for the others
        return filled(Match, (rule, entries, rule.path))
    walked = list(_walked(root, descriptor))
    counted = tuple(
        Entry(entry.key, child.shared_value or child.key) if is_one_of_many and child.share_threshold else entry
        for entry, child, is_one_of_many in walked
    )
    return Match(rule, counted, _metric_path(root.key, rule, walked))


def _walked(root: Node, descriptor: Descriptor) -> Iterator[tuple[Entry, Node, bool]]:
    """The way to a rule that is known to be there."""
    node = root
    for entry in descriptor.entries:
        child, is_one_of_many = find(node, entry)
        assert child is not None
        yield entry, child, is_one_of_many
        node = child


def _match_override(root: Node, descriptor: Descriptor) -> Match:
    """A limit in the request replaces the tree altogether: no shadow, no name, no exemption (reference behaviour).

    What is told of it, and what happens to it without a store, is as the domain says.
    """
    assert descriptor.limit is not None
    path = ".".join([root.key, *(_label(entry.key, entry.value) for entry in descriptor.entries)])
    limit = Limit(descriptor.limit.requests_per_unit, descriptor.limit.unit)
    rule = Rule(path=path, limits=(limit,), style=root.style, deny=root.deny, on_store_failure=root.on_store_failure)
    return Match(rule, descriptor.entries, path)


def _metric_path(domain: str, rule: Rule, walked: list[tuple[Entry, Node, bool]]) -> str:
    """The rule's path, with request values in it where the rules ask for them.

    `detailed_metric` puts every value in, `value_to_metric` the values of its own level; the pattern of a shared
    wildcard stays a pattern in both, since its values share one counter.
    """
    shared = any(is_one_of_many and node.share_threshold for _, node, is_one_of_many in walked)
    if rule.detailed_metric and not shared:
        return ".".join([domain, *(f"{entry.key}_{entry.value}" for entry, _, _ in walked)])
    if not rule.detailed_metric and not any(node.value_to_metric for _, node, _ in walked):
        return rule.path
    labels = [domain]
    for entry, node, is_one_of_many in walked:
        if is_one_of_many and node.share_threshold:
            labels.append(node.label)
        elif rule.detailed_metric or node.value_to_metric:
            labels.append(_label(entry.key, entry.value))
        else:
            labels.append(node.label)
    return ".".join(labels)


def _label(key: str, value: str) -> str:
    return f"{key}_{value}" if value else key
