"""A rules file as typed values, each with its place: what was written, before it is asked what it means."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from ratelimit_rls.core.model import Position
from ratelimit_rls.rules import grammar, offences
from ratelimit_rls.rules.alike import Alike
from ratelimit_rls.rules.grammar import Findings
from ratelimit_rls.rules.node import YamlList, YamlMap, YamlNode, YamlScalar, is_null
from ratelimit_rls.rules.written import Written, WrittenFields

_new_of = attrgetter(*grammar.NEW_LIMIT_KEYS)
_NOTHING_NEW = (None,) * len(grammar.NEW_LIMIT_KEYS)


# The documents are not frozen: of large rules there are hundreds of thousands, and that would triple what one costs.


@dataclass(slots=True)
class RateLimitDocument:
    position: Position
    unit: Written[str] | None = None
    requests_per_unit: Written[int] | None = None
    unlimited: Written[bool] | None = None
    name: Written[str] | None = None
    replaces: tuple[Written[str], ...] = ()
    algorithm: Written[str] | None = None
    burst: Written[int] | None = None
    unit_multiplier: Written[int] | None = None
    calendar: Written[bool] | None = None
    timezone: Written[str] | None = None
    # A value here could not be read, which was reported: what its absence would mean must not be reported too.
    is_broken: bool = False

    @property
    def uses_new_key(self) -> bool:
        return _new_of(self) != _NOTHING_NEW


@dataclass(slots=True)
class MatchDocument:
    position: Position
    cidr: Written[str] | None = None
    prefix: Written[str] | None = None
    regex: Written[str] | None = None
    is_broken: bool = False

    @property
    def ways(self) -> list[tuple[str, Written[str]]]:
        """Those that were written; one is right."""
        ways = (("cidr", self.cidr), ("prefix", self.prefix), ("regex", self.regex))
        return [(way, written) for way, written in ways if written is not None]


@dataclass(slots=True)
class DescriptorDocument:
    position: Position
    key: Written[str] | None = None
    value: Written[str] | None = None
    match: MatchDocument | None = None
    rate_limit: RateLimitDocument | None = None
    limits: Written[tuple[RateLimitDocument, ...]] | None = None
    limits_of: Written[str] | None = None
    descriptors: tuple[DescriptorDocument | LikeDocument, ...] = ()
    charge: Written[str] | None = None
    action: Written[str] | None = None
    max_delay: Written[str] | None = None
    warn_at: Written[YamlNode] | None = None
    penalty: Written[YamlNode] | None = None
    hot: Written[YamlNode] | None = None
    on_store_failure: Written[str] | None = None
    answer: Written[YamlNode] | None = None
    deny: Written[YamlNode] | None = None
    enabled: Written[bool] | None = None
    shadow_mode: Written[bool] | None = None
    quota_mode: Written[bool] | None = None
    detailed_metric: Written[bool] | None = None
    value_to_metric: Written[bool] | None = None
    share_threshold: Written[bool] | None = None
    metadata: Written[dict[str, Any]] | None = None
    is_broken: bool = False

    @property
    def rate_limits(self) -> tuple[RateLimitDocument, ...]:
        """What was written as `rate_limit` or as `limits`."""
        if self.limits is not None:
            return self.limits.value
        return (self.rate_limit,) if self.rate_limit is not None else ()


class LikeDocument(NamedTuple):
    """A descriptor that says of another value, and at another place, what `like` says. There is nothing below it."""

    like: DescriptorDocument
    alike: Alike
    found: Findings

    @property
    def position(self) -> Position:
        return Position(self.found.file, self.alike.line, self.alike.shape.column)

    def exact(self) -> DescriptorDocument:
        """With its own places."""
        return _read_alone(self.alike.shape.map(self.alike.line, self.alike.value), self.found)


@dataclass(slots=True)
class Document:
    position: Position
    domain: Written[str] | None = None
    descriptors: tuple[DescriptorDocument | LikeDocument, ...] = ()
    charge: Written[str] | None = None
    on_store_failure: Written[str] | None = None
    shard_by: Written[str] | None = None
    answer: Written[YamlNode] | None = None
    deny: Written[YamlNode] | None = None
    ext_authz: Written[YamlNode] | None = None
    identity: Written[YamlNode] | None = None
    is_broken: bool = False


def read_document(root: YamlNode | None, found: Findings) -> Document:
    """The file's values; whatever cannot be read is reported to `found` and left out."""
    if root is None or is_null(root):
        return Document(Position(found.file, found.first_line, 1))
    if not isinstance(root, YamlMap):
        fields = WrittenFields((), found)
        fields.refuse(root, "map[interface {}]interface {}", "a rules file is a mapping that starts with 'domain:'")
        return Document(found.position(root), is_broken=True)
    grammar.check(root, "file", found)
    fields = WrittenFields(root.fields(), found)
    return Document(
        position=found.position(root),
        domain=fields.text("domain"),
        descriptors=_read_descriptors(fields, "descriptors"),
        charge=fields.text("charge"),
        on_store_failure=fields.text("on_store_failure"),
        shard_by=fields.text("shard_by"),
        answer=fields.node("answer"),
        deny=fields.node("deny"),
        ext_authz=fields.node("ext_authz"),
        identity=fields.node("identity"),
        is_broken=fields.is_broken,
    )


def exact(document: DescriptorDocument | LikeDocument) -> DescriptorDocument:
    return document.exact() if isinstance(document, LikeDocument) else document


