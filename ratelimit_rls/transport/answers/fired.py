"""Which rule an answer speaks of, as dynamic metadata: for access logs, and for filters further on."""

from __future__ import annotations

from typing import Any

from ratelimit_rls.core.model import Code, Decision, Penalty, Status
from ratelimit_rls.transport.answers.subject import blamed, retry_after_s, subject
from ratelimit_rls.transport.answers.words import rule_path, window

KEY = "rule"
"""Where it stands among the fields that the reference writes: domain, descriptors, hitsAddend, metadata."""

RETRY_AFTER = "retry_after"


def fired(decision: Decision) -> dict[str, Any]:
    """Of a refusal, the rule that refused; where no limit applied, the first that exempts; nothing if none was met."""
    refusals = blamed(decision)
    status = subject(decision, refusals)
    if status is None:
        exempting = next((one.slot.rule for one in decision.statuses if one.slot.unlimited and one.slot.rule), None)
        return {KEY: {"path": exempting.path, "unlimited": True}} if exempting is not None else {}
    words = known_before(decision.outline.domain, status)
    if decision.code is Code.OVER_LIMIT:
        words[RETRY_AFTER] = retry_after_s(refusals)
    if any(isinstance(watcher, Penalty) for watcher in status.slot.watchers):
        words["violations"] = status.violations
    if status.state is not None:
        words["state"] = status.state.name.lower()
    return {KEY: words}


def known_before(domain: str, status: Status) -> dict[str, Any]:
    """The part that does not depend on the moment: all of it but `retry_after`, unless the descriptor is watched."""
    words: dict[str, Any] = {}
    if status.slot.rule is not None:
        words["path"] = rule_path(domain, status.slot.rule)
    if status.step is not None:
        words["window"] = window(status.step.limit)
        if status.step.limit.name:
            words["limit"] = status.step.limit.name
    return words
