"""Create the tables of recorded decisions and usage. On PostgreSQL both are partitioned by month, on demand.

Until a month has its partition, its rows are in the default one. A month of usage is partitioned again, because minutes
are kept for a shorter time than hours and days.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_MOMENT = sa.DateTime(timezone=True)
_NAME = sa.String(255).with_variant(sa.String(255, collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "rate_limit_audit_logs",
        sa.Column("timestamp", _MOMENT, nullable=False),
        sa.Column("log_id", sa.BigInteger, nullable=False),
        sa.Column("domain", _NAME, nullable=False),
        sa.Column("user_id", _NAME),
        sa.Column("api_key_id", _NAME),
        sa.Column("ip_address", sa.String(64)),
        sa.Column("endpoint", sa.String(500)),
        sa.Column("http_method", sa.String(16)),
        sa.Column("rule_id", sa.Text),
        sa.Column("decision", sa.String(20), nullable=False),
        sa.Column("reason", _NAME),
        sa.Column("current_count", sa.BigInteger),
        sa.Column("limit_value", sa.BigInteger),
        sa.Column("response_status", sa.Integer),
        sa.Column("retry_after_seconds", sa.BigInteger),
        sa.Column("region", _NAME),
        sa.Column("server_id", _NAME, nullable=False),
        sa.Column("latency_us", sa.BigInteger),
        sa.PrimaryKeyConstraint("timestamp", "log_id", name="pk_rate_limit_audit_logs"),
        postgresql_partition_by="RANGE (timestamp)",
    )
    op.create_index("idx_audit_timestamp", "rate_limit_audit_logs", [sa.text("timestamp DESC")])
    op.create_index("idx_audit_user", "rate_limit_audit_logs", ["user_id", sa.text("timestamp DESC")])
    op.create_index("idx_audit_decision", "rate_limit_audit_logs", ["decision", sa.text("timestamp DESC")])
    op.create_table(
        "rate_limit_metrics",
        sa.Column("timestamp", _MOMENT, nullable=False),
        sa.Column("metric_id", sa.Uuid, nullable=False),
        sa.Column("granularity", sa.String(20), nullable=False),
        sa.Column("domain", _NAME, nullable=False),
        sa.Column("rule_id", sa.Text, nullable=False),
        sa.Column("user_id", _NAME, nullable=False),
        sa.Column("endpoint", sa.String(500), nullable=False),
        sa.Column("region", _NAME, nullable=False),
        sa.Column("server_id", _NAME, nullable=False),
        sa.Column("total_requests", sa.BigInteger, nullable=False),
        sa.Column("allowed_requests", sa.BigInteger, nullable=False),
        sa.Column("throttled_requests", sa.BigInteger, nullable=False),
        sa.Column("blocked_requests", sa.BigInteger, nullable=False),
        sa.Column("latency_p50_us", sa.BigInteger),
        sa.Column("latency_p95_us", sa.BigInteger),
        sa.Column("latency_p99_us", sa.BigInteger),
        sa.Column("histogram", sa.Text, nullable=False),
        sa.Column("cache_hits", sa.BigInteger, nullable=False),
        sa.Column("cache_misses", sa.BigInteger, nullable=False),
        sa.Column("created_at", _MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("timestamp", "metric_id", "granularity", name="pk_rate_limit_metrics"),
        postgresql_partition_by="RANGE (timestamp)",
    )
    op.create_index("idx_metrics_timestamp", "rate_limit_metrics", [sa.text("timestamp DESC"), "granularity"])
    op.create_index("idx_metrics_user", "rate_limit_metrics", ["user_id", sa.text("timestamp DESC")])
    op.create_table(
        "rate_limit_rollups_due",
        sa.Column("granularity", sa.String(20), nullable=False),
        sa.Column("timestamp", _MOMENT, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("granularity", "timestamp", name="pk_rate_limit_rollups_due"),
    )
    op.create_table(
        "rate_limit_archives",
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("month", sa.String(7), nullable=False),
        sa.Column("part", sa.Integer, nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("row_count", sa.BigInteger, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("last_rowid", sa.BigInteger, nullable=False),
        sa.Column("is_dropped", sa.Integer, nullable=False),
        sa.Column("archived_at", _MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("kind", "month", "part", name="pk_rate_limit_archives"),
    )
    if op.get_context().dialect.name == "postgresql":
        for table in ("rate_limit_audit_logs", "rate_limit_metrics"):
            op.execute(f"CREATE TABLE {table}_default PARTITION OF {table} DEFAULT")
