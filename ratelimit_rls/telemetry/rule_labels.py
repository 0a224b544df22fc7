"""Labels of rules in metrics, traces and logs. They contain no client data."""

from __future__ import annotations

from ratelimit_rls.core.model import Rule

OVERRIDE = "_override"
"""Label for limits that came with the request: their path contains its values."""


def rule_label(rule: Rule | None) -> str:
    """Return the label of a rule. A rule without a position was made for a limit in the request."""
    return rule.path if rule is not None and rule.position is not None else OVERRIDE
