"""Background task that flushes recorded decisions and usage to the database. Requests never wait for it.

While the database is unavailable, decisions wait in the usage recorder and usage waits here, both bounded; all of it is
written afterwards. Rows written twice because the outcome of a transaction was unknown are stored once. A row that the
database rejects is dropped and counted, so that no other row waits behind it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import structlog
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from ratelimit_rls.common.backoff import Backoff
from ratelimit_rls.common.timers import wait_for_event
from ratelimit_rls.core.names import MAX_ID_LENGTH
from ratelimit_rls.database.bulk_upsert import BulkInsert, insert, slices
from ratelimit_rls.database.usage.tables import HOUR, MINUTE, SECONDS, Cell, audit_logs, metric_id, metrics, rollups_due
from ratelimit_rls.errors import DatabaseError
from ratelimit_rls.telemetry.decision_records import DecisionRecord
from ratelimit_rls.telemetry.histogram import percentiles_us, to_text
from ratelimit_rls.telemetry.usage_counts import OTHER, UsageCounts, UsageKey
from ratelimit_rls.telemetry.usage_recorder import MAX_ENTRIES, UsageRecorder

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from ratelimit_rls.database.database import Database

_log = structlog.get_logger()

CELLS_PER_STEP = 200
"""Cells taken over or discarded in one event loop iteration."""

ROWS_PER_TRANSACTION = 200
"""Few, because a change by an administrator may have to wait for one such transaction, but never for more."""

MAX_REST_S = 0.25
"""Longest pause between two transactions with SQLite, otherwise as long as the last one took. So writers of other
processes find the file unlocked half of the time."""

CANCEL_GRACE_S = 1.0
"""Time for a cancelled transaction to end."""

FLUSH_INTERVAL_S = 1.0
MAX_BACKOFF_S = 5.0

USAGE_INTERVAL_S = 10.0
FEW_CELLS = 1000
"""Up to this many cells, usage of the current minute is written before the minute is over, and then again."""

MAX_CELLS = 4 * MAX_ENTRIES
"""Cells of usage that wait for the database; beyond that, usage is counted by domain and rule only."""

MAX_WAITING_USERS = 50_000
"""Users whose activity waits to be written."""

DECISIONS_WRITTEN = "ratelimit.audit.written"
DECISIONS_REJECTED = "ratelimit.audit.rejected"
USAGE_BUFFERED = "ratelimit.usage.buffered"
USAGE_DROPPED = "ratelimit.usage.dropped"


class UserActivity(NamedTuple):
    """Requests of a user since the last write."""

    calls: int
    denied: int  # over a limit, or blocked
    at_s: float


WriteUserActivity = Callable[[Mapping[str, UserActivity]], Awaitable[None]]
"""Adds requests and the time of the last one to the stored users."""

T = TypeVar("T")


class _Minute(NamedTuple):
    """A cell of usage in one minute, as counted by one writer."""

    minute_s: int
    cell: Cell
    server_id: str


_DECISIONS = BulkInsert(audit_logs, replaces=False)
_USAGE = BulkInsert(metrics, replaces=True)


class UsageWriter:
    """Flushes a UsageRecorder to the database."""

    def __init__(
        self,
        database: Database,
        recorder: UsageRecorder,
        *,
        server_id: str,
        region: str = "",
        touch: WriteUserActivity | None = None,
        max_cells: int = MAX_CELLS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`touch` is called regularly with the activity of users since the last call."""
        self._database = database
        self._recorder = recorder
        self._server_name = server_id[: MAX_ID_LENGTH - 9]
        self._server_id = self._new_server_id()
        self._turns = recorder.clock_resets
        self._region = region[:MAX_ID_LENGTH].encode("utf-8", "replace").decode()
        self._touch = touch
        self._max_cells = max_cells
        self._clock = clock
        self._taken: deque[tuple[int, UsageKey, UsageCounts]] = (
            deque()
        )  # by minute; taken from the recorder, not yet in
        self._usage: dict[_Minute, UsageCounts] = {}
        self._unwritten: dict[_Minute, None] = {}  # keys of _usage to be written, in order of arrival
        self._finished_before_s = 0  # earlier minutes are complete
        self._users: dict[str, UserActivity] = {}
        self._usage_due_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self.written = 0  # decisions
        self.rejected = 0  # decisions that the database rejected
        self.usage_dropped = 0  # requests that are in no cell
        self.error: str = ""  # why writes currently fail; "": they do not

    def _new_server_id(self) -> str:
        """Return an id that is unique for each start and each time the clock is set back, so that counting a minute
        again does not overwrite what was counted before under the same name."""
        return f"{self._server_name}-{secrets.token_hex(4)}"

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="usage_writer")

    async def close(self, within_s: float = 5.0) -> None:
        """Write everything, including the current minute, within `within_s` plus at most twice CANCEL_GRACE_S."""
        self._stopping.set()
        try:
            if self._task is not None:
                await _cancel_after(self._task, within_s / 2)  # let the current transaction end
                self._task = None
            flushing = asyncio.create_task(self.flush())
            await _cancel_after(flushing, within_s / 2)
            if flushing.cancelled():
                raise TimeoutError
            flushing.result()
        except (DatabaseError, TimeoutError) as error:
            await self._take_usage()  # count the lost usage, too
            decisions, rows = self._recorder.decisions, len(self._unwritten)
            _log.error("usage_lost", error=str(error) or "timeout", decisions=decisions, usage_rows=rows)

    async def flush(self) -> None:
        """Write everything now. Raises DatabaseError if that fails."""
        await self._write_decisions()
        await self._take_usage()
        await self._write_usage(everything=True)
        await self._write_users()

    def gauges(self) -> Iterator[tuple[str, int]]:
        yield DECISIONS_WRITTEN, self.written
        yield DECISIONS_REJECTED, self.rejected
        yield USAGE_BUFFERED, len(self._unwritten)
        yield USAGE_DROPPED, self.usage_dropped

    async def _run(self) -> None:
        backoff = Backoff(2 * FLUSH_INTERVAL_S, MAX_BACKOFF_S)
        while not self._stopping.is_set():
            try:
                await self.work()
                if self.error:
                    _log.info("usage_writes_recovered")
                self.error, pause_s = "", FLUSH_INTERVAL_S
                backoff.reset()
            except DatabaseError as error:
                if not self.error:
                    _log.warning("usage_write_failed", error=str(error))
                self.error, pause_s = str(error), backoff.next_s()
            except Exception:
                _log.exception("usage_write_crashed")
                self.error, pause_s = "internal error", backoff.next_s()
            await wait_for_event(self._stopping, pause_s)

    async def work(self) -> None:
        """Write everything that is due. Raises DatabaseError; the rest keeps waiting then."""
        now_s = self._clock()
        is_due = (
            not self._usage_due_s - USAGE_INTERVAL_S <= now_s < self._usage_due_s
        )  # the clock may have been set back
        is_due = is_due and (self._recorder.lines <= FEW_CELLS or self._recorder.is_minute_over)
        if is_due:  # first: it must not wait in the recorder while decisions wait for the database
            await self._take_usage()
        await self._write_decisions()
        if is_due:
            await self._write_usage()
            await self._write_users()
            self._usage_due_s = now_s + USAGE_INTERVAL_S

    async def _write_decisions(self) -> None:
        while batch := self._recorder.take_decisions(ROWS_PER_TRANSACTION):
            began_s = time.monotonic()
            try:
                rejected = await self._write(batch, self._insert_decisions)
            except BaseException:  # also on cancellation: the batch is still to be written
                self._recorder.put_back(batch)
                raise
            self.rejected += len(rejected)
            self.written += len(batch) - len(rejected)
            await self._rest(began_s)

    async def _write(self, items: list[T], write: Callable[[list[T]], Awaitable[None]]) -> list[T]:
        """Write all items but those that the database always rejects; return these. Bisects to find them."""
        try:
            await write(items)
        except DatabaseError as error:
            if not _is_row_error(error):
                raise
            if len(items) == 1:
                _log.warning("usage_row_rejected", error=str(error))
                return items
            half = len(items) // 2
            return [*await self._write(items[:half], write), *await self._write(items[half:], write)]
        return []

    async def _insert_decisions(self, batch: list[DecisionRecord]) -> None:
        async with self._database.begin(background=True) as connection:
            await _DECISIONS.write(connection, batch, self._decision_row)

    def _decision_row(self, one: DecisionRecord) -> dict[str, Any]:
        caller = one.caller
        return {
            "timestamp": one.at_s,
            "log_id": one.log_id,
            "domain": caller.domain,
            "user_id": caller.user or None,
            "api_key_id": caller.api_key or None,
            "ip_address": caller.ip or None,
            "endpoint": caller.endpoint or None,
            "http_method": caller.method or None,
            "rule_id": one.rule or None,
            "decision": one.outcome.value,
            "reason": one.reason or None,
            "current_count": one.current,
            "limit_value": one.limit,
            "response_status": one.status,
            "retry_after_seconds": one.retry_after_s,
            "region": self._region or None,
            "server_id": self._server_id,
            "latency_us": one.latency_us,
        }

    async def _take_usage(self) -> None:
        for minute_s, cells in self._recorder.take_usage():
            self._taken += [(minute_s, key, counts) for key, counts in cells.items()]
        over_s = self._recorder.minute_s
        if self._recorder.clock_resets != self._turns:
            self._turns, self._server_id = self._recorder.clock_resets, self._new_server_id()
        now_s = self._clock()
        while self._taken:
            if len(self._taken) % CELLS_PER_STEP == 0:
                await asyncio.sleep(0)
            minute_s, key, counts = self._taken.popleft()
            self._count_user(key.user, counts, now_s)
            cell = Cell(key.domain, key.rule, key.user, key.endpoint, self._region)
            self._add(_Minute(minute_s, cell, self._server_id), counts)
        self._finished_before_s = over_s

    def _add(self, minute: _Minute, counts: UsageCounts) -> None:
        """Add counts to a minute. Its whole row is written each time, so writing it again changes nothing."""
        known = self._usage.get(minute)
        if known is None and len(self._usage) >= self._max_cells:
            cell = minute.cell
            minute = minute._replace(cell=cell._replace(user_id=OTHER, endpoint=OTHER))
            known = self._usage.get(minute)
            if known is None and len(self._usage) >= 2 * self._max_cells:
                self.usage_dropped += counts.total
                return
        if known is None:
            self._usage[minute] = counts
        else:
            known.add(counts)
        self._unwritten[minute] = None

    def _count_user(self, user: str, counts: UsageCounts, now_s: float) -> None:
        if not user or (user not in self._users and len(self._users) >= MAX_WAITING_USERS):
            return
        calls, denied, _ = self._users.get(user, (0, 0, 0.0))
        sums = counts.sums
        self._users[user] = UserActivity(calls + sums.total, denied + sums.throttled + sums.blocked, now_s)

    async def _write_usage(self, *, everything: bool = False) -> None:
        due = list(self._unwritten)
        if not everything and len(due) > FEW_CELLS:
            due = [minute for minute in due if minute.minute_s < self._finished_before_s]
        for at in range(0, len(due), ROWS_PER_TRANSACTION):
            began_s, some = time.monotonic(), due[at : at + ROWS_PER_TRANSACTION]
            for rejected in await self._write(some, self._replace_cells):
                dropped = self._usage[rejected]
                self.usage_dropped += dropped.total
                dropped.clear()  # later counts of the same minute start at zero
            for minute in some:
                del self._unwritten[minute]
            await self._rest(began_s)
        await self._discard_finished()

    async def _rest(self, began_s: float) -> None:
        if self._database.dialect == "sqlite" and not self._stopping.is_set():
            await asyncio.sleep(min(time.monotonic() - began_s, MAX_REST_S))

    async def _discard_finished(self) -> None:
        for number, minute in enumerate(list(self._usage)):
            if number % CELLS_PER_STEP == 0:
                await asyncio.sleep(0)
            is_over = minute.minute_s < self._finished_before_s or minute.server_id != self._server_id
            if is_over and minute not in self._unwritten:
                self._usage.pop(minute).clear()

    async def _replace_cells(self, minutes: list[_Minute]) -> None:
        async with self._database.begin(background=True) as connection:
            await _USAGE.write(connection, minutes, self._usage_row)
            # Last, because it blocks all other writers of that hour until the transaction ends.
            hours = sorted({minute.minute_s // SECONDS[HOUR] * SECONDS[HOUR] for minute in minutes})
            await mark_due(connection, self._database.dialect, HOUR, hours)

    def _usage_row(self, minute: _Minute) -> dict[str, Any]:
        cell, sums = minute.cell, self._usage[minute].sums
        return {
            "timestamp": minute.minute_s,
            "metric_id": metric_id(MINUTE, minute.minute_s, cell, minute.server_id),
            "granularity": MINUTE,
            "domain": cell.domain,
            "rule_id": cell.rule_id,
            "user_id": cell.user_id,
            "endpoint": cell.endpoint,
            "region": cell.region,
            "server_id": minute.server_id,
            "total_requests": sums.total,
            "allowed_requests": sums.allowed,
            "throttled_requests": sums.throttled,
            "blocked_requests": sums.blocked,
            **percentiles(sums.latencies),
            "histogram": to_text(sums.latencies),
            "cache_hits": sums.cache_hits,
            "cache_misses": sums.cache_misses,
            "created_at": self._clock(),
        }

    async def _write_users(self) -> None:
        """Add the activity of users. If the outcome of a transaction is unknown, its requests are counted twice
        there."""
        if self._touch is None:
            return
        for users in list(slices(sorted(self._users), ROWS_PER_TRANSACTION)) or [[]]:
            await self._touch({user: self._users[user] for user in users})
            for user in users:
                del self._users[user]


async def _cancel_after(task: asyncio.Task[None], within_s: float) -> None:
    """Cancel a task after that time. Raises TimeoutError if it then takes longer than CANCEL_GRACE_S to end."""
    await asyncio.wait([task], timeout=within_s)
    task.cancel()
    _, unfinished = await asyncio.wait([task], timeout=CANCEL_GRACE_S)
    if unfinished:
        raise TimeoutError("the database does not respond")


def _is_row_error(translated: DatabaseError) -> bool:
    """Return whether the row itself is invalid, whatever the state of the database."""
    error = translated.__context__
    state = getattr(error.orig, "sqlstate", None) if isinstance(error, DBAPIError) else None
    return isinstance(error, DataError | IntegrityError) or (state or "")[:2] in ("22", "23")


def percentiles(latencies: Mapping[int, int]) -> dict[str, int | None]:
    p50, p95, p99 = [None if us is None else round(us) for us in percentiles_us(latencies, (50, 95, 99))]
    return {"latency_p50_us": p50, "latency_p95_us": p95, "latency_p99_us": p99}


async def mark_due(connection: AsyncConnection, dialect: str, granularity: str, timestamps: Sequence[float]) -> None:
    """Mark the hours or days as due for a rollup, because this transaction writes rows that they are made from."""
    statement = insert(dialect, rollups_due)
    again = statement.on_conflict_do_update(
        index_elements=["granularity", "timestamp"], set_={"version": rollups_due.c.version + 1}
    )
    rows = [{"granularity": granularity, "timestamp": at_s, "version": 1} for at_s in timestamps]
    await connection.execute(again, rows)
