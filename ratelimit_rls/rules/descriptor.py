"""One descriptor of a document to a node of the tree, with its rule. Each way to be refused is told apart here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ratelimit_rls.core.model import Charge, Rule
from ratelimit_rls.core.pattern import Pattern
from ratelimit_rls.core.tree import WILDCARD, Glob, Node, Wildcard
from ratelimit_rls.rules import offences
from ratelimit_rls.rules.document import DescriptorDocument, Written
from ratelimit_rls.rules.grammar import Findings
from ratelimit_rls.rules.limit import compile_limits
from ratelimit_rls.rules.pattern import compile_pattern


@dataclass(slots=True)
class Level:
    """The children of one node while they are being collected."""

    exact: dict[tuple[str, str], Node] = field(default_factory=dict)
    wildcards: list[Wildcard] = field(default_factory=list)
    patterns: dict[str, list[Node]] = field(default_factory=dict)
    by_key: dict[str, Node] = field(default_factory=dict)

    def present(self, key: str, value: str, pattern: Pattern | None) -> Node | None:
        if pattern is not None:
            same = (node for node in self.patterns.get(key, ()) if node.pattern and node.pattern.label == pattern.label)
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
    *,
    domain_charge: Charge | None,
    default_charge: Charge,
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
    share_threshold = _flag(document.share_threshold)
    if share_threshold and key and WILDCARD not in label and document.match is None:
        assert document.share_threshold is not None
        found.error(document.share_threshold.position, offences.share_without_wildcard(label))
    rule = _compile_rule(path, document, found, domain_charge, default_charge)
    below = Level()
    for child in document.descriptors:
        add_descriptor(below, path, child, found, domain_charge=domain_charge, default_charge=default_charge)
    if key and level.present(key, value, pattern) is None:
        level.add(
            below.node(
                key,
                value=value,
                pattern=pattern,
                rule=rule,
                share_threshold=share_threshold,
                value_to_metric=_flag(document.value_to_metric),
                position=document.position,
            )
        )


def _is_broken(document: DescriptorDocument) -> bool:
    """Whether something that tells it from its neighbours could not be read, which was reported."""
    return document.is_broken or (document.match is not None and document.match.is_broken)


def read_charge(written: Written[str] | None, found: Findings) -> Charge | None:
    if written is None:
        return None
    if written.value not in offences.CHARGES:
        found.error(written.position, offences.unknown_charge(written.value))
        return None
    return Charge(written.value)


def _compile_rule(
    path: str, document: DescriptorDocument, found: Findings, domain_charge: Charge | None, default_charge: Charge
) -> Rule | None:
    charge = read_charge(document.charge, found)
    action = _action(document, found)
    if document.limits is not None and document.rate_limit is not None:
        found.error(document.limits.position, offences.limits_beside_rate_limit())
    written = document.rate_limits
    if action is not Action.ALLOW and (not written or (document.enabled and not document.enabled.value)):
        compile_limits(document, found)  # what is switched off is still read, so that switching it on holds no surprise
        return None
    uses_new_key = document.limits is not None or any(limit.uses_new_key for limit in written)
    limits = compile_limits(document, found)
    return Rule(
        path=path,
        limits=() if action is Action.ALLOW else limits,
        replaces=frozenset(replaced.value for limit in written for replaced in limit.replaces),
        charge=charge or domain_charge or (Charge.ADMITTED if uses_new_key else default_charge),
        shadow_mode=_flag(document.shadow_mode) or action is Action.LOG_ONLY,
        quota_mode=_flag(document.quota_mode),
        detailed_metric=_flag(document.detailed_metric),
        metadata=_metadata(document),
        position=document.position,
    )


class Action(Enum):
    """What becomes of a call that does not fit. All but REJECT are other words for what the reference has."""

    REJECT = "reject"
    LOG_ONLY = "log_only"  # shadow_mode
    ALLOW = "allow"  # unlimited


def _action(document: DescriptorDocument, found: Findings) -> Action:
    written = document.action
    if written is None:
        return Action.REJECT
    names = [action.value for action in Action]
    if written.value not in names:
        found.error(written.position, offences.unknown_action(written.value, names))
        return Action.REJECT
    return Action(written.value)


def _metadata(document: DescriptorDocument) -> Mapping[str, Any] | None:
    return document.metadata.value if document.metadata else None


def _text(written: Written[str] | None) -> str:
    return written.value if written else ""


def _flag(written: Written[bool] | None) -> bool:
    return written is not None and written.value
