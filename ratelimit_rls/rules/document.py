"""A rules file as typed values with positions, before its meaning is checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from ratelimit_rls.core.model import Position
from ratelimit_rls.rules import diagnostics, grammar
from ratelimit_rls.rules.positioned_fields import Positioned, PositionedFields
from ratelimit_rls.yaml.findings import Findings
from ratelimit_rls.yaml.nodes import Variant, YamlList, YamlMap, YamlNode, YamlScalar, is_null

_extension_values = attrgetter(*grammar.NEW_LIMIT_KEYS)
_NO_EXTENSIONS = (None,) * len(grammar.NEW_LIMIT_KEYS)


# The documents are not frozen: large rules have hundreds of thousands of them, and freezing would triple the cost of
# creating one.


@dataclass(slots=True)
class RateLimitDocument:
    position: Position
    unit: Positioned[str] | None = None
    requests_per_unit: Positioned[int] | None = None
    unlimited: Positioned[bool] | None = None
    name: Positioned[str] | None = None
    replaces: tuple[Positioned[str], ...] = ()
    algorithm: Positioned[str] | None = None
    burst: Positioned[int] | None = None
    unit_multiplier: Positioned[int] | None = None
    calendar: Positioned[bool] | None = None
    timezone: Positioned[str] | None = None
    # A value could not be read, which was reported: do not report it as missing, too.
    is_broken: bool = False

    @property
    def uses_new_key(self) -> bool:
        return _extension_values(self) != _NO_EXTENSIONS


@dataclass(slots=True)
class MatchDocument:
    position: Position
    cidr: Positioned[str] | None = None
    prefix: Positioned[str] | None = None
    regex: Positioned[str] | None = None
    is_broken: bool = False

    @property
    def patterns(self) -> list[tuple[str, Positioned[str]]]:
        """Kind and text of each pattern that is present. A valid document has exactly one."""
        patterns = (("cidr", self.cidr), ("prefix", self.prefix), ("regex", self.regex))
        return [(kind, written) for kind, written in patterns if written is not None]


@dataclass(slots=True)
class DescriptorDocument:
    position: Position
    key: Positioned[str] | None = None
    value: Positioned[str] | None = None
    match: MatchDocument | None = None
    rate_limit: RateLimitDocument | None = None
    limits: Positioned[tuple[RateLimitDocument, ...]] | None = None
    limits_of: Positioned[str] | None = None
    descriptors: tuple[DescriptorDocument | RepeatedDescriptor, ...] = ()
    charge: Positioned[str] | None = None
    action: Positioned[str] | None = None
    max_delay: Positioned[str] | None = None
    warn_at: Positioned[YamlNode] | None = None
    penalty: Positioned[YamlNode] | None = None
    hot: Positioned[YamlNode] | None = None
    on_store_failure: Positioned[str] | None = None
    answer: Positioned[YamlNode] | None = None
    deny: Positioned[YamlNode] | None = None
    enabled: Positioned[bool] | None = None
    shadow_mode: Positioned[bool] | None = None
    quota_mode: Positioned[bool] | None = None
    detailed_metric: Positioned[bool] | None = None
    value_to_metric: Positioned[bool] | None = None
    share_threshold: Positioned[bool] | None = None
    metadata: Positioned[dict[str, Any]] | None = None
    is_broken: bool = False

    @property
    def rate_limits(self) -> tuple[RateLimitDocument, ...]:
        """The limits, whether given as `rate_limit` or as `limits`."""
        if self.limits is not None:
            return self.limits.value
        return (self.rate_limit,) if self.rate_limit is not None else ()


class RepeatedDescriptor(NamedTuple):
    """A descriptor that differs from `prototype` only in its value and position. It has no descriptors below it."""

    prototype: DescriptorDocument
    position: Position
    variant: Variant
    found: Findings

    def expand(self) -> DescriptorDocument:
        """Read the descriptor in full, with its own positions."""
        return _read_single(self.variant.to_map(), self.found)


@dataclass(slots=True)
class Document:
    position: Position
    domain: Positioned[str] | None = None
    descriptors: tuple[DescriptorDocument | RepeatedDescriptor, ...] = ()
    charge: Positioned[str] | None = None
    on_store_failure: Positioned[str] | None = None
    shard_by: Positioned[YamlNode] | None = None
    answer: Positioned[YamlNode] | None = None
    deny: Positioned[YamlNode] | None = None
    ext_authz: Positioned[YamlNode] | None = None
    identity: Positioned[YamlNode] | None = None
    is_broken: bool = False


def read_document(root: YamlNode | None, found: Findings) -> Document:
    """Read a file's values. Report values that cannot be read to `found` and omit them."""
    if root is None or is_null(root):
        return Document(Position(found.file, found.first_line, 1))
    if not isinstance(root, YamlMap):
        fields = PositionedFields((), found)
        fields.reject(root, "map[interface {}]interface {}", "a rules file is a mapping that starts with 'domain:'")
        return Document(found.position(root), is_broken=True)
    grammar.check(root, "file", found)
    fields = PositionedFields(root.fields(), found)
    return Document(
        position=found.position(root),
        domain=fields.text("domain"),
        descriptors=_read_descriptors(fields, "descriptors"),
        charge=fields.text("charge"),
        on_store_failure=fields.text("on_store_failure"),
        shard_by=fields.node("shard_by"),
        answer=fields.node("answer"),
        deny=fields.node("deny"),
        ext_authz=fields.node("ext_authz"),
        identity=fields.node("identity"),
        is_broken=fields.is_broken,
    )


def expand(document: DescriptorDocument | RepeatedDescriptor) -> DescriptorDocument:
    return document.expand() if isinstance(document, RepeatedDescriptor) else document


