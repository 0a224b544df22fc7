"""One descriptor of a document to a node of the tree, with its rule. Each way to be refused is told apart here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ratelimit_rls.core.model import Algorithm, Charge, Limit, Rule, Unit
from ratelimit_rls.core.tree import WILDCARD, Glob, Node, Wildcard
from ratelimit_rls.rules import offences
from ratelimit_rls.rules.document import DescriptorDocument, RateLimitDocument, Written
from ratelimit_rls.rules.grammar import Findings

_UNITS = {unit.name: unit for unit in Unit if unit is not Unit.UNKNOWN}


@dataclass(slots=True)
class Level:
    """The children of one node while they are being collected."""

    exact: dict[tuple[str, str], Node] = field(default_factory=dict)
    wildcards: list[Wildcard] = field(default_factory=list)
    by_key: dict[str, Node] = field(default_factory=dict)

    def present(self, key: str, value: str) -> Node | None:
        return self.exact.get((key, value)) if value else self.by_key.get(key)

    def add(self, node: Node) -> None:
        if node.value:
            self.exact[node.key, node.value] = node
        else:
            self.by_key[node.key] = node
        if WILDCARD in node.label:
            self.wildcards.append(Wildcard(Glob.of(node.key), Glob.of(node.value) if node.value else None, node))

    def node(self, key: str, **fields: Any) -> Node:
        """The node above this level."""
        return Node(key, exact=self.exact, wildcards=tuple(self.wildcards), by_key=self.by_key, **fields)


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
    label = f"{key}_{value}" if value else key
    path = f"{parent_path}.{label}"
    if not key:
        if not document.is_broken:
            found.error(document.key.position if document.key else document.position, offences.empty_key())
    elif (first := level.present(key, value)) is not None and not document.is_broken:
        assert first.position is not None
        found.error(document.position, offences.duplicate_descriptor(path, first.position))
    share_threshold = _flag(document.share_threshold)
    if share_threshold and key and WILDCARD not in label:
        assert document.share_threshold is not None
        found.error(document.share_threshold.position, offences.share_without_wildcard(label))
    rule = _compile_rule(path, document, found, domain_charge, default_charge)
    below = Level()
    for child in document.descriptors:
        add_descriptor(below, path, child, found, domain_charge=domain_charge, default_charge=default_charge)
    if key and level.present(key, value) is None:
        level.add(
            below.node(
                key,
                value=value,
                rule=rule,
                share_threshold=share_threshold,
                value_to_metric=_flag(document.value_to_metric),
                position=document.position,
            )
        )


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
    written = document.rate_limit
    if written is None:
        return None
    name = _text(written.name)
    for replaced in written.replaces:
        if not replaced.value:
            found.error(replaced.position, offences.empty_replaces())
        elif replaced.value == name:
            found.error(replaced.position, offences.replaces_itself())
    uses_new_key = written.algorithm is not None or written.burst is not None
    return Rule(
        path=path,
        limit=_compile_limit(written, name, found),
        name=name,
        replaces=frozenset(replaced.value for replaced in written.replaces),
        charge=charge or domain_charge or (Charge.ADMITTED if uses_new_key else default_charge),
        shadow_mode=_flag(document.shadow_mode),
        quota_mode=_flag(document.quota_mode),
        detailed_metric=_flag(document.detailed_metric),
        metadata=_metadata(document),
        position=document.position,
    )


def _compile_limit(written: RateLimitDocument, name: str, found: Findings) -> Limit | None:
    """None when unlimited, and after an error."""
    algorithm = _algorithm(written, found)
    unit = _unit(written, found)
    if unit is None or algorithm is None or written.is_broken:
        return None
    requests_per_unit = written.requests_per_unit.value if written.requests_per_unit else 0
    at = written.requests_per_unit.position if written.requests_per_unit else written.position
    if written.burst and not algorithm.has_burst:
        found.error(written.burst.position, offences.burst_without_bucket(algorithm))
    elif written.burst and requests_per_unit == 0:
        found.error(written.burst.position, offences.burst_beside_zero())
    elif written.burst and written.burst.value == 0:
        found.error(written.burst.position, offences.burst_of_nothing())
    if requests_per_unit == 0:
        # Whatever the algorithm, every hit is over: none of them has to know how to divide by it.
        return Limit(0, unit, Algorithm.FIXED_WINDOW, name=name)
    if algorithm is Algorithm.SLIDING_LOG and requests_per_unit > offences.LONGEST_SLIDING_LOG:
        found.error(at, offences.log_too_long(requests_per_unit))
    burst = 0
    if algorithm.has_burst:
        burst = written.burst.value if written.burst else requests_per_unit
    limit = Limit(requests_per_unit, unit, algorithm, burst, name)
    if written.burst and burst * limit.window_us > offences.LONGEST_FILL_US * requests_per_unit:
        found.error(written.burst.position, offences.fills_too_slowly(limit))
    return limit


def _unit(written: RateLimitDocument, found: Findings) -> Unit | None:
    """None when unlimited, and after an error."""
    text = _text(written.unit)
    unit = _UNITS.get(text.upper())
    position = written.unit.position if written.unit else written.position
    if _flag(written.unlimited):
        if unit is not None:
            found.error(position, offences.unit_when_unlimited())
        return None
    if unit is None and (written.unit or not written.is_broken):
        found.error(position, offences.invalid_unit(text))
    return unit


def _algorithm(written: RateLimitDocument, found: Findings) -> Algorithm | None:
    if written.algorithm is None:
        return Algorithm.FIXED_WINDOW
    if written.algorithm.value not in offences.ALGORITHMS:
        found.error(written.algorithm.position, offences.unknown_algorithm(written.algorithm.value))
        return None
    return Algorithm(written.algorithm.value)


def _metadata(document: DescriptorDocument) -> Mapping[str, Any] | None:
    return document.metadata.value if document.metadata else None


def _text(written: Written[str] | None) -> str:
    return written.value if written else ""


def _flag(written: Written[bool] | None) -> bool:
    return written is not None and written.value
