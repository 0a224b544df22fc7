"""Rules and limits in words, the same words in every verb."""

from __future__ import annotations

from ratelimit_rls.core.model import Limit, Rule
from ratelimit_rls.core.tree import Node


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
    words.extend(mode for mode in ("shadow_mode", "quota_mode", "detailed_metric") if getattr(rule, mode))
    words.extend(f"name {limit.name}" for limit in rule.limits if limit.name)
    if rule.replaces:
        words.append(f"replaces {' '.join(sorted(rule.replaces))}")
    return ", ".join(words)


def node_words(node: Node) -> str:
    return f"{node.key}={node.shared_value}" if node.shared_value else node.key


def counted(number: int, noun: str) -> str:
    """e.g. `1 rule`, `2 rules`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
