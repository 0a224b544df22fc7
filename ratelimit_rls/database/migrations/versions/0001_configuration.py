"""Create tiers, users, keys, rules and tokens, the audit log of their changes, and the change feed.

Column types are spelled out, so that this file is independent of later changes to database/tables.py.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_JSON = sa.JSON().with_variant(JSONB(), "postgresql")
_MOMENT = sa.DateTime(timezone=True)
_NAME = sa.String(255).with_variant(sa.String(255, collation="C"), "postgresql")
_SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "tiers",
        sa.Column("name", _NAME),
        sa.Column("description", sa.Text, nullable=False),
        sa.Column("limits", _JSON, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("created_at", _MOMENT, nullable=False),
        sa.Column("updated_at", _MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_tiers"),
    )
    op.create_table(
        "user_quotas",
        sa.Column("user_id", _NAME),
        sa.Column("tier", _NAME),
        sa.Column("org", _NAME),
        sa.Column("custom_limits", _JSON),
        sa.Column("override", _JSON),
        sa.Column("override_until", _MOMENT),
        sa.Column("is_blocked", sa.Boolean, nullable=False),
        sa.Column("block_reason", sa.Text),
        sa.Column("blocked_until", _MOMENT),
        sa.Column("total_requests_today", sa.BigInteger, nullable=False),
        sa.Column("total_requests_month", sa.BigInteger, nullable=False),
        sa.Column("last_request_at", _MOMENT),
        sa.Column("quota_reset_at", _MOMENT),
        sa.Column("quota_exceeded_count", sa.BigInteger, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("created_at", _MOMENT, nullable=False),
        sa.Column("updated_at", _MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("user_id", name="pk_user_quotas"),
        sa.ForeignKeyConstraint(["tier"], ["tiers.name"], name="fk_user_quotas_tier"),
    )
    op.create_index("idx_tier", "user_quotas", ["tier"])
    op.create_index("idx_blocked", "user_quotas", ["is_blocked"])
    op.create_index("idx_last_request", "user_quotas", ["last_request_at"])
    op.create_table(
        "api_keys",
        sa.Column("key_id", _NAME),
        sa.Column("api_key_hash", sa.LargeBinary, nullable=False),
        sa.Column("user_id", _NAME, nullable=False),
        sa.Column("key_name", _NAME),
        sa.Column("tier", _NAME),
        sa.Column("limits", _JSON),
        sa.Column("total_requests", sa.BigInteger, nullable=False),
        sa.Column("last_used_at", _MOMENT),
        sa.Column("is_active", sa.Boolean, nullable=False),
        sa.Column("expires_at", _MOMENT),
        sa.Column("revoked_at", _MOMENT),
        sa.Column("revoked_by", _NAME),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("created_at", _MOMENT, nullable=False),
        sa.Column("updated_at", _MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("key_id", name="pk_api_keys"),
        sa.UniqueConstraint("api_key_hash", name="uq_api_keys_api_key_hash"),
        sa.ForeignKeyConstraint(["user_id"], ["user_quotas.user_id"], name="fk_api_keys_user_id"),
        sa.ForeignKeyConstraint(["tier"], ["tiers.name"], name="fk_api_keys_tier"),
    )
    op.create_index("idx_user_id", "api_keys", ["user_id"])
    op.create_index("idx_api_keys_tier", "api_keys", ["tier"])
    op.create_index("idx_active", "api_keys", ["is_active"])
    op.create_index("idx_expires", "api_keys", ["expires_at"])
    op.create_table(
        "rate_limit_rules",
        sa.Column("rule_id", sa.String(36)),
        sa.Column("rule_name", _NAME, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("enabled", sa.Boolean, nullable=False),
        sa.Column("domain", sa.Text, nullable=False),
        sa.Column("document", sa.Text, nullable=False),
        sa.Column("user_tiers", _JSON, nullable=False),
        sa.Column("endpoint_patterns", _JSON, nullable=False),
        sa.Column("http_methods", _JSON, nullable=False),
        sa.Column("ip_ranges", _JSON, nullable=False),
        sa.Column("scope", sa.String(20)),
        sa.Column("created_by", _NAME, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("created_at", _MOMENT, nullable=False),
        sa.Column("updated_at", _MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("rule_id", name="pk_rate_limit_rules"),
        sa.UniqueConstraint("rule_name", name="uq_rate_limit_rules_rule_name"),
    )
    op.create_index("idx_priority", "rate_limit_rules", ["priority", "rule_name"])
    op.create_index("idx_enabled", "rate_limit_rules", ["enabled"])
    op.create_index("idx_domain", "rate_limit_rules", ["domain"])
    op.create_table(
        "admin_tokens",
        sa.Column("token_id", _NAME),
        sa.Column("token_hash", sa.LargeBinary, nullable=False),
        sa.Column("name", _NAME, nullable=False),
        sa.Column("role", sa.String(20), nullable=False),
        sa.Column("expires_at", _MOMENT),
        sa.Column("revoked_at", _MOMENT),
        sa.Column("revoked_by", _NAME),
        sa.Column("last_used_at", _MOMENT),
        sa.Column("created_at", _MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("token_id", name="pk_admin_tokens"),
        sa.UniqueConstraint("token_hash", name="uq_admin_tokens_token_hash"),
        sa.CheckConstraint("role IN ('read', 'write', 'admin')", name="ck_admin_tokens_role"),
    )
    op.create_table(
        "admin_audit_log",
        sa.Column("audit_id", _SERIAL, autoincrement=True),
        sa.Column("at", _MOMENT, nullable=False),
        sa.Column("actor", _NAME, nullable=False),
        sa.Column("actor_token", _NAME, nullable=False),
        sa.Column("address", _NAME, nullable=False),
        sa.Column("action", sa.String(20), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("subject", _NAME, nullable=False),
        sa.Column("before", _JSON),
        sa.Column("after", _JSON),
        sa.Column("request_id", _NAME, nullable=False),
        sa.PrimaryKeyConstraint("audit_id", name="pk_admin_audit_log"),
        sqlite_autoincrement=True,
    )
    op.create_index("idx_admin_audit_at", "admin_audit_log", ["at"])
    op.create_index("idx_admin_audit_subject", "admin_audit_log", ["kind", "subject", "audit_id"])
    op.create_index("idx_admin_audit_actor", "admin_audit_log", ["actor", "audit_id"])
    op.create_table(
        "changes",
        sa.Column("sequence", _SERIAL, autoincrement=True),
        sa.Column("at", _MOMENT, nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("subject", _NAME, nullable=False),
        sa.PrimaryKeyConstraint("sequence", name="pk_changes"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("token_id", _NAME),
        sa.Column("key", _NAME),
        sa.Column("request_digest", sa.String(128), nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("headers", _JSON, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("created_at", _MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("token_id", "key", name="pk_idempotency_keys"),
    )
    op.create_index("idx_idempotency_created", "idempotency_keys", ["created_at"])
