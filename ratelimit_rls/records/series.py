"""The two time series, decisions and usage, and what keeps their books; on PostgreSQL a partition for each month (UTC).

A decision is known by its moment and log_id, a cell of usage by its moment and metric_id, which is made of all that it
is counted apart by: whatever is written twice is stored once. A digest, since the columns themselves can be longer
than an index of PostgreSQL takes.
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

from ratelimit_rls.records.tables import metadata
from ratelimit_rls.records.types import Moment, Name

MINUTE, HOUR, DAY = "minute", "hour", "day"
SECONDS = {MINUTE: 60, HOUR: 3600, DAY: 86_400}

audit_logs = Table(
    "rate_limit_audit_logs",
    metadata,
    Column("timestamp", Moment, nullable=False),
    Column("log_id", BigInteger, nullable=False),
    Column("domain", Name, nullable=False),
    Column("user_id", Name),
    Column("api_key_id", Name),
    Column("ip_address", String(64)),
    Column("endpoint", String(500)),
    Column("http_method", String(16)),
    Column("rule_id", Text),  # its path
    Column("decision", String(20), nullable=False),
    Column("reason", Name),  # of a refusal that no limit decided
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
    Column("timestamp", Moment, nullable=False),
    Column("metric_id", Uuid, nullable=False),
    Column("granularity", String(20), nullable=False),
    Column("domain", Name, nullable=False),
    Column("rule_id", Text, nullable=False),
    Column("user_id", Name, nullable=False),
    Column("endpoint", String(500), nullable=False),
    Column("region", Name, nullable=False),
    Column("server_id", Name, nullable=False),  # "": of all together
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
    Column("created_at", Moment, nullable=False),
    PrimaryKeyConstraint("timestamp", "metric_id", "granularity"),
    Index("idx_metrics_timestamp", text("timestamp DESC"), "granularity"),
    Index("idx_metrics_user", "user_id", text("timestamp DESC")),
)

rollups_due = Table(
    "rate_limit_rollups_due",
    metadata,
    Column("granularity", String(20), nullable=False),
    Column("timestamp", Moment, nullable=False),
    Column("version", BigInteger, nullable=False),  # higher with each write of what it is made of
    PrimaryKeyConstraint("granularity", "timestamp"),
)

archives = Table(
    "rate_limit_archives",
    metadata,
    Column("kind", String(20), nullable=False),
    Column("month", String(7), nullable=False),  # 2024-01
    Column("part", Integer, nullable=False),  # the second: rows that came when the first was gone
    Column("path", Text, nullable=False),
    Column("row_count", BigInteger, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("last_rowid", BigInteger, nullable=False),  # SQLite: rows up to here are in it
    Column("is_dropped", Integer, nullable=False),  # 1: none of its rows is in the database any more
    Column("archived_at", Moment, nullable=False),
    PrimaryKeyConstraint("kind", "month", "part"),
)


class Cell(NamedTuple):
    """What usage is counted apart by."""

    domain: str
    rule_id: str
    user_id: str
    endpoint: str
    region: str


def metric_id(granularity: str, at_s: float, cell: Cell, server_id: str = "") -> UUID:
    told = repr((granularity, int(at_s), *cell, server_id)).encode()
    return UUID(bytes=hashlib.blake2b(told, digest_size=16).digest())


class Month(NamedTuple):
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
