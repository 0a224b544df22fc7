"""The rule that a response reports, as dynamic metadata for access logs and later filters."""

from __future__ import annotations

from typing import Any

from ratelimit_rls.api.responses.formatting import rule_path, window
from ratelimit_rls.api.responses.status_selection import denying_statuses, reported_status, retry_after_s
from ratelimit_rls.core.model import Code, Decision, Penalty, Status

KEY = "rule"
"""Key of the rule next to the fields of envoyproxy/ratelimit: domain, descriptors, hitsAddend, metadata."""

RETRY_AFTER = "retry_after"


def describe_rule(decision: Decision) -> dict[str, Any]:
    """Return the rule that denied the call, or the one with the least remaining.

    If no limit applied, return the first exempting rule; empty if no rule matched.
    """
    denying = denying_statuses(decision)
    status = reported_status(decision, denying)
    if status is None:
        exempting = next(
            (
                one.descriptor_plan.rule
                for one in decision.statuses
                if one.descriptor_plan.unlimited and one.descriptor_plan.rule
            ),
            None,
        )
        return {KEY: {"path": exempting.path, "unlimited": True}} if exempting is not None else {}
    fields = static_rule_fields(decision.template.domain, status)
    if decision.code is Code.OVER_LIMIT:
        fields[RETRY_AFTER] = retry_after_s(denying)
    if any(isinstance(watcher, Penalty) for watcher in status.descriptor_plan.watchers):
        fields["violations"] = status.violations
    if status.state is not None:
        fields["state"] = status.state.name.lower()
    return {KEY: fields}


def static_rule_fields(domain: str, status: Status) -> dict[str, Any]:
    """Return the fields that do not depend on time: all but `retry_after`, unless the descriptor is watched."""
    fields: dict[str, Any] = {}
    if status.descriptor_plan.rule is not None:
        fields["path"] = rule_path(domain, status.descriptor_plan.rule)
    if status.step is not None:
        fields["window"] = window(status.step.limit)
        if status.step.limit.name:
            fields["limit"] = status.step.limit.name
    return fields
