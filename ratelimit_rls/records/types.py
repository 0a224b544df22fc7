"""Column types that are the same to us on every database: moments, JSON, and names in the order of their bytes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, Integer, String, TypeDecorator
from sqlalchemy.dialects.postgresql import JSONB

from ratelimit_rls.core.accounts import LONGEST_ID

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LAST_S = 253_370_764_800.0
"""The first moment of 9999 (UTC): what is later cannot be stored in every time zone."""


class Moment(TypeDecorator[float]):
    """Seconds since the epoch to us, with microseconds; in the database a timestamp that people can read.

    Exact: what was written is read back, rounded to a microsecond. SQLite has text that sorts by time (UTC).
    """

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: float | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        moment = EPOCH + timedelta(microseconds=round(value * 1_000_000))
        return moment if dialect.name == "postgresql" else moment.replace(tzinfo=None)

    def process_result_value(self, value: Any | None, dialect: Dialect) -> float | None:
        if value is None:
            return None
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()  # type: ignore[no-any-return]


Json = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")

Name = String(LONGEST_ID).with_variant(String(LONGEST_ID, collation="C"), "postgresql")
"""Sorted by its bytes, as SQLite does: pages have the same order everywhere."""

Serial = BigInteger().with_variant(Integer(), "sqlite")
"""Of a key that counts itself: SQLite does so for INTEGER alone, which has 64 bits there."""
