"""Conversion of rows to values and back, and to the images in audit entries, which have no digests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Row, Text, cast

from ratelimit_rls.core.entitlements import Block
from ratelimit_rls.core.model import Limit
from ratelimit_rls.database.administration import AdminToken, AuditRow, Role
from ratelimit_rls.database.tables import admin_audit_log, admin_tokens, api_keys, rate_limit_rules, tiers, user_quotas
from ratelimit_rls.identity.accounts import ApiKey, Override, Tier, User, limit_fields, limit_from_fields
from ratelimit_rls.rules.stored_rule import CounterScope, StoredRule, Targeting

Fields = dict[str, Any]
AnyRow = Row[*tuple[Any, ...]]

# Limits are read as text: equal texts are parsed once (LimitCache), and the result is shared.
TIER_COLUMNS = (tiers.c.name, cast(tiers.c.limits, Text), tiers.c.description, tiers.c.version)
USER_COLUMNS = (
    user_quotas.c.user_id,
    user_quotas.c.tier,
    cast(user_quotas.c.custom_limits, Text),
    user_quotas.c.org,
    user_quotas.c.version,
    cast(user_quotas.c.override, Text),
    user_quotas.c.override_until,
    user_quotas.c.is_blocked,
    user_quotas.c.block_reason,
    user_quotas.c.blocked_until,
)
KEY_COLUMNS = (
    api_keys.c.key_id,
    api_keys.c.api_key_hash,
    api_keys.c.user_id,
    api_keys.c.key_name,
    api_keys.c.tier,
    cast(api_keys.c.limits, Text),
    api_keys.c.expires_at,
    api_keys.c.revoked_at,
    api_keys.c.version,
)
RULE_COLUMNS = (
    rate_limit_rules.c.rule_id,
    rate_limit_rules.c.rule_name,
    rate_limit_rules.c.document,
    rate_limit_rules.c.priority,
    rate_limit_rules.c.enabled,
    rate_limit_rules.c.user_tiers,
    rate_limit_rules.c.endpoint_patterns,
    rate_limit_rules.c.http_methods,
    rate_limit_rules.c.ip_ranges,
    rate_limit_rules.c.scope,
    rate_limit_rules.c.version,
    rate_limit_rules.c.created_by,
    rate_limit_rules.c.created_at,
    rate_limit_rules.c.updated_at,
)
TOKEN_COLUMNS = (
    admin_tokens.c.token_id,
    admin_tokens.c.token_hash,
    admin_tokens.c.name,
    admin_tokens.c.role,
    admin_tokens.c.expires_at,
    admin_tokens.c.revoked_at,
    admin_tokens.c.last_used_at,
    admin_tokens.c.created_at,
)
AUDIT_COLUMNS = (
    admin_audit_log.c.audit_id,
    admin_audit_log.c.at,
    admin_audit_log.c.actor,
    admin_audit_log.c.actor_token,
    admin_audit_log.c.address,
    admin_audit_log.c.action,
    admin_audit_log.c.kind,
    admin_audit_log.c.subject,
    admin_audit_log.c.before,
    admin_audit_log.c.after,
    admin_audit_log.c.request_id,
)


class LimitCache:
    """Parsed limits by their stored text, for the duration of one transaction."""

    def __init__(self) -> None:
        self._limits: dict[str, tuple[Limit, ...]] = {}

    def read(self, text: str | None) -> tuple[Limit, ...]:
        """Parse stored limits. Raises ValueError if this service did not write them."""
        if text is None:
            return ()
        made = self._limits.get(text)
        if made is None:
            made = self._limits[text] = read_limits(json.loads(text))
        return made


def read_limits(written: object) -> tuple[Limit, ...]:
    if not isinstance(written, list):
        raise ValueError("limits must be a list")
    return tuple(limit_from_fields(fields) for fields in written)


def write_limits(limits: Iterable[Limit]) -> list[Fields]:
    return [limit_fields(limit) for limit in limits]


def tier_from_row(row: AnyRow, limits: LimitCache) -> Tier:
    name, text, description, version = row
    return Tier(name, limits.read(text), description, version)


def user_from_row(row: AnyRow, limits: LimitCache) -> User:
    user_id, tier, custom, org, version, override, until, is_blocked, reason, blocked_until = row
    return User(
        user_id,
        tier or "",
        limits.read(custom),
        _parse_override(override, until) if override is not None else None,
        Block(reason or "", blocked_until) if is_blocked else None,
        org or "",
        version,
    )


def _parse_override(text: str, until_s: float | None) -> Override:
    written = json.loads(text)
    if until_s is None or not isinstance(written, dict):
        raise ValueError("an override must have an end, limits and a reason")
    return Override(read_limits(written.get("limits")), until_s, str(written.get("reason", "")))


def key_from_row(row: AnyRow, limits: LimitCache) -> ApiKey:
    key_id, digest, user_id, name, tier, text, expires, revoked, version = row
    return ApiKey(key_id, bytes(digest), user_id, name or "", tier or "", limits.read(text), expires, revoked, version)


def rule_from_row(row: AnyRow) -> StoredRule:
    """Convert a row. Raises ValueError for values that the database accepts but this service does not write."""
    rule_id, name, document, priority, enabled, tiers_, endpoints, methods, cidrs, scope, *rest = row
    if not isinstance(priority, int) or not isinstance(document, str):
        raise ValueError("a rule must have a number as priority and text as document")
    texts = _strings(tiers_), _strings(endpoints), _strings(methods), _strings(cidrs)
    targeting = Targeting(*texts, CounterScope(scope) if scope else None)
    return StoredRule(rule_id, name, document, priority, enabled, targeting, *rest)


def _strings(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError("targeting must be a list of texts")
    return tuple(value)


def token_from_row(row: AnyRow) -> AdminToken:
    token_id, digest, name, role, *timestamps = row
    return AdminToken(token_id, bytes(digest), name, Role(role), *timestamps)


def audit_from_row(row: AnyRow) -> AuditRow:
    return AuditRow(*row)


def tier_row(tier: Tier) -> Fields:
    return {"name": tier.name, "description": tier.description, "limits": write_limits(tier.limits)}


def user_row(user: User) -> Fields:
    """Return the columns that put_user replaces."""
    limits = write_limits(user.limits) or None
    return {"user_id": user.user_id, "tier": user.tier or None, "org": user.org or None, "custom_limits": limits}


ZERO_USAGE: Fields = {"total_requests_today": 0, "total_requests_month": 0, "quota_exceeded_count": 0}
"""Counters of a new user."""


def override_row(override: Override | None) -> Fields:
    if override is None:
        return {"override": None, "override_until": None}
    written = {"limits": write_limits(override.limits), "reason": override.reason}
    return {"override": written, "override_until": override.until_s}


def block_row(block: Block | None) -> Fields:
    if block is None:
        return {"is_blocked": False, "block_reason": None, "blocked_until": None}
    return {"is_blocked": True, "block_reason": block.reason, "blocked_until": block.until_s}


def key_row(key: ApiKey) -> Fields:
    """Return the columns that put_key replaces."""
    return {
        "key_name": key.name or None,
        "tier": key.tier or None,
        "limits": write_limits(key.limits) or None,
        "expires_at": key.expires_s,
    }


def rule_row(rule: StoredRule) -> Fields:
    """Return the columns that put_rule replaces, without the domain, which is in the document."""
    return {
        "rule_name": rule.name,
        "priority": rule.priority,
        "enabled": rule.enabled,
        "document": rule.document,
        "user_tiers": list(rule.targeting.tiers),
        "endpoint_patterns": list(rule.targeting.endpoints),
        "http_methods": list(rule.targeting.methods),
        "ip_ranges": list(rule.targeting.cidrs),
        "scope": rule.targeting.scope.value if rule.targeting.scope else None,
    }


def tier_image(tier: Tier) -> Fields:
    """Return the image of a tier in an audit entry. The functions below do the same for other values."""
    return {**tier_row(tier), "version": tier.version}


def user_image(user: User) -> Fields:
    image = {**user_row(user), "version": user.version}
    if user.override:
        image["override"] = {
            "limits": write_limits(user.override.limits),
            "reason": user.override.reason,
            "until_s": user.override.until_s,
        }
    if user.block:
        image["block"] = {"reason": user.block.reason, "until_s": user.block.until_s}
    return image


def key_image(key: ApiKey) -> Fields:
    about = {"key_id": key.key_id, "user_id": key.user_id, **key_row(key)}
    return {**about, "revoked_at": key.revoked_s, "version": key.version}


def rule_image(rule: StoredRule) -> Fields:
    return {"rule_id": rule.rule_id, **rule_row(rule), "created_by": rule.created_by, "version": rule.version}


def token_image(token: AdminToken) -> Fields:
    about = {"token_id": token.token_id, "name": token.name, "role": token.role.value}
    return {**about, "expires_at": token.expires_s, "revoked_at": token.revoked_s}


def chunks(ids: Iterable[str], size: int = 500) -> Iterable[Sequence[str]]:
    """Split ids for `IN (…)`: databases limit the number of values in one statement."""
    listed = list(ids)
    for start in range(0, len(listed), size):
        yield listed[start : start + size]
