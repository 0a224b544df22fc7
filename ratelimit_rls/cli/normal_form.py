"""Rules written back: other text with the same meaning, in one form, so that two of them can be compared.

What is as by default is left out. `ext_authz` and `identity` are repeated as they were written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ratelimit_rls.core.attributes import Caller, Client, Fixed, MappedEntry
from ratelimit_rls.core.keys import ShardBy
from ratelimit_rls.core.model import Algorithm, Charge, Hot, Limit, OnStoreFailure, Penalty, Rule
from ratelimit_rls.core.span import format_span
from ratelimit_rls.core.style import PLAIN, AnswerStyle, Deny
from ratelimit_rls.core.tree import Node
from ratelimit_rls.rules.grammar import NEW_LIMIT_KEYS
from ratelimit_rls.rules.node import YamlList, YamlNode, YamlScalar, is_null

if TYPE_CHECKING:
    from ratelimit_rls.rules.compile import Compiled

_NOT_TEXT = ("trusted_proxies", "use_remote_address", "ipv6_prefix", "hits", "blocked_status", "hide_credentials")
"""Of a mapping: elsewhere a scalar is the text that was written, be it 007 or yes."""


def documents(compiled: Compiled, *, with_places: bool) -> list[dict[str, Any]]:
    """One for each domain."""
    form = _Form(compiled, with_places=with_places)
    return [form.domain(root) for root in compiled.tree.domains.values()]


def in_file_order(node: Node, sources: Mapping[str, int]) -> list[Node]:
    """The children, by the numbers of their sources and their places. Wildcards are among the others: each is found by
    its own text, too."""
    return sorted(node.children(), key=lambda child: _place(child, sources))


def numbered(compiled: Compiled) -> Mapping[str, int]:
    """The sources, in the order they were taken."""
    return {name: number for number, name in enumerate(compiled.sources)}


def _place(node: Node, sources: Mapping[str, int]) -> tuple[int, int, int]:
    at = node.position
    return (sources[at.file], at.line, at.column) if at else (0, 0, 0)


class _Form:
    """Writes domains of one set of rules."""

    def __init__(self, compiled: Compiled, *, with_places: bool) -> None:
        self._compiled = compiled
        self._sources = numbered(compiled)
        self._with_places = with_places

    def domain(self, root: Node) -> dict[str, Any]:
        shown: dict[str, Any] = {"domain": root.key}
        if root.shard_by is not ShardBy.DESCRIPTOR:
            shown["shard_by"] = root.shard_by.value
        if root.on_store_failure is not None:
            shown["on_store_failure"] = root.on_store_failure.value
        if root.style != PLAIN:
            shown["answer"] = style_form(root.style)
        if root.deny is not None:
            shown["deny"] = deny_form(root.deny)
        for key, written in (("ext_authz", self._compiled.ext_authz), ("identity", self._compiled.identity)):
            if root.key in written:
                shown[key] = _as_written(written[root.key])
        mapping = self._compiled.tree.mappings.get(root.key)
        if mapping is not None and mapping.descriptors:
            as_written = shown.setdefault("ext_authz", {"descriptors": []})
            made = mapping.descriptors[len(as_written["descriptors"]) :]
            as_written["descriptors"] += [{"entries": [_entry(entry) for entry in one.entries]} for one in made]
        descriptors = self._below(root, root, root.on_store_failure)
        return {**shown, "descriptors": descriptors} if descriptors else shown

    def _below(self, node: Node, root: Node, above: OnStoreFailure | None) -> list[dict[str, Any]]:
        """`above` is the `on_store_failure` that what is written above hands down."""
        return [self._descriptor(child, root, above) for child in in_file_order(node, self._sources)]

    def _descriptor(self, node: Node, root: Node, above: OnStoreFailure | None) -> dict[str, Any]:
        shown: dict[str, Any] = {"key": node.key}
        if node.value:
            shown["value"] = node.value
        if node.pattern:
            shown["match"] = {node.pattern.way.name.lower(): node.pattern.text}
        if self._with_places:
            place = node.rule.position if node.rule else node.position
            shown["position"] = str(place) if place else None
            if node.overrode:
                shown["overrode"] = [str(place) for place in node.overrode]
        if node.rule is not None:
            if self._with_places:
                shown["path"] = node.rule.path
            shown.update(_rule(node.rule, root))
            if node.rule.on_store_failure not in (None, above):
                above = node.rule.on_store_failure
                shown["on_store_failure"] = above.value
        shown.update({name: True for name in ("share_threshold", "value_to_metric") if getattr(node, name)})
        descriptors = self._below(node, root, above)
        return {**shown, "descriptors": descriptors} if descriptors else shown


def _entry(entry: MappedEntry) -> dict[str, str]:
    """Of a descriptor that nobody wrote, because stored rules have it made."""
    match entry.source:
        case Caller(field):
            return {"key": entry.key, "from": field}
        case Fixed(text):
            return {"key": entry.key, "value": text}
        case Client():
            return {"key": entry.key, "from": "client_ip"}
        case source:
            return {"key": entry.key, "from": type(source).__name__.lower()}  # Path and Method


def _rule(rule: Rule, root: Node) -> dict[str, Any]:
    replaces = [{"name": name} for name in sorted(rule.replaces)]
    written = [_limit(limit) for limit in rule.limits]
    if not written and rule.limits_of is None:
        written = [{"unlimited": True}]
    if replaces:
        written[0]["replaces"] = replaces
    shown: dict[str, Any] = {}
    if written:
        shown = {"rate_limit": written[0]} if len(written) == 1 else {"limits": written}
    if rule.limits_of is not None:
        shown["limits_of"] = rule.limits_of.value
    # Rules in the reference's grammar alone are charged always; every other says what it is charged.
    is_ours = rule.penalty is not None or rule.limits_of is not None or len(written) > 1
    is_ours = is_ours or any(limit.keys() & NEW_LIMIT_KEYS for limit in written)
    if (rule.limits or rule.limits_of) and (rule.charge is Charge.ADMITTED or is_ours):
        shown["charge"] = rule.charge.value
    if rule.max_delay_us:
        shown.update(action="throttle", max_delay=format_span(rule.max_delay_us))
    shown.update({mode: True for mode in ("shadow_mode", "quota_mode", "detailed_metric") if getattr(rule, mode)})
    if rule.warn_at:
        shown["warn_at"] = rule.warn_at.permille / 1000
    if rule.penalty:
        shown["penalty"] = penalty_form(rule.penalty)
    if rule.hot:
        shown["hot"] = hot_form(rule.hot)
    if rule.style != root.style:
        shown["answer"] = style_form(rule.style)
    if rule.deny is not None and rule.deny != root.deny:
        shown["deny"] = deny_form(rule.deny)
    if rule.metadata:
        shown["metadata"] = dict(rule.metadata)
    return shown


def _limit(limit: Limit) -> dict[str, Any]:
    written: dict[str, Any] = {"unit": limit.unit.name.lower(), "requests_per_unit": limit.requests_per_unit}
    if limit.unit_multiplier != 1:
        written["unit_multiplier"] = limit.unit_multiplier
    if limit.timezone:
        written.update(calendar=True, timezone=limit.timezone)
    if limit.algorithm is not Algorithm.FIXED_WINDOW:
        written["algorithm"] = limit.algorithm.value
    if limit.burst:
        written["burst"] = limit.burst
    if limit.name:
        written["name"] = limit.name
    return written


def penalty_form(penalty: Penalty) -> dict[str, Any]:
    return {
        "within": format_span(penalty.within_us),
        "after": penalty.after,
        "multipliers": list(penalty.multipliers),
    }


def hot_form(hot: Hot) -> dict[str, Any]:
    return {"lease": format_span(hot.lease_us)}


def style_form(style: AnswerStyle) -> dict[str, Any]:
    written: dict[str, Any] = {}
    if style.headers is not None:
        written["headers"] = [family.value for family in style.headers]
    if style.retry_jitter_us:
        written["retry_jitter"] = format_span(style.retry_jitter_us)
    return written


def deny_form(deny: Deny) -> dict[str, Any]:
    written: dict[str, Any] = {}
    if deny.body is not None:
        written["body"] = deny.body.text
    elif deny.format is not None:
        written["format"] = deny.format.value
    if deny.content_type:
        written["content_type"] = deny.content_type
    if deny.headers:
        written["headers"] = {name: template.text for name, template in deny.headers}
    if deny.status != Deny().status:
        written["status"] = deny.status
    return written


def _as_written(node: YamlNode, key: str = "") -> Any:
    if isinstance(node, YamlScalar):
        return node.value if key in _NOT_TEXT else node.text
    if isinstance(node, YamlList):
        return [_as_written(item) for item in node.items]
    return {
        name.text: _as_written(value, name.text)
        for name, value in node.fields()
        if isinstance(name, YamlScalar) and not is_null(value)
    }
