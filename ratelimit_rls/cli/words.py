"""Rules and limits in words, the same words in every verb."""

from __future__ import annotations

from ratelimit_rls.core.model import Limit, Rule
from ratelimit_rls.core.tree import Node


def limit_words(limit: Limit) -> str:
    """e.g. `20/minute gcra, burst 5`."""
    words = f"{limit.requests_per_unit}/{limit.unit.name.lower()} {limit.algorithm.value}"
    return f"{words}, burst {limit.burst}" if limit.burst else words


def rule_words(rule: Rule) -> str:
    """The limit, then whatever is not as by default."""
    words = ["unlimited" if rule.limit is None else limit_words(rule.limit)]
    if rule.limit is not None:
        words.append(f"charge {rule.charge.value}")
    words.extend(mode for mode in ("shadow_mode", "quota_mode", "detailed_metric") if getattr(rule, mode))
    if rule.name:
        words.append(f"name {rule.name}")
    if rule.replaces:
        words.append(f"replaces {' '.join(sorted(rule.replaces))}")
    return ", ".join(words)


def node_words(node: Node) -> str:
    return f"{node.key}={node.value}" if node.value else node.key


def counted(number: int, noun: str) -> str:
    """e.g. `1 rule`, `2 rules`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
