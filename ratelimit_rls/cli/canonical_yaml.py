"""Compiled rules as canonical YAML: one form for each meaning, so that two sets of rules can be compared.

Default values are left out. `ext_authz` and `identity` are repeated as they were written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ratelimit_rls.core.attributes import CallerSource, ClientIpSource, FixedSource, MappedEntry
from ratelimit_rls.core.duration import format_duration_us
from ratelimit_rls.core.model import Algorithm, Charge, LeasePolicy, Limit, OnStoreFailure, Penalty, Rule
from ratelimit_rls.core.response_policy import DEFAULT_RESPONSE_POLICY, DenyResponse, ResponsePolicy
from ratelimit_rls.core.storage_keys import Location, ShardBy, ShardByKey, Sharding
from ratelimit_rls.core.tree import Node
from ratelimit_rls.rules.grammar import NEW_LIMIT_KEYS
from ratelimit_rls.yaml.nodes import YamlList, YamlNode, YamlScalar, is_null

if TYPE_CHECKING:
    from ratelimit_rls.rules.compile import CompiledRules

_NON_STRING_FIELDS = (
    "trusted_proxies",
    "use_remote_address",
    "ipv6_prefix",
    "hits",
    "blocked_status",
    "hide_credentials",
)
"""Fields of a mapping whose value is typed. Any other scalar keeps the text that was written, such as 007 or yes."""


def canonical_documents(compiled: CompiledRules, *, with_places: bool) -> list[dict[str, Any]]:
    """Return one document per domain."""
    form = _Canonicalizer(compiled, with_places=with_places)
    return [form.domain(root) for root in compiled.tree.domains.values()]


def in_file_order(node: Node, sources: Mapping[str, int]) -> list[Node]:
    """Return the children, sorted by source and position. Wildcards are included: `children` yields them, too."""
    return sorted(node.children(), key=lambda child: _position_key(child, sources))


def source_order(compiled: CompiledRules) -> Mapping[str, int]:
    """Return the position of every source in the order in which the sources were read."""
    return {name: number for number, name in enumerate(compiled.sources)}


def _position_key(node: Node, sources: Mapping[str, int]) -> tuple[int, int, int]:
    at = node.position
    return (sources[at.file], at.line, at.column) if at else (0, 0, 0)


class _Canonicalizer:
    """Converts the domains of one set of rules to plain values."""

    def __init__(self, compiled: CompiledRules, *, with_places: bool) -> None:
        self._compiled = compiled
        self._sources = source_order(compiled)
        self._with_places = with_places

    def domain(self, root: Node) -> dict[str, Any]:
        fields: dict[str, Any] = {"domain": root.key}
        if root.shard_by is not ShardBy.DESCRIPTOR:
            fields["shard_by"] = shard_by_fields(root.shard_by)
        if root.on_store_failure is not None:
            fields["on_store_failure"] = root.on_store_failure.value
        if root.response_policy != DEFAULT_RESPONSE_POLICY:
            fields["answer"] = response_policy_fields(root.response_policy)
        if root.deny is not None:
            fields["deny"] = deny_fields(root.deny)
        for key, values in (("ext_authz", self._compiled.ext_authz), ("identity", self._compiled.identity)):
            if root.key in values:
                fields[key] = _to_plain(values[root.key])
        mapping = self._compiled.tree.mappings.get(root.key)
        if mapping is not None and mapping.descriptors:
            as_written = fields.setdefault("ext_authz", {"descriptors": []})
            implicit = mapping.descriptors[len(as_written["descriptors"]) :]
            as_written["descriptors"] += [{"entries": [_entry(entry) for entry in one.entries]} for one in implicit]
        descriptors = self._children(root, root, root.on_store_failure)
        return {**fields, "descriptors": descriptors} if descriptors else fields

    def _children(self, node: Node, root: Node, above: OnStoreFailure | None) -> list[dict[str, Any]]:
        """Return the children of a node. `above` is the inherited `on_store_failure`."""
        return [self._descriptor(child, root, above) for child in in_file_order(node, self._sources)]

    def _descriptor(self, node: Node, root: Node, above: OnStoreFailure | None) -> dict[str, Any]:
        fields: dict[str, Any] = {"key": node.key}
        if node.value:
            fields["value"] = node.value
        if node.pattern:
            fields["match"] = {node.pattern.kind.name.lower(): node.pattern.text}
        if self._with_places:
            place = node.rule.position if node.rule else node.position
            fields["position"] = str(place) if place else None
            if node.overrode:
                fields["overrode"] = [str(place) for place in node.overrode]
        if node.rule is not None:
            if self._with_places:
                fields["path"] = node.rule.path
            fields.update(_rule(node.rule, root))
            if node.rule.on_store_failure not in (None, above):
                above = node.rule.on_store_failure
                fields["on_store_failure"] = above.value
        fields.update({name: True for name in ("share_threshold", "value_to_metric") if getattr(node, name)})
        descriptors = self._children(node, root, above)
        return {**fields, "descriptors": descriptors} if descriptors else fields


def _entry(entry: MappedEntry) -> dict[str, str]:
    """Return an entry of an implicit descriptor, which stored rules imply and no document contains."""
    match entry.source:
        case CallerSource(field):
            return {"key": entry.key, "from": field}
        case FixedSource(text):
            return {"key": entry.key, "value": text}
        case ClientIpSource():
            return {"key": entry.key, "from": "client_ip"}
        case source:
            return {"key": entry.key, "from": type(source).__name__.lower()}  # Path and Method


def _rule(rule: Rule, root: Node) -> dict[str, Any]:
    replaces = [{"name": name} for name in sorted(rule.replaces)]
    values = [_limit(limit) for limit in rule.limits]
    if not values and rule.limits_of is None:
        values = [{"unlimited": True}]
    if replaces:
        values[0]["replaces"] = replaces
    fields: dict[str, Any] = {}
    if values:
        fields = {"rate_limit": values[0]} if len(values) == 1 else {"limits": values}
    if rule.limits_of is not None:
        fields["limits_of"] = rule.limits_of.value
    # Rules in the grammar of envoyproxy/ratelimit always use `charge: always`; all others state their charge.
    is_extended = rule.penalty is not None or rule.limits_of is not None or len(values) > 1
    is_extended = is_extended or any(limit.keys() & NEW_LIMIT_KEYS for limit in values)
    if (rule.limits or rule.limits_of) and (rule.charge is Charge.ADMITTED or is_extended):
        fields["charge"] = rule.charge.value
    if rule.max_delay_us:
        fields.update(action="throttle", max_delay=format_duration_us(rule.max_delay_us))
    fields.update({mode: True for mode in ("shadow_mode", "quota_mode", "detailed_metric") if getattr(rule, mode)})
    if rule.warn_at:
        fields["warn_at"] = rule.warn_at.permille / 1000
    if rule.penalty:
        fields["penalty"] = penalty_fields(rule.penalty)
    if rule.hot:
        fields["hot"] = lease_fields(rule.hot)
    if rule.response_policy != root.response_policy:
        fields["answer"] = response_policy_fields(rule.response_policy)
    if rule.deny is not None and rule.deny != root.deny:
        fields["deny"] = deny_fields(rule.deny)
    if rule.metadata:
        fields["metadata"] = dict(rule.metadata)
    return fields


def _limit(limit: Limit) -> dict[str, Any]:
    values: dict[str, Any] = {"unit": limit.unit.name.lower(), "requests_per_unit": limit.requests_per_unit}
    if limit.unit_multiplier != 1:
        values["unit_multiplier"] = limit.unit_multiplier
    if limit.timezone:
        values.update(calendar=True, timezone=limit.timezone)
    if limit.algorithm is not Algorithm.FIXED_WINDOW:
        values["algorithm"] = limit.algorithm.value
    if limit.burst:
        values["burst"] = limit.burst
    if limit.name:
        values["name"] = limit.name
    return values


def shard_by_fields(shard_by: Sharding) -> str | dict[str, str]:
    return {"key": shard_by.key} if isinstance(shard_by, ShardByKey) else shard_by.value


def location_fields(location: Location) -> dict[str, Any]:
    return {"slot": location.slot, "node": location.node or None}


def penalty_fields(penalty: Penalty) -> dict[str, Any]:
    return {
        "within": format_duration_us(penalty.within_us),
        "after": penalty.after,
        "multipliers": list(penalty.multipliers),
    }


def lease_fields(hot: LeasePolicy) -> dict[str, Any]:
    return {"lease": format_duration_us(hot.lease_us)}


def response_policy_fields(response_policy: ResponsePolicy) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if response_policy.headers is not None:
        values["headers"] = [family.value for family in response_policy.headers]
    if response_policy.retry_jitter_us:
        values["retry_jitter"] = format_duration_us(response_policy.retry_jitter_us)
    return values


def deny_fields(deny: DenyResponse) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if deny.body is not None:
        values["body"] = deny.body.text
    elif deny.format is not None:
        values["format"] = deny.format.value
    if deny.content_type:
        values["content_type"] = deny.content_type
    if deny.headers:
        values["headers"] = {name: template.text for name, template in deny.headers}
    if deny.status != DenyResponse().status:
        values["status"] = deny.status
    return values


def _to_plain(node: YamlNode, key: str = "") -> Any:
    if isinstance(node, YamlScalar):
        return node.value if key in _NON_STRING_FIELDS else node.text
    if isinstance(node, YamlList):
        return [_to_plain(item) for item in node.items]
    return {
        name.text: _to_plain(value, name.text)
        for name, value in node.fields()
        if isinstance(name, YamlScalar) and not is_null(value)
    }
