"""Tables of recorded decisions and usage, of pending rollups and of archives. PostgreSQL partitions by month (UTC).

The key of a decision is its timestamp and log_id. The key of a usage row is its timestamp and metric_id, a digest of
its dimensions. So rows that are written twice are stored once. It is a digest because the dimensions can be longer than
a PostgreSQL index allows.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    Column,
    Index,
    Integer,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    Uuid,
    text,
)

from ratelimit_rls.database.column_types import Name, Timestamp
from ratelimit_rls.database.tables import metadata

MINUTE, HOUR, DAY = "minute", "hour", "day"
SECONDS = {MINUTE: 60, HOUR: 3600, DAY: 86_400}

audit_logs = Table(
    "rate_limit_audit_logs",
    metadata,
    Column("timestamp", Timestamp, nullable=False),
    Column("log_id", BigInteger, nullable=False),
    Column("domain", Name, nullable=False),
    Column("user_id", Name),
    Column("api_key_id", Name),
    Column("ip_address", String(64)),
    Column("endpoint", String(500)),
    Column("http_method", String(16)),
    Column("rule_id", Text),  # path of the rule
    Column("decision", String(20), nullable=False),
    Column("reason", Name),  # of a denial that no limit decided
    Column("current_count", BigInteger),
    Column("limit_value", BigInteger),
    Column("response_status", Integer),
    Column("retry_after_seconds", BigInteger),
    Column("region", Name),
    Column("server_id", Name, nullable=False),
    Column("latency_us", BigInteger),
    PrimaryKeyConstraint("timestamp", "log_id"),
    Index("idx_audit_timestamp", text("timestamp DESC")),
    Index("idx_audit_user", "user_id", text("timestamp DESC")),
    Index("idx_audit_decision", "decision", text("timestamp DESC")),
)

metrics = Table(
    "rate_limit_metrics",
    metadata,
    Column("timestamp", Timestamp, nullable=False),
    Column("metric_id", Uuid, nullable=False),
    Column("granularity", String(20), nullable=False),
    Column("domain", Name, nullable=False),
    Column("rule_id", Text, nullable=False),
    Column("user_id", Name, nullable=False),
    Column("endpoint", String(500), nullable=False),
    Column("region", Name, nullable=False),
    Column("server_id", Name, nullable=False),  # "": sum over all servers
    Column("total_requests", BigInteger, nullable=False),
    Column("allowed_requests", BigInteger, nullable=False),
    Column("throttled_requests", BigInteger, nullable=False),
    Column("blocked_requests", BigInteger, nullable=False),
    Column("latency_p50_us", BigInteger),
    Column("latency_p95_us", BigInteger),
    Column("latency_p99_us", BigInteger),
    Column("histogram", Text, nullable=False),  # telemetry/histogram.py
    Column("cache_hits", BigInteger, nullable=False),
    Column("cache_misses", BigInteger, nullable=False),
    Column("created_at", Timestamp, nullable=False),
    PrimaryKeyConstraint("timestamp", "metric_id", "granularity"),
    Index("idx_metrics_timestamp", text("timestamp DESC"), "granularity"),
    Index("idx_metrics_user", "user_id", text("timestamp DESC")),
)

rollups_due = Table(
    "rate_limit_rollups_due",
    metadata,
    Column("granularity", String(20), nullable=False),
    Column("timestamp", Timestamp, nullable=False),
    Column("version", BigInteger, nullable=False),  # incremented with each write of a part
    PrimaryKeyConstraint("granularity", "timestamp"),
)

archives = Table(
    "rate_limit_archives",
    metadata,
    Column("kind", String(20), nullable=False),
    Column("month", String(7), nullable=False),  # 2024-01
    Column("part", Integer, nullable=False),  # 2 and more: rows that came after the first archive
    Column("path", Text, nullable=False),
    Column("row_count", BigInteger, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("last_rowid", BigInteger, nullable=False),  # SQLite: last row in the archive
    Column("is_dropped", Integer, nullable=False),  # 1: all of its rows are deleted from the database
    Column("archived_at", Timestamp, nullable=False),
    PrimaryKeyConstraint("kind", "month", "part"),
)


class Cell(NamedTuple):
    """The dimensions of usage."""

    domain: str
    rule_id: str
    user_id: str
    endpoint: str
    region: str


def metric_id(granularity: str, at_s: float, cell: Cell, server_id: str = "") -> UUID:
    identity = repr((granularity, int(at_s), *cell, server_id)).encode()
    return UUID(bytes=hashlib.blake2b(identity, digest_size=16).digest())


class Month(NamedTuple):
    """A calendar month (UTC)."""

    year: int
    number: int

    @classmethod
    def of(cls, at_s: float) -> Month:
        at = datetime.fromtimestamp(at_s, UTC)
        return cls(at.year, at.month)

    def later(self, months: int = 1) -> Month:
        years, number = divmod(self.number - 1 + months, 12)
        return Month(self.year + years, number + 1)

    @property
    def begins_s(self) -> float:
        return datetime(self.year, self.number, 1, tzinfo=UTC).timestamp()

    @property
    def ends_s(self) -> float:
        return self.later().begins_s

    def __str__(self) -> str:
        return f"{self.year:04}-{self.number:02}"
