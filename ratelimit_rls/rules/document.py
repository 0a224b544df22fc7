"""A rules file as typed values, each with its place: what was written, before it is asked what it means."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ratelimit_rls.core.model import MAX_REQUESTS_PER_UNIT, Position
from ratelimit_rls.rules import grammar, offences
from ratelimit_rls.rules.grammar import Findings
from ratelimit_rls.rules.node import YamlList, YamlMap, YamlNode, YamlScalar, is_null, tag
from ratelimit_rls.rules.scalars import Kind

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Written(Generic[T]):
    value: T
    position: Position


@dataclass(frozen=True, slots=True)
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
        return any(getattr(self, key) is not None for key in grammar.NEW_LIMIT_KEYS)


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class DescriptorDocument:
    position: Position
    key: Written[str] | None = None
    value: Written[str] | None = None
    match: MatchDocument | None = None
    rate_limit: RateLimitDocument | None = None
    limits: Written[tuple[RateLimitDocument, ...]] | None = None
    limits_of: Written[str] | None = None
    descriptors: tuple[DescriptorDocument, ...] = ()
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


@dataclass(frozen=True, slots=True)
class Document:
    position: Position
    domain: Written[str] | None = None
    descriptors: tuple[DescriptorDocument, ...] = ()
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
        fields = _Fields((), found)
        fields.refuse(root, "map[interface {}]interface {}", "a rules file is a mapping that starts with 'domain:'")
        return Document(found.position(root), is_broken=True)
    grammar.check(root, "file", found)
    fields = _Fields(root.fields(), found)
    return Document(
        position=found.position(root),
        domain=fields.text("domain"),
        descriptors=fields.maps("descriptors", "[]config.YamlDescriptor", _read_descriptor),
        charge=fields.text("charge"),
        on_store_failure=fields.text("on_store_failure"),
        shard_by=fields.text("shard_by"),
        answer=fields.node("answer"),
        deny=fields.node("deny"),
        ext_authz=fields.node("ext_authz"),
        identity=fields.node("identity"),
        is_broken=fields.is_broken,
    )


def _read_descriptor(node: YamlMap, found: Findings) -> DescriptorDocument:
    fields = _Fields(node.fields(), found)
    return DescriptorDocument(
        position=found.position(node),
        key=fields.text("key"),
        value=fields.text("value"),
        match=_read_match(fields, found),
        rate_limit=_read_rate_limit(fields, found),
        limits=_read_limits(fields, found),
        limits_of=fields.text("limits_of"),
        descriptors=fields.maps("descriptors", "[]config.YamlDescriptor", _read_descriptor),
        charge=fields.text("charge"),
        action=fields.text("action"),
        max_delay=fields.text("max_delay"),
        warn_at=fields.node("warn_at"),
        penalty=fields.node("penalty"),
        hot=fields.node("hot"),
        on_store_failure=fields.text("on_store_failure"),
        answer=fields.node("answer"),
        deny=fields.node("deny"),
        enabled=fields.truth("enabled"),
        shadow_mode=fields.truth("shadow_mode"),
        quota_mode=fields.truth("quota_mode"),
        detailed_metric=fields.truth("detailed_metric"),
        value_to_metric=fields.truth("value_to_metric"),
        share_threshold=fields.truth("share_threshold"),
        metadata=_read_metadata(fields, found),
        is_broken=fields.is_broken,
    )


def _read_rate_limit(outer: _Fields, found: Findings) -> RateLimitDocument | None:
    node = outer.joined("rate_limit", "config.YamlRateLimit", "it is a mapping with 'unit' and 'requests_per_unit'")
    return None if node is None else _read_limit(node, found)


def _read_limits(outer: _Fields, found: Findings) -> Written[tuple[RateLimitDocument, ...]] | None:
    at = outer.position("limits")
    return None if at is None else Written(outer.maps("limits", "[]config.YamlRateLimit", _read_limit), at)


def _read_match(outer: _Fields, found: Findings) -> MatchDocument | None:
    node = outer.joined("match", "match", "it is a mapping with one of 'cidr', 'prefix' and 'regex'")
    if node is None:
        return None
    fields = _Fields(node.fields(), found)
    return MatchDocument(
        position=found.position(node),
        cidr=fields.text("cidr"),
        prefix=fields.text("prefix"),
        regex=fields.text("regex"),
        is_broken=fields.is_broken or any(map(grammar.is_unknown, (key for key, _ in node.fields()))),
    )


def _read_limit(node: YamlMap, found: Findings) -> RateLimitDocument:
    fields = _Fields(node.fields(), found)
    return RateLimitDocument(
        position=found.position(node),
        unit=fields.text("unit"),
        requests_per_unit=fields.count("requests_per_unit"),
        unlimited=fields.truth("unlimited"),
        name=fields.text("name"),
        replaces=fields.maps("replaces", "[]config.yamlReplaces", _read_replaced),
        algorithm=fields.text("algorithm"),
        burst=fields.count("burst"),
        unit_multiplier=fields.count("unit_multiplier"),
        calendar=fields.truth("calendar"),
        timezone=fields.text("timezone"),
        is_broken=fields.is_broken,
    )


def _read_replaced(node: YamlMap, found: Findings) -> Written[str]:
    return _Fields(node.fields(), found).text("name") or Written("", found.position(node))


def _read_metadata(outer: _Fields, found: Findings) -> Written[dict[str, Any]] | None:
    node = outer.joined("metadata", "map[string]interface {}", "it is a mapping")
    if node is None:
        return None
    try:
        plain = _plain_map(node)
    except _NotPlain as error:
        found.error(error.node, offences.bad_metadata(str(error)))
        return None
    return Written(plain, found.position(node)) if plain else None


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


class _Fields:
    """The values of one mapping by key, read as what they should be. Null is the same as absent."""

    def __init__(self, fields: Iterable[tuple[YamlNode, YamlNode]], found: Findings) -> None:
        self._found = found
        self._values: dict[str, list[YamlNode]] = {}
        self.is_broken = False
        for key, value in fields:
            if isinstance(key, YamlScalar) and key.kind is Kind.STRING:
                self._values.setdefault(key.text, []).append(value)

    def text(self, key: str) -> Written[str] | None:
        node = self._last(key)
        if node is None:
            return None
        if isinstance(node, YamlScalar):
            if grammar.is_unusable(node):
                self.is_broken = True  # reported by the grammar
                return None
            return Written(node.text, self._found.position(node))
        self.refuse(node, "string", offences.TEXT)
        return None

    def truth(self, key: str) -> Written[bool] | None:
        node = self._last(key)
        if node is None:
            return None
        if isinstance(node, YamlScalar) and isinstance(node.value, bool):
            return Written(node.value, self._found.position(node))
        self.refuse(node, "bool", offences.TRUTH)
        return None

    def count(self, key: str) -> Written[int] | None:
        node = self._last(key)
        if node is None:
            return None
        if isinstance(node, YamlScalar) and node.kind is Kind.INT:
            assert isinstance(node.value, int)
            if 0 <= node.value <= MAX_REQUESTS_PER_UNIT:
                return Written(node.value, self._found.position(node))
        self.refuse(node, "uint32", offences.COUNT)
        return None

    def node(self, key: str) -> Written[YamlNode] | None:
        """As it stands there, for whoever reads it: taken whole, never laid over one that was merged."""
        node = self._last(key)
        return None if node is None else Written(node, self._found.position(node))

    def position(self, key: str) -> Position | None:
        """Where the value of `key` stands, if it has one."""
        node = self._last(key)
        return None if node is None else self._found.position(node)

    def maps(self, key: str, go_type: str, read: Callable[[YamlMap, Findings], T]) -> tuple[T, ...]:
        node = self._last(key)
        if node is None:
            return ()
        if not isinstance(node, YamlList):
            self.refuse(node, go_type, "it is a list of mappings")
            return ()
        return tuple(read(item, self._found) for item in node.items if isinstance(item, YamlMap))

    def joined(self, key: str, go_type: str, wanted: str) -> YamlMap | None:
        """The mapping under `key`, laid over those written for it before (the reference's dialect).

        So `<<: *base` followed by `rate_limit: {requests_per_unit: 5}` keeps the base's unit.
        """
        pairs: list[tuple[YamlNode, YamlNode]] = []
        last: YamlMap | None = None
        for node in self._values.get(key, ()):
            if is_null(node):
                pairs, last = [], None
            elif isinstance(node, YamlMap):
                pairs.extend(node.pairs)
                last = node
            else:
                self.refuse(node, go_type, wanted, is_last=node is self._values[key][-1])
        return last and YamlMap(last.line, last.column, tuple(pairs))

    def refuse(self, node: YamlNode, go_type: str, wanted: str, is_last: bool = True) -> None:
        self.is_broken = True
        # The grammar may have reported it already, except where it does not look: metadata, the file itself, and what
        # is written again later.
        if is_last and grammar.is_refused(node) and not go_type.startswith("map["):
            return
        text = node.text if isinstance(node, YamlScalar) else None
        self._found.error(node, offences.wrong_type(node.line, tag(node), text, go_type, wanted))

    def _last(self, key: str) -> YamlNode | None:
        values = self._values.get(key)
        return None if not values or is_null(values[-1]) else values[-1]