def _read_descriptor(node: YamlMap, found: Findings) -> DescriptorDocument | RepeatedDescriptor:
    variant = node.variant
    if variant is None:
        return _read_single(node, found)
    prototype = variant.shared.get(DescriptorDocument)
    if prototype is not None:
        return RepeatedDescriptor(prototype, found.position(node), variant, found)
    problems_before = found.problem_count
    document = _read_single(node, found)
    if found.problem_count == problems_before and not document.descriptors:
        variant.shared[DescriptorDocument] = document
    return document


def _read_single(node: YamlMap, found: Findings) -> DescriptorDocument:
    fields = PositionedFields(node.fields(), found)
    written = fields.read(_DESCRIPTOR_READERS)
    return DescriptorDocument(found.position(node), **written, is_broken=fields.is_broken)


def _read_rate_limit(outer: PositionedFields, key: str) -> RateLimitDocument | None:
    node = outer.merged(key, "config.YamlRateLimit", "must be a mapping with 'unit' and 'requests_per_unit'")
    return None if node is None else _read_limit(node, outer.found)


def _read_limits(outer: PositionedFields, key: str) -> Positioned[tuple[RateLimitDocument, ...]] | None:
    at = outer.node(key)
    if at is None:
        return None
    return Positioned(outer.maps(key, "[]config.YamlRateLimit", _read_limit), at.file, at.line, at.column)


def _read_match(outer: PositionedFields, key: str) -> MatchDocument | None:
    node = outer.merged(key, "match", "must be a mapping with one of 'cidr', 'prefix' and 'regex'")
    if node is None:
        return None
    found = outer.found
    fields = PositionedFields(node.fields(), found)
    return MatchDocument(
        position=found.position(node),
        cidr=fields.text("cidr"),
        prefix=fields.text("prefix"),
        regex=fields.text("regex"),
        is_broken=fields.is_broken or any(map(grammar.is_unknown, (key for key, _ in node.fields()))),
    )


def _read_limit(node: YamlMap, found: Findings) -> RateLimitDocument:
    fields = PositionedFields(node.fields(), found)
    written = fields.read(_LIMIT_READERS)
    return RateLimitDocument(found.position(node), **written, is_broken=fields.is_broken)


def _read_descriptors(outer: PositionedFields, key: str) -> tuple[DescriptorDocument | RepeatedDescriptor, ...]:
    return outer.maps(key, "[]config.YamlDescriptor", _read_descriptor)


def _read_replaces(outer: PositionedFields, key: str) -> tuple[Positioned[str], ...]:
    return outer.maps(key, "[]config.yamlReplaces", _read_replaced)


def _read_replaced(node: YamlMap, found: Findings) -> Positioned[str]:
    return PositionedFields(node.fields(), found).text("name") or Positioned("", found.file, node.line, node.column)


def _read_metadata(outer: PositionedFields, key: str) -> Positioned[dict[str, Any]] | None:
    node = outer.merged(key, "map[string]interface {}", "must be a mapping")
    if node is None:
        return None
    try:
        plain = _map_to_json(node)
    except _NotJson as error:
        outer.found.error(error.node, diagnostics.bad_metadata(str(error)))
        return None
    return Positioned(plain, outer.found.file, node.line, node.column) if plain else None


class _NotJson(Exception):
    def __init__(self, node: YamlNode, reason: str) -> None:
        super().__init__(reason)
        self.node = node


def _to_json(node: YamlNode) -> Any:
    """Convert a node to JSON values, which google.protobuf.Struct can carry."""
    if isinstance(node, YamlMap):
        return _map_to_json(node)
    if isinstance(node, YamlList):
        return [_to_json(item) for item in node.items]
    if isinstance(node.value, float) and not math.isfinite(node.value):
        raise _NotJson(node, f"{node.text} is not a JSON number")
    return node.value


def _map_to_json(node: YamlMap) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in node.fields():
        if not isinstance(key, YamlScalar):
            raise _NotJson(key, "a key is a mapping or a list")
        plain[key.text] = _to_json(value)
    return plain


_DESCRIPTOR_READERS: Mapping[str, Callable[[PositionedFields, str], object]] = {
    "key": PositionedFields.text,
    "value": PositionedFields.text,
    "match": _read_match,
    "rate_limit": _read_rate_limit,
    "limits": _read_limits,
    "limits_of": PositionedFields.text,
    "descriptors": _read_descriptors,
    "charge": PositionedFields.text,
    "action": PositionedFields.text,
    "max_delay": PositionedFields.text,
    "warn_at": PositionedFields.node,
    "penalty": PositionedFields.node,
    "hot": PositionedFields.node,
    "on_store_failure": PositionedFields.text,
    "answer": PositionedFields.node,
    "deny": PositionedFields.node,
    "enabled": PositionedFields.boolean,
    "shadow_mode": PositionedFields.boolean,
    "quota_mode": PositionedFields.boolean,
    "detailed_metric": PositionedFields.boolean,
    "value_to_metric": PositionedFields.boolean,
    "share_threshold": PositionedFields.boolean,
    "metadata": _read_metadata,
}
_LIMIT_READERS: Mapping[str, Callable[[PositionedFields, str], object]] = {
    "unit": PositionedFields.text,
    "requests_per_unit": PositionedFields.count,
    "unlimited": PositionedFields.boolean,
    "name": PositionedFields.text,
    "replaces": _read_replaces,
    "algorithm": PositionedFields.text,
    "burst": PositionedFields.count,
    "unit_multiplier": PositionedFields.count,
    "calendar": PositionedFields.boolean,
    "timezone": PositionedFields.text,
}
