"""What a rule is called in metrics, traces and logs: never by what a client sent."""

from __future__ import annotations

from ratelimit_rls.core.model import Rule

OVERRIDE = "_override"
"""In place of the rule, of limits that came with the request: their path has its values in it."""


def told_as(rule: Rule | None) -> str:
    """A rule that stands nowhere was made for a limit in the request."""
    return rule.path if rule is not None and rule.position is not None else OVERRIDE
