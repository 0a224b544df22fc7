"""Text formatting of rules, limits and durations, shared by all verbs.

Text from files and requests is printed on one line: characters that could move the cursor or break the line are
escaped.
"""

from __future__ import annotations

from ratelimit_rls.core.duration import format_duration_us
from ratelimit_rls.core.model import Limit, Penalty, Rule
from ratelimit_rls.core.response_policy import BodyFormat, DenyResponse, ResponsePolicy
from ratelimit_rls.core.storage_keys import Location, ShardBy, ShardByKey
from ratelimit_rls.core.tree import Node


def escape_unprintable(text: str) -> str:
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def format_limit(limit: Limit) -> str:
    """Format e.g.

    `20/minute gcra, burst 5`, `1000/5 minutes fixed_window` or `9/month fixed_window in Europe/Berlin`.
    """
    unit = limit.unit.name.lower()
    window = unit if limit.unit_multiplier == 1 else f"{limit.unit_multiplier} {unit}s"
    parts = f"{limit.requests_per_unit}/{window} {limit.algorithm.value}"
    if limit.timezone:
        parts += f" in {limit.timezone}"
    return f"{parts}, burst {limit.burst}" if limit.burst else parts


def format_rule(rule: Rule) -> str:
    """Format the limits, then every option that differs from its default."""
    parts = [" and ".join(map(format_limit, rule.limits)) or "unlimited"]
    if rule.limits:
        parts.append(f"charge {rule.charge.value}")
    if rule.max_delay_us:
        parts.append(f"throttle up to {format_duration_us(rule.max_delay_us)}")
    parts.extend(mode for mode in ("shadow_mode", "quota_mode", "detailed_metric") if getattr(rule, mode))
    if rule.penalty:
        parts.append(format_penalty(rule.penalty))
    if rule.warn_at:
        parts.append(f"warn at {rule.warn_at.permille / 10:g} %")
    if rule.hot:
        parts.append(f"leases of {format_duration_us(rule.hot.lease_us)}")
    if rule.on_store_failure:
        parts.append(f"on store failure {rule.on_store_failure.value}")
    parts.extend(f"name {limit.name}" for limit in rule.limits if limit.name)
    if rule.replaces:
        parts.append(f"replaces {' '.join(sorted(rule.replaces))}")
    return escape_unprintable(", ".join(parts))


def format_penalty(penalty: Penalty) -> str:
    """Format e.g. `penalty x1 x2 x4 after 3 within 1h`."""
    multipliers = " ".join(f"x{multiplier}" for multiplier in penalty.multipliers)
    return f"penalty {multipliers} after {penalty.after} within {format_duration_us(penalty.within_us)}"


def format_wait(us: int) -> str:
    """Format a remaining wait: in seconds from 10 s on, else in milliseconds.

    Rounds up, so that the time is never too early and a remaining wait is never 0.
    """
    each_us = 1_000_000 if us >= 10_000_000 else 1_000
    return format_duration_us(-(-us // each_us) * each_us)


def format_domain(root: Node) -> str:
    """Format the options of the whole domain that differ from their defaults."""
    parts = [format_response_policy(root.response_policy), format_deny(root.deny)]
    if root.on_store_failure:
        parts.append(f"on store failure {root.on_store_failure.value}")
    if root.shard_by is not ShardBy.DESCRIPTOR:
        parts.append(_format_shard_by(root))
    return ", ".join(filter(None, parts))


def _format_shard_by(root: Node) -> str:
    """Format e.g. `shard by domain` or `shard by key org`."""
    if isinstance(root.shard_by, ShardByKey):
        return f"shard by key {escape_unprintable(root.shard_by.key)}"
    return f"shard by {root.shard_by.value}"


def format_location(location: Location) -> str:
    """Format e.g. `slot 8106 on 10.0.0.7:6379`; without a slot, if the server is not part of a cluster."""
    slot = "" if location.slot is None else f"slot {location.slot}"
    return " on ".join(filter(None, (slot, location.node)))


def format_response_policy(response_policy: ResponsePolicy) -> str:
    """Format e.g. `headers ietf retry-after, jitter 5s`; empty if everything is default."""
    parts = []
    if response_policy.headers is not None:
        parts.append(f"headers {' '.join(family.value for family in response_policy.headers) or 'none'}")
    if response_policy.retry_jitter_us:
        parts.append(f"jitter {format_duration_us(response_policy.retry_jitter_us)}")
    return ", ".join(parts)


def format_deny(deny: DenyResponse | None) -> str:
    """Format e.g. `deny 429 problem+json` or `deny 503 text/html, 2 headers`; empty for the default response."""
    if deny is None:
        return ""
    parts = f"deny {deny.status}"
    if deny.format is not None:
        is_typed = deny.format is BodyFormat.TEXT and deny.content_type
        parts += f" {deny.content_type if is_typed else deny.format.value}"
    return f"{parts}, {format_count(len(deny.headers), 'header')}" if deny.headers else parts


def format_node(node: Node) -> str:
    return escape_unprintable(f"{node.key}={node.shared_value}" if node.shared_value else node.key)


def format_bytes(number: float) -> str:
    """Format e.g. `512 B`, `1.5 KiB` or `300 MiB`."""
    units = iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while number >= 1000 and unit != "TiB":
        number, unit = number / 1024, next(units)
    return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.1f} {unit}"


def format_count(number: int, noun: str) -> str:
    """Format e.g. `1 rule` or `20000 rules`."""
    return f"{number} {plural(number, noun)}"


def plural(number: int, noun: str) -> str:
    return noun if number == 1 else f"{noun}s"
