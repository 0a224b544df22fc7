"""Match the descriptors of a request against the rules tree.

A limit applies only if it is on the node of the descriptor's last entry, and there is no backtracking: a node chosen at
one level is final. Both are the behaviour of envoyproxy/ratelimit. So a descriptor longer or shorter than the rules
matches none.
"""

from __future__ import annotations

from collections.abc import Iterator

from ratelimit_rls.core.model import Descriptor, Entry, Limit, Match, Request, Rule, construct
from ratelimit_rls.core.tree import Node, Tree, find_child

NO_MATCH = Match(rule=None)


def match(tree: Tree, request: Request) -> tuple[Match, ...]:
    """Return the match of each descriptor, in request order."""
    root = tree.domains.get(request.domain)
    if root is None:
        return (NO_MATCH,) * len(request.descriptors)
    return tuple([match_descriptor(root, descriptor) for descriptor in request.descriptors])


def match_descriptor(root: Node, descriptor: Descriptor) -> Match:
    if descriptor.limit is not None:
        return _match_override(root, descriptor)
    node, is_plain, entries = root, True, descriptor.entries
    for entry in entries:
        is_pattern = False
        if node.exact or node.pattern_index:
            child, is_pattern = find_child(node, entry)
        else:  # a level with keys only: saves a function call
            child = node.by_key.get(entry.key)
        if child is None:
            return NO_MATCH
        if is_pattern or child.value_to_metric:
            is_plain = False
        node = child
    rule = node.rule
    if rule is None:
        return NO_MATCH
    if is_plain and not rule.detailed_metric:  # the common case
        return construct(Match, (rule, entries, rule.path))
    walked = list(_walk(root, descriptor))
    counted = tuple(
        Entry(entry.key, child.shared_value or child.key) if is_pattern and child.share_threshold else entry
        for entry, child, is_pattern in walked
    )
    return Match(rule, counted, _metric_path(root.key, rule, walked))


def _walk(root: Node, descriptor: Descriptor) -> Iterator[tuple[Entry, Node, bool]]:
    """Yield the entries and nodes on the path to a rule that is known to exist."""
    node = root
    for entry in descriptor.entries:
        child, is_pattern = find_child(node, entry)
        assert child is not None
        yield entry, child, is_pattern
        node = child


def _match_override(root: Node, descriptor: Descriptor) -> Match:
    """Return the match for a limit carried by the request.

    It replaces the tree: no shadow mode, no name, no exemption (as in envoyproxy/ratelimit). The response and the
    fallback without a store are those of the domain.
    """
    assert descriptor.limit is not None
    path = ".".join([root.key, *(_label(entry.key, entry.value) for entry in descriptor.entries)])
    limit = Limit(descriptor.limit.requests_per_unit, descriptor.limit.unit)
    rule = Rule(
        path=path,
        limits=(limit,),
        response_policy=root.response_policy,
        deny=root.deny,
        on_store_failure=root.on_store_failure,
    )
    return Match(rule, descriptor.entries, path)


def _metric_path(domain: str, rule: Rule, walked: list[tuple[Entry, Node, bool]]) -> str:
    """Return the rule's path, with request values where the rules ask for them.

    `detailed_metric` adds every value, `value_to_metric` the values of its own level. The pattern of a shared wildcard
    stays a pattern in both cases, since its values share one counter.
    """
    shared = any(is_pattern and node.share_threshold for _, node, is_pattern in walked)
    if rule.detailed_metric and not shared:
        return ".".join([domain, *(f"{entry.key}_{entry.value}" for entry, _, _ in walked)])
    if not rule.detailed_metric and not any(node.value_to_metric for _, node, _ in walked):
        return rule.path
    labels = [domain]
    for entry, node, is_pattern in walked:
        if is_pattern and node.share_threshold:
            labels.append(node.label)
        elif rule.detailed_metric or node.value_to_metric:
            labels.append(_label(entry.key, entry.value))
        else:
            labels.append(node.label)
    return ".".join(labels)


def _label(key: str, value: str) -> str:
    return f"{key}_{value}" if value else key
