"""Records of decisions as they are stored: the caller according to the descriptors, the rule, and the limit's usage.

Texts come from clients: they are cut to the lengths of the database columns, and have no credentials.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from ratelimit_rls.core.model import Code, Decision, DescriptorPlan, Entry, Status, Step, construct
from ratelimit_rls.telemetry.rule_labels import rule_label
from ratelimit_rls.telemetry.usage_counts import DecisionOutcome

_FIELDS = {
    "user": "user",
    "user_id": "user",
    "api_key": "api_key",
    "ip": "ip",
    "remote_address": "ip",
    "client_ip": "ip",
    "path": "endpoint",
    "endpoint": "endpoint",
    "method": "method",
}
"""Descriptor entries that identify the caller and the endpoint."""

RECORDED_KEYS = frozenset(_FIELDS)
"""Keys of the entries that a RecordedCaller is made from."""

_MAX_LENGTHS = {"user": 255, "ip": 64, "endpoint": 500, "method": 16}
"""Maximum lengths in characters, as of the database columns."""

_MAX_DOMAIN_LENGTH = 255
_MAX_RULE_LENGTH = 500
_MAX_REASON_LENGTH = 255

_KEY_ID = re.compile(r"(?:rlk_)?([a-z2-7]{12})(?:_[A-Za-z0-9_-]{43})?")


class RecordedCaller(NamedTuple):
    """The caller according to the descriptors; missing fields are empty. Safe to store: no credentials, bounded."""

    domain: str
    user: str = ""
    api_key: str = ""  # its public id
    ip: str = ""
    endpoint: str = ""  # a path without its query
    method: str = ""


class DecisionRecord(NamedTuple):
    """A decision to be stored."""

    at_s: float
    log_id: int  # unique together with the time: a record written twice is stored once
    caller: RecordedCaller
    rule: str
    outcome: DecisionOutcome
    current: int | None = None  # usage of the limit, including this call if it was charged
    limit: int | None = None
    status: int | None = None  # HTTP status of a denied client, if the protocol lets us choose it
    retry_after_s: int | None = None
    latency_us: int | None = None
    reason: str = ""  # of a denial that no limit caused


def recorded_caller(entries: Iterable[Entry], domain: str) -> RecordedCaller:
    """Return the caller of a request of this domain with these entries, or with those of RECORDED_KEYS alone."""
    found: dict[str, str] = {}
    for key, value in entries:
        field = _FIELDS.get(key)
        if field is not None and value:
            found.setdefault(field, value)
    texts = found.get
    endpoint = texts("endpoint", "")
    if "?" in endpoint or "#" in endpoint:
        endpoint = endpoint.partition("?")[0].partition("#")[0]
    # `construct`, since most requests are new where paths and users vary.
    return construct(
        RecordedCaller,
        (
            _storable(domain, _MAX_DOMAIN_LENGTH),
            _storable(texts("user", ""), _MAX_LENGTHS["user"]),
            _key_id(texts("api_key")),
            _storable(texts("ip", ""), _MAX_LENGTHS["ip"]),
            _storable(endpoint, _MAX_LENGTHS["endpoint"]),
            _storable(texts("method", ""), _MAX_LENGTHS["method"]),
        ),
    )


def denying_status(decision: Decision) -> Status:
    """Return the status that denied. A quota alone does not deny while another passes, so limits come first."""
    if len(decision.statuses) == 1:
        return decision.statuses[0]
    over = [status for status in decision.statuses if status.code is Code.OVER_LIMIT]
    return next((status for status in over if status.step is not None and not status.step.quota_mode), over[0])


def rule_name(descriptor_plan: DescriptorPlan | None) -> str:
    """Return the label of the rule of a descriptor; "" without a rule."""
    return (
        _storable(rule_label(descriptor_plan.rule), _MAX_RULE_LENGTH)
        if descriptor_plan is not None and descriptor_plan.rule is not None
        else ""
    )


def early_denial_record(now_s: float, log_id: int, caller: RecordedCaller, reason: str, status: int) -> DecisionRecord:
    """Return the record of a call that was denied before any limit was checked."""
    reason = _storable(reason, _MAX_REASON_LENGTH)
    return DecisionRecord(now_s, log_id, caller, "", DecisionOutcome.BLOCKED, status=status, reason=reason)


def denial_record(
    now_s: float, log_id: int, caller: RecordedCaller, rule: str, decision: Decision, status: Status, latency_us: int
) -> DecisionRecord:
    """Return the record of a denial. `status` is the one that determined the decision."""
    rejection = decision.template.rejection
    if rejection is not None:
        reason = rejection.reason
        return DecisionRecord(
            now_s, log_id, caller, rule, DecisionOutcome.BLOCKED, None, None, rejection.status, None, latency_us, reason
        )
    deny = status.descriptor_plan.rule.deny if status.descriptor_plan.rule is not None else None
    http = 429 if deny is None else deny.status
    current, limit = _used(status)
    return DecisionRecord(
        now_s, log_id, caller, rule, DecisionOutcome.THROTTLED, current, limit, http, status.reset_s, latency_us
    )


def used_of_first_limit(decision: Decision) -> tuple[int | None, int | None]:
    """Return usage and capacity of the first limit of a decision; None without one."""
    limited = next((status for status in decision.statuses if status.step is not None), None)
    return _used(limited) if limited is not None else (None, None)


def capacity_of(step: Step) -> int:
    """Return the maximum usage of a limit."""
    return step.limit.burst or step.limit.requests_per_unit


def _used(status: Status) -> tuple[int | None, int | None]:
    """Return usage and capacity; usage is None for a cooldown, or if the store did not answer."""
    if status.step is None:
        return None, None
    capacity = capacity_of(status.step)
    return (None if status.reading is None or status.cooldown is not None else capacity - status.reading.left), capacity


def _storable(text: str, max_length: int) -> str:
    """Return text that every database can store: PostgreSQL rejects NUL, and UTF-8 half a surrogate pair."""
    text = text[:max_length]
    return text if text.isprintable() else text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def _key_id(text: str | None) -> str:
    """Return the id of an API key of this service; other values of such an entry may be secrets."""
    found = _KEY_ID.fullmatch(text) if text else None
    return found[1] if found else ""
