"""Column types that behave the same on both databases: timestamps, JSON, and names sorted by their bytes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, Integer, String, TypeDecorator
from sqlalchemy.dialects.postgresql import JSONB

from ratelimit_rls.core.names import MAX_ID_LENGTH

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MAX_TIMESTAMP_S = 253_370_764_800.0
"""Start of the year 9999 (UTC): later timestamps cannot be stored in every time zone."""


class Timestamp(TypeDecorator[float]):
    """Seconds since the epoch in Python; a readable timestamp in the database.

    Values are rounded to a microsecond, and read back exactly. SQLite stores text in UTC that sorts by time.
    """

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: float | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        timestamp = EPOCH + timedelta(microseconds=round(value * 1_000_000))
        return timestamp if dialect.name == "postgresql" else timestamp.replace(tzinfo=None)

    def process_result_value(self, value: Any | None, dialect: Dialect) -> float | None:
        if value is None:
            return None
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()  # type: ignore[no-any-return]


Json = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")

Name = String(MAX_ID_LENGTH).with_variant(String(MAX_ID_LENGTH, collation="C"), "postgresql")
"""Sorted by its bytes, as SQLite does, so that pages have the same order on both databases."""

Serial = BigInteger().with_variant(Integer(), "sqlite")
"""Type of an autoincrement key. SQLite requires INTEGER, which has 64 bits there."""
