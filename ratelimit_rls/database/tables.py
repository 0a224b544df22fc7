"""Tables of tiers, users, keys, rules, tokens, audit entries and the change feed.

Rows are converted in row_mapping.py; the history of the schema is in migrations/. A column is NULL where the value is
"" or None: no tier, no end. Index names are unique in a database, so the tier columns of two tables cannot both have
`idx_tier`.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
)

from ratelimit_rls.database.column_types import Json, Name, Serial, Timestamp

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)

tiers = Table(
    "tiers",
    metadata,
    Column("name", Name, primary_key=True),
    Column("description", Text, nullable=False),
    Column("limits", Json, nullable=False),
    Column("version", Integer, nullable=False),
    Column("created_at", Timestamp, nullable=False),
    Column("updated_at", Timestamp, nullable=False),
)

user_quotas = Table(
    "user_quotas",
    metadata,
    Column("user_id", Name, primary_key=True),
    Column("tier", Name, ForeignKey("tiers.name")),
    Column("org", Name),
    Column("custom_limits", Json),
    Column("override", Json),  # limits and reason
    Column("override_until", Timestamp),
    Column("is_blocked", Boolean, nullable=False),
    Column("block_reason", Text),
    Column("blocked_until", Timestamp),
    Column("total_requests_today", BigInteger, nullable=False),  # on the day (UTC) of last_request_at
    Column("total_requests_month", BigInteger, nullable=False),  # in its month
    Column("last_request_at", Timestamp),
    Column("quota_reset_at", Timestamp),  # when total_requests_today restarts
    Column("quota_exceeded_count", BigInteger, nullable=False),
    Column("version", Integer, nullable=False),
    Column("created_at", Timestamp, nullable=False),
    Column("updated_at", Timestamp, nullable=False),
    Index("idx_tier", "tier"),
    Index("idx_blocked", "is_blocked"),
    Index("idx_last_request", "last_request_at"),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("key_id", Name, primary_key=True),
    Column("api_key_hash", LargeBinary, nullable=False, unique=True),
    Column("user_id", Name, ForeignKey("user_quotas.user_id"), nullable=False),
    Column("key_name", Name),
    Column("tier", Name, ForeignKey("tiers.name")),
    Column("limits", Json),
    Column("total_requests", BigInteger, nullable=False),
    Column("last_used_at", Timestamp),
    Column("is_active", Boolean, nullable=False),
    Column("expires_at", Timestamp),
    Column("revoked_at", Timestamp),
    Column("revoked_by", Name),
    Column("version", Integer, nullable=False),
    Column("created_at", Timestamp, nullable=False),
    Column("updated_at", Timestamp, nullable=False),
    Index("idx_user_id", "user_id"),
    Index("idx_api_keys_tier", "tier"),
    Index("idx_active", "is_active"),
    Index("idx_expires", "expires_at"),
)

rate_limit_rules = Table(
    "rate_limit_rules",
    metadata,
    Column("rule_id", String(36), primary_key=True),
    Column("rule_name", Name, nullable=False, unique=True),
    Column("priority", Integer, nullable=False),
    Column("enabled", Boolean, nullable=False),
    Column("domain", Text, nullable=False),  # from the document, to find the rules of a domain
    Column("document", Text, nullable=False),
    Column("user_tiers", Json, nullable=False),
    Column("endpoint_patterns", Json, nullable=False),
    Column("http_methods", Json, nullable=False),
    Column("ip_ranges", Json, nullable=False),
    Column("scope", String(20)),
    Column("created_by", Name, nullable=False),
    Column("version", Integer, nullable=False),
    Column("created_at", Timestamp, nullable=False),
    Column("updated_at", Timestamp, nullable=False),
    Index("idx_priority", "priority", "rule_name"),
    Index("idx_enabled", "enabled"),
    Index("idx_domain", "domain"),
)

admin_tokens = Table(
    "admin_tokens",
    metadata,
    Column("token_id", Name, primary_key=True),
    Column("token_hash", LargeBinary, nullable=False, unique=True),
    Column("name", Name, nullable=False),
    Column("role", String(20), nullable=False),
    Column("expires_at", Timestamp),
    Column("revoked_at", Timestamp),
    Column("revoked_by", Name),
    Column("last_used_at", Timestamp),
    Column("created_at", Timestamp, nullable=False),
    CheckConstraint("role IN ('read', 'write', 'admin')", name="role"),
)

admin_audit_log = Table(
    "admin_audit_log",
    metadata,
    Column("audit_id", Serial, primary_key=True),
    Column("at", Timestamp, nullable=False),
    Column("actor", Name, nullable=False),
    Column("actor_token", Name, nullable=False),
    Column("address", Name, nullable=False),
    Column("action", String(20), nullable=False),
    Column("kind", String(20), nullable=False),
    Column("subject", Name, nullable=False),
    Column("before", Json),
    Column("after", Json),
    Column("request_id", Name, nullable=False),
    Index("idx_admin_audit_at", "at"),
    Index("idx_admin_audit_subject", "kind", "subject", "audit_id"),
    Index("idx_admin_audit_actor", "actor", "audit_id"),
    sqlite_autoincrement=True,  # a number is never reused
)

changes = Table(
    "changes",
    metadata,
    Column("sequence", Serial, primary_key=True),  # in commit order (Database.serialise)
    Column("at", Timestamp, nullable=False),
    Column("kind", String(20), nullable=False),
    Column("subject", Name, nullable=False),
    sqlite_autoincrement=True,
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("token_id", Name),
    Column("key", Name),
    Column("request_digest", String(128), nullable=False),
    Column("status", Integer, nullable=False),
    Column("headers", Json, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("created_at", Timestamp, nullable=False),
    PrimaryKeyConstraint("token_id", "key"),
    Index("idx_idempotency_created", "created_at"),
)
