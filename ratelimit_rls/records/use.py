"""How much users and keys are used: columns beside what administrators decide, written in batches and never audited.

A user's requests are counted by the day and the month (UTC) of the last one. Whoever was counted later than the batch
at hand keeps the later moment: batches of several processes come in any order.
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

from ratelimit_rls.core.accounts import Use
from ratelimit_rls.records.bulk import Each
from ratelimit_rls.records.rows import chunks
from ratelimit_rls.records.tables import admin_tokens, api_keys, user_quotas
from ratelimit_rls.records.types import Moment


class Counted(NamedTuple):
    """Of one user, since it was last told."""

    requests: int
    refused: int
    last_s: float


def day_of(moment_s: float) -> float:
    """When its day began (UTC)."""
    return moment_s - moment_s % 86_400


def month_of(moment_s: float) -> float:
    return _month_of_day(day_of(moment_s))


@lru_cache(16)
def _month_of_day(day_s: float) -> float:
    day = datetime.fromtimestamp(day_s, UTC)
    return datetime(day.year, day.month, 1, tzinfo=UTC).timestamp()


@lru_cache(16)
def _calendar(moment_s: float) -> Mapping[str, float]:
    """Most users of a batch are told of as of the same moment."""
    day_s, month_s = day_of(moment_s), month_of(moment_s)
    return {
        "day": day_s,
        "tomorrow": day_s + timedelta(days=1).total_seconds(),
        "month": month_s,
        "next_month": month_of(month_s + timedelta(days=32).total_seconds()),
    }


async def touch_keys(connection: AsyncConnection, last_used: Mapping[str, tuple[int, float]]) -> None:
    # In one order everywhere: two processes that write the same rows wait for each other, never both.
    each = [{"id": key_id, "count": count, "at": at_s} for key_id, (count, at_s) in sorted(last_used.items())]
    await _TOUCH_KEY.write(connection, each)


async def touch_tokens(connection: AsyncConnection, last_used: Mapping[str, float]) -> None:
    table = admin_tokens
    statement = (
        update(table).where(table.c.token_id == bindparam("id")).values(last_used_at=_later(table.c.last_used_at, "at"))
    )
    await connection.execute(statement, [{"id": token_id, "at": at_s} for token_id, at_s in sorted(last_used.items())])


async def count_users(connection: AsyncConnection, counted: Mapping[str, Counted]) -> None:
    """Those that are not stored are left out."""
    each = [
        {
            "id": user_id,
            "count": of.requests,
            "refused": of.refused,
            "at": of.last_s,
            **_calendar(of.last_s),
        }
        for user_id, of in sorted(counted.items())
    ]
    await _COUNT_USER.write(connection, each)


async def use_of_users(connection: AsyncConnection, user_ids: Iterable[str], now_s: float) -> dict[str, Use]:
    """What was counted on another day, or in another month, does not count any more."""
    table = user_quotas
    columns = (table.c.total_requests_month, table.c.total_requests_today, table.c.quota_exceeded_count)
    used: dict[str, Use] = {}
    for ids in chunks(user_ids):
        query = select(table.c.user_id, *columns, table.c.last_request_at).where(table.c.user_id.in_(ids))
        for user_id, month, today, refused, last_s in await connection.execute(query):
            is_today = last_s is not None and last_s >= day_of(now_s)
            is_this_month = last_s is not None and last_s >= month_of(now_s)
            used[user_id] = Use(month if is_this_month else 0, today if is_today else 0, refused, last_s)
    return used


async def use_of_keys(connection: AsyncConnection, key_ids: Iterable[str]) -> dict[str, Use]:
    table = api_keys
    used: dict[str, Use] = {}
    for ids in chunks(key_ids):
        query = select(table.c.key_id, table.c.total_requests, table.c.last_used_at).where(table.c.key_id.in_(ids))
        for key_id, total, last_s in await connection.execute(query):
            used[key_id] = Use(total, last_s=last_s)
    return used


def _moment(name: str) -> BindParameter[float]:
    return bindparam(name, type_=Moment())


def _later(column: Column[float | None], name: str) -> Case[float | None]:
    return case((column > _moment(name), column), else_=_moment(name))


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
    # What comes late is of a day that is over for a user who was seen since: it counts in no total of today's.
    is_later_day, is_later_month = last >= _moment("tomorrow"), last >= _moment("next_month")
    is_today, is_this_month = last >= _moment("day"), last >= _moment("month")
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
            quota_exceeded_count=table.c.quota_exceeded_count + bindparam("refused"),
            last_request_at=_later(last, "at"),
            quota_reset_at=case((is_later_day, table.c.quota_reset_at), else_=_moment("tomorrow")),
        )
    )


_TOUCH_KEY, _COUNT_USER = Each(_touch_key()), Each(_count_user())
