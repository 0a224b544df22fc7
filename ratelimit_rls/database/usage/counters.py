"""Usage counters of users and keys: columns of their tables, written in batches and never audited.

A user's requests are counted per day and month (UTC) of the last one. A later time of the last request is never
overwritten by an earlier one: batches of several processes arrive in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import NamedTuple

from sqlalchemy import (
    BindParameter,
    Case,
    Column,
    Update,
    bindparam,
    case,
    select,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from ratelimit_rls.database.administration import AccountUsage
from ratelimit_rls.database.bulk_upsert import BulkUpdate
from ratelimit_rls.database.column_types import Timestamp
from ratelimit_rls.database.row_mapping import chunks
from ratelimit_rls.database.tables import admin_tokens, api_keys, user_quotas


class UserUsage(NamedTuple):
    """Usage of one user since the last write."""

    requests: int
    denied: int
    last_s: float


def day_start(at_s: float) -> float:
    """Return the start of the day (UTC)."""
    return at_s - at_s % 86_400


def month_start(at_s: float) -> float:
    return _month_start_of_day(day_start(at_s))


@lru_cache(16)
def _month_start_of_day(day_s: float) -> float:
    day = datetime.fromtimestamp(day_s, UTC)
    return datetime(day.year, day.month, 1, tzinfo=UTC).timestamp()


@lru_cache(16)
def _calendar(at_s: float) -> Mapping[str, float]:
    """Return the bounds of the day and month. Cached, because most users of a batch have the same timestamp."""
    day_s, month_s = day_start(at_s), month_start(at_s)
    return {
        "day": day_s,
        "tomorrow": day_s + timedelta(days=1).total_seconds(),
        "month": month_s,
        "next_month": month_start(month_s + timedelta(days=32).total_seconds()),
    }


async def touch_keys(connection: AsyncConnection, last_used: Mapping[str, tuple[int, float]]) -> None:
    # Sorted, so that two processes that write the same rows cannot deadlock.
    each = [{"id": key_id, "count": count, "at": at_s} for key_id, (count, at_s) in sorted(last_used.items())]
    await _TOUCH_KEY.write(connection, each)


async def touch_tokens(connection: AsyncConnection, last_used: Mapping[str, float]) -> None:
    table = admin_tokens
    statement = (
        update(table).where(table.c.token_id == bindparam("id")).values(last_used_at=_later(table.c.last_used_at, "at"))
    )
    await connection.execute(statement, [{"id": token_id, "at": at_s} for token_id, at_s in sorted(last_used.items())])


async def count_users(connection: AsyncConnection, counted: Mapping[str, UserUsage]) -> None:
    """Add usage to users. Unknown users are skipped."""
    each = [
        {
            "id": user_id,
            "count": of.requests,
            "denied": of.denied,
            "at": of.last_s,
            **_calendar(of.last_s),
        }
        for user_id, of in sorted(counted.items())
    ]
    await _COUNT_USER.write(connection, each)


async def usage_of_users(connection: AsyncConnection, user_ids: Iterable[str], now_s: float) -> dict[str, AccountUsage]:
    """Return the usage of users. Counts of an earlier day or month are returned as 0."""
    table = user_quotas
    columns = (table.c.total_requests_month, table.c.total_requests_today, table.c.quota_exceeded_count)
    used: dict[str, AccountUsage] = {}
    for ids in chunks(user_ids):
        query = select(table.c.user_id, *columns, table.c.last_request_at).where(table.c.user_id.in_(ids))
        for user_id, month, today, denied, last_s in await connection.execute(query):
            is_today = last_s is not None and last_s >= day_start(now_s)
            is_this_month = last_s is not None and last_s >= month_start(now_s)
            used[user_id] = AccountUsage(month if is_this_month else 0, today if is_today else 0, denied, last_s)
    return used


async def usage_of_keys(connection: AsyncConnection, key_ids: Iterable[str]) -> dict[str, AccountUsage]:
    table = api_keys
    used: dict[str, AccountUsage] = {}
    for ids in chunks(key_ids):
        query = select(table.c.key_id, table.c.total_requests, table.c.last_used_at).where(table.c.key_id.in_(ids))
        for key_id, total, last_s in await connection.execute(query):
            used[key_id] = AccountUsage(total, last_s=last_s)
    return used


def _timestamp_param(name: str) -> BindParameter[float]:
    return bindparam(name, type_=Timestamp())


def _later(column: Column[float | None], name: str) -> Case[float | None]:
    return case((column > _timestamp_param(name), column), else_=_timestamp_param(name))


def _touch_key() -> Update:
    table = api_keys
    return (
        update(table)
        .where(table.c.key_id == bindparam("id"))
        .values(
            total_requests=table.c.total_requests + bindparam("count"),
            last_used_at=_later(table.c.last_used_at, "at"),
        )
    )


def _count_user() -> Update:
    table = user_quotas
    last = table.c.last_request_at
    # A late batch belongs to a past day if the user was seen since: it does not add to the totals of the current one.
    is_later_day, is_later_month = last >= _timestamp_param("tomorrow"), last >= _timestamp_param("next_month")
    is_today, is_this_month = last >= _timestamp_param("day"), last >= _timestamp_param("month")
    today, month = table.c.total_requests_today, table.c.total_requests_month
    return (
        update(table)
        .where(table.c.user_id == bindparam("id"))
        .values(
            total_requests_today=case(
                (is_later_day, today), (is_today, today + bindparam("count")), else_=bindparam("count")
            ),
            total_requests_month=case(
                (is_later_month, month), (is_this_month, month + bindparam("count")), else_=bindparam("count")
            ),
            quota_exceeded_count=table.c.quota_exceeded_count + bindparam("denied"),
            last_request_at=_later(last, "at"),
            quota_reset_at=case((is_later_day, table.c.quota_reset_at), else_=_timestamp_param("tomorrow")),
        )
    )


_TOUCH_KEY, _COUNT_USER = BulkUpdate(_touch_key()), BulkUpdate(_count_user())