def _read_descriptor(node: YamlMap, found: Findings) -> DescriptorDocument | LikeDocument:
    alike = node.pairs
    if not isinstance(alike, Alike):
        return _read_alone(node, found)
    like = alike.shape.made_of_it.get(DescriptorDocument)
    if like is not None:
        return LikeDocument(like, alike, found)
    told = found.told
    document = _read_alone(node, found)
    if found.told == told and not document.descriptors:
        alike.shape.made_of_it[DescriptorDocument] = document
    return document


def _read_alone(node: YamlMap, found: Findings) -> DescriptorDocument:
    fields = WrittenFields(node.fields(), found)
    written = fields.read(_OF_DESCRIPTOR)
    return DescriptorDocument(found.position(node), **written, is_broken=fields.is_broken)


def _read_rate_limit(outer: WrittenFields, key: str) -> RateLimitDocument | None:
    node = outer.joined(key, "config.YamlRateLimit", "it is a mapping with 'unit' and 'requests_per_unit'")
    return None if node is None else _read_limit(node, outer.found)


def _read_limits(outer: WrittenFields, key: str) -> Written[tuple[RateLimitDocument, ...]] | None:
    at = outer.node(key)
    if at is None:
        return None
    return Written(outer.maps(key, "[]config.YamlRateLimit", _read_limit), at.file, at.line, at.column)


def _read_match(outer: WrittenFields, key: str) -> MatchDocument | None:
    node = outer.joined(key, "match", "it is a mapping with one of 'cidr', 'prefix' and 'regex'")
    if node is None:
        return None
    found = outer.found
    fields = WrittenFields(node.fields(), found)
    return MatchDocument(
        position=found.position(node),
        cidr=fields.text("cidr"),
        prefix=fields.text("prefix"),
        regex=fields.text("regex"),
        is_broken=fields.is_broken or any(map(grammar.is_unknown, (key for key, _ in node.fields()))),
    )


def _read_limit(node: YamlMap, found: Findings) -> RateLimitDocument:
    fields = WrittenFields(node.fields(), found)
    written = fields.read(_OF_LIMIT)
    return RateLimitDocument(found.position(node), **written, is_broken=fields.is_broken)


def _read_descriptors(outer: WrittenFields, key: str) -> tuple[DescriptorDocument | LikeDocument, ...]:
    return outer.maps(key, "[]config.YamlDescriptor", _read_descriptor)


def _read_replaces(outer: WrittenFields, key: str) -> tuple[Written[str], ...]:
    return outer.maps(key, "[]config.yamlReplaces", _read_replaced)


def _read_replaced(node: YamlMap, found: Findings) -> Written[str]:
    return WrittenFields(node.fields(), found).text("name") or Written("", found.file, node.line, node.column)


def _read_metadata(outer: WrittenFields, key: str) -> Written[dict[str, Any]] | None:
    node = outer.joined(key, "map[string]interface {}", "it is a mapping")
    if node is None:
        return None
    try:
        plain = _plain_map(node)
    except _NotPlain as error:
        outer.found.error(error.node, offences.bad_metadata(str(error)))
        return None
    return Written(plain, outer.found.file, node.line, node.column) if plain else None


class _NotPlain(Exception):
    def __init__(self, node: YamlNode, why: str) -> None:
        super().__init__(why)
        self.node = node


def _plain(node: YamlNode) -> Any:
    """The node as JSON would say it: what google.protobuf.Struct can carry."""
    if isinstance(node, YamlMap):
        return _plain_map(node)
    if isinstance(node, YamlList):
        return [_plain(item) for item in node.items]
    if isinstance(node.value, float) and not math.isfinite(node.value):
        raise _NotPlain(node, f"{node.text} is no number in JSON")
    return node.value


def _plain_map(node: YamlMap) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in node.fields():
        if not isinstance(key, YamlScalar):
            raise _NotPlain(key, "a key is a mapping or a list")
        plain[key.text] = _plain(value)
    return plain


_OF_DESCRIPTOR: Mapping[str, Callable[[WrittenFields, str], object]] = {
    "key": WrittenFields.text,
    "value": WrittenFields.text,
    "match": _read_match,
    "rate_limit": _read_rate_limit,
    "limits": _read_limits,
    "limits_of": WrittenFields.text,
    "descriptors": _read_descriptors,
    "charge": WrittenFields.text,
    "action": WrittenFields.text,
    "max_delay": WrittenFields.text,
    "warn_at": WrittenFields.node,
    "penalty": WrittenFields.node,
    "hot": WrittenFields.node,
    "on_store_failure": WrittenFields.text,
    "answer": WrittenFields.node,
    "deny": WrittenFields.node,
    "enabled": WrittenFields.truth,
    "shadow_mode": WrittenFields.truth,
    "quota_mode": WrittenFields.truth,
    "detailed_metric": WrittenFields.truth,
    "value_to_metric": WrittenFields.truth,
    "share_threshold": WrittenFields.truth,
    "metadata": _read_metadata,
}
_OF_LIMIT: Mapping[str, Callable[[WrittenFields, str], object]] = {
    "unit": WrittenFields.text,
    "requests_per_unit": WrittenFields.count,
    "unlimited": WrittenFields.truth,
    "name": WrittenFields.text,
    "replaces": _read_replaces,
    "algorithm": WrittenFields.text,
    "burst": WrittenFields.count,
    "unit_multiplier": WrittenFields.count,
    "calendar": WrittenFields.truth,
    "timezone": WrittenFields.text,
}
