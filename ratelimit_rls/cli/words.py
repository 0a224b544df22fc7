"""Rules and limits in words, the same words in every verb.

Whatever a file or a request says is printed on one line: what could move the cursor or break the line is escaped.
"""

from __future__ import annotations

from ratelimit_rls.core.keys import ShardBy
from ratelimit_rls.core.model import Limit, Penalty, Rule
from ratelimit_rls.core.span import format_span
from ratelimit_rls.core.style import AnswerStyle, BodyFormat, Deny
from ratelimit_rls.core.tree import Node


def printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def limit_words(limit: Limit) -> str:
    """e.g. `20/minute gcra, burst 5`, `1000/5 minutes fixed_window` or `9/month fixed_window in Europe/Berlin`."""
    unit = limit.unit.name.lower()
    window = unit if limit.unit_multiplier == 1 else f"{limit.unit_multiplier} {unit}s"
    words = f"{limit.requests_per_unit}/{window} {limit.algorithm.value}"
    if limit.timezone:
        words += f" in {limit.timezone}"
    return f"{words}, burst {limit.burst}" if limit.burst else words


def rule_words(rule: Rule) -> str:
    """The limits, then whatever is not as by default."""
    words = [" and ".join(map(limit_words, rule.limits)) or "unlimited"]
    if rule.limits:
        words.append(f"charge {rule.charge.value}")
    if rule.max_delay_us:
        words.append(f"throttle up to {format_span(rule.max_delay_us)}")
    words.extend(mode for mode in ("shadow_mode", "quota_mode", "detailed_metric") if getattr(rule, mode))
    if rule.penalty:
        words.append(penalty_words(rule.penalty))
    if rule.warn_at:
        words.append(f"warn at {rule.warn_at.permille / 10:g} %")
    if rule.hot:
        words.append(f"leases of {format_span(rule.hot.lease_us)}")
    if rule.on_store_failure:
        words.append(f"on store failure {rule.on_store_failure.value}")
    words.extend(f"name {limit.name}" for limit in rule.limits if limit.name)
    if rule.replaces:
        words.append(f"replaces {' '.join(sorted(rule.replaces))}")
    return printable(", ".join(words))


def penalty_words(penalty: Penalty) -> str:
    """e.g. `penalty x1 x2 x4 after 3 within 1h`."""
    multipliers = " ".join(f"x{multiplier}" for multiplier in penalty.multipliers)
    return f"penalty {multipliers} after {penalty.after} within {format_span(penalty.within_us)}"


def wait_words(us: int) -> str:
    """A span that goes by while it is read: from 10 s on in seconds, else in milliseconds. Rounded up, so that nothing
    is promised too early and what is left is never nothing."""
    each_us = 1_000_000 if us >= 10_000_000 else 1_000
    return format_span(-(-us // each_us) * each_us)


def domain_words(root: Node) -> str:
    """What is said of the whole domain, and not as by default."""
    words = [style_words(root.style), deny_words(root.deny)]
    if root.on_store_failure:
        words.append(f"on store failure {root.on_store_failure.value}")
    if root.shard_by is not ShardBy.DESCRIPTOR:
        words.append(f"shard by {root.shard_by.value}")
    return ", ".join(filter(None, words))


def style_words(style: AnswerStyle) -> str:
    """e.g. `headers ietf retry-after, jitter 5s`; nothing where all is as by default."""
    words = []
    if style.headers is not None:
        words.append(f"headers {' '.join(family.value for family in style.headers) or 'none'}")
    if style.retry_jitter_us:
        words.append(f"jitter {format_span(style.retry_jitter_us)}")
    return ", ".join(words)


def deny_words(deny: Deny | None) -> str:
    """e.g. `deny 429 problem+json` or `deny 503 text/html, 2 headers`; nothing where refusals say nothing more."""
    if deny is None:
        return ""
    words = f"deny {deny.status}"
    if deny.format is not None:
        is_typed = deny.format is BodyFormat.TEXT and deny.content_type
        words += f" {deny.content_type if is_typed else deny.format.value}"
    return f"{words}, {counted(len(deny.headers), 'header')}" if deny.headers else words


def node_words(node: Node) -> str:
    return printable(f"{node.key}={node.shared_value}" if node.shared_value else node.key)


def counted(number: int, noun: str) -> str:
    """e.g. `1 rule`, `20000 rules`."""
    return f"{number} {plural(number, noun)}"


def plural(number: int, noun: str) -> str:
    return noun if number == 1 else f"{noun}s"
