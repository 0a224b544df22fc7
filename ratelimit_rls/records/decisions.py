"""Writes what the ledger has noted into the database, behind everybody's back: nothing ever waits for it.

While the database is away, decisions wait in the ledger and usage waits here, both within bounds; afterwards all of it
is written. What was written twice because the fate of a transaction was unknown is stored once. A row that the
database refuses is dropped, and counted, so that no other waits behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import structlog
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from ratelimit_rls.core.accounts import LONGEST_ID
from ratelimit_rls.errors import RecordsError
from ratelimit_rls.records.bulk import Bulk, insert, slices
from ratelimit_rls.records.series import HOUR, MINUTE, SECONDS, Cell, audit_logs, metric_id, metrics, rollups_due
from ratelimit_rls.telemetry.counts import OTHER, Counts, UsageKey
from ratelimit_rls.telemetry.histogram import percentiles_us, to_text
from ratelimit_rls.telemetry.ledger import MOST_LINES, Ledger, Recorded

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from ratelimit_rls.records.database import Database

log = structlog.get_logger()

CELLS_AT_ONCE = 200
"""Taken over, or forgotten, in a turn of the loop."""

ROWS_IN_A_TRANSACTION = 1000

PAUSE_S = 1.0
LONGEST_PAUSE_S = 5.0

USAGE_EVERY_S = 10.0
FEW_CELLS = 1000
"""Up to here, usage of the minute that runs is taken and written before it is over, and then again."""

MOST_CELLS = 4 * MOST_LINES
"""Of usage that wait for the database; what comes after them is counted by domain and rule alone."""

MOST_TOUCHED = 50_000
"""Users whose use waits to be written."""

DECISIONS_WRITTEN = "ratelimit.audit.written_total"
DECISIONS_REFUSED = "ratelimit.audit.refused_total"
USAGE_WAITING = "ratelimit.usage.waiting"
USAGE_DROPPED = "ratelimit.usage.dropped_total"


class Touched(NamedTuple):
    """Of a user, since it was told last."""

    calls: int
    refused: int
    at_s: float


Touch = Callable[[Mapping[str, Touched]], Awaitable[None]]
"""Adds to what is kept with users: how often they called, and when last."""

T = TypeVar("T")


class _Minute(NamedTuple):
    """A cell of usage in one minute, as one writer counted it."""

    minute_s: int
    cell: Cell
    server_id: str


_DECISIONS = Bulk(audit_logs, replaces=False)
_USAGE = Bulk(metrics, replaces=True)


class Scribe:
    def __init__(
        self,
        database: Database,
        ledger: Ledger,
        *,
        server_id: str,
        region: str = "",
        touch: Touch | None = None,
        most_cells: int = MOST_CELLS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`touch` is called every now and then, with the users that called meanwhile."""
        self._database = database
        self._ledger = ledger
        self._server_name = server_id[: LONGEST_ID - 9]
        self._server_id = self._new_server_id()
        self._turns = ledger.turns
        self._region = region[:LONGEST_ID].encode("utf-8", "replace").decode()
        self._touch = touch
        self._most_cells = most_cells
        self._clock = clock
        self._taken: deque[tuple[int, UsageKey, Counts]] = deque()  # by minute; from the ledger, and not yet in
        self._usage: dict[_Minute, Counts] = {}
        self._unwritten: dict[_Minute, None] = {}  # of these, in the order they came
        self._over_s = 0  # nothing will be added to what was counted before this moment
        self._users: dict[str, Touched] = {}
        self._usage_due_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self.written = 0  # decisions
        self.refused = 0  # decisions that the database would not take
        self.usage_dropped = 0  # calls that are in no cell
        self.fault: str = ""  # why nothing can be written now

    def _new_server_id(self) -> str:
        """Who counts in a minute anew, after a start or with a clock that was set back, does not write over what was
        counted in it before, whatever it is called."""
        return f"{self._server_name}-{secrets.token_hex(4)}"

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="scribe")

    async def close(self, within_s: float = 5.0) -> None:
        """Write what there is, the minute that runs included, but take no longer than that."""
        self._stopping.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=within_s / 2)  # a transaction under way had better end
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        try:
            async with asyncio.timeout(within_s / 2):
                await self._take_usage()  # whatever becomes of it, it is told of
                await self.flush()
        except (RecordsError, TimeoutError) as fault:
            lost = {name: number for name, number in (*self._ledger.gauges(), *self.gauges()) if "waiting" in name}
            log.warning("records were not all written", why=str(fault) or "no time left", **lost)

    async def flush(self) -> None:
        """RecordsError if the database does not take it now."""
        await self._write_decisions()
        await self._take_usage()
        await self._write_usage(everything=True)
        await self._tell_of_users()

    def gauges(self) -> Iterator[tuple[str, int]]:
        yield DECISIONS_WRITTEN, self.written
        yield DECISIONS_REFUSED, self.refused
        yield USAGE_WAITING, len(self._unwritten)
        yield USAGE_DROPPED, self.usage_dropped

    async def _run(self) -> None:
        pause_s = PAUSE_S
        while not self._stopping.is_set():
            try:
                await self.work()
                if self.fault:
                    log.warning("records are written again")
                self.fault, pause_s = "", PAUSE_S
            except RecordsError as fault:
                if not self.fault:
                    log.warning("records cannot be written; they wait", why=str(fault))
                self.fault, pause_s = str(fault), min(2 * pause_s, LONGEST_PAUSE_S)
            except Exception:
                log.exception("records were not written")
                self.fault, pause_s = "an error of ours", min(2 * pause_s, LONGEST_PAUSE_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()

    async def work(self) -> None:
        """Write all that waits and is due. RecordsError: the rest waits on."""
        now_s = self._clock()
        is_due = not self._usage_due_s - USAGE_EVERY_S <= now_s < self._usage_due_s  # the clock may be set back
        is_due = is_due and (self._ledger.lines <= FEW_CELLS or self._ledger.is_minute_over)
        if is_due:  # first, since nothing of it must wait in the ledger while decisions wait for the database
            await self._take_usage()
        await self._write_decisions()
        if is_due:
            await self._write_usage()
            await self._tell_of_users()
            self._usage_due_s = now_s + USAGE_EVERY_S

    async def _write_decisions(self) -> None:
        while batch := self._ledger.take_decisions(ROWS_IN_A_TRANSACTION):
            try:
                refused = await self._write(batch, self._insert_decisions)
            except BaseException:  # even if we are to end: what was taken is still to be written
                self._ledger.put_back(batch)
                raise
            self.refused += len(refused)
            self.written += len(batch) - len(refused)

    async def _write(self, items: list[T], write: Callable[[list[T]], Awaitable[None]]) -> list[T]:
        """Write all, or all but those that the database would refuse at any time, which are returned."""
        try:
            await write(items)
        except RecordsError as fault:
            if not _is_of_a_row(fault):
                raise
            if len(items) == 1:
                log.warning("a record was refused by the database", why=str(fault))
                return items
            half = len(items) // 2
            return [*await self._write(items[:half], write), *await self._write(items[half:], write)]
        return []

    async def _insert_decisions(self, batch: list[Recorded]) -> None:
        async with self._database.begin() as connection:
            await _DECISIONS.write(connection, batch, self._decision_row)

    def _decision_row(self, one: Recorded) -> dict[str, Any]:
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
            "decision": one.word.value,
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
        for minute_s, cells in self._ledger.take_usage():
            self._taken += [(minute_s, key, counts) for key, counts in cells.items()]
        over_s = self._ledger.minute_s
        if self._ledger.turns != self._turns:
            self._turns, self._server_id = self._ledger.turns, self._new_server_id()
        now_s = self._clock()
        while self._taken:
            if len(self._taken) % CELLS_AT_ONCE == 0:
                await asyncio.sleep(0)
            minute_s, key, counts = self._taken.popleft()
            self._note_use(key.user, counts, now_s)
            cell = Cell(key.domain, key.rule, key.user, key.endpoint, self._region)
            self._keep(_Minute(minute_s, cell, self._server_id), counts)
        self._over_s = over_s

    def _keep(self, minute: _Minute, counts: Counts) -> None:
        """Added to what is known of that minute: rows are written whole, so that writing one again changes nothing."""
        known = self._usage.get(minute)
        if known is None and len(self._usage) >= self._most_cells:
            cell = minute.cell
            minute = minute._replace(cell=cell._replace(user_id=OTHER, endpoint=OTHER))
            known = self._usage.get(minute)
            if known is None and len(self._usage) >= 2 * self._most_cells:
                self.usage_dropped += counts.total
                return
        if known is None:
            self._usage[minute] = counts
        else:
            known.add(counts)
        self._unwritten[minute] = None

    def _note_use(self, user: str, counts: Counts, now_s: float) -> None:
        if not user or (user not in self._users and len(self._users) >= MOST_TOUCHED):
            return
        calls, refused, _ = self._users.get(user, (0, 0, 0.0))
        sums = counts.sums
        self._users[user] = Touched(calls + sums.total, refused + sums.throttled + sums.blocked, now_s)

    async def _write_usage(self, *, everything: bool = False) -> None:
        due = list(self._unwritten)
        if not everything and len(due) > FEW_CELLS:
            due = [minute for minute in due if minute.minute_s < self._over_s]
        for at in range(0, len(due), ROWS_IN_A_TRANSACTION):
            some = due[at : at + ROWS_IN_A_TRANSACTION]
            for refused in await self._write(some, self._replace_cells):
                dropped = self._usage[refused]
                self.usage_dropped += dropped.total
                dropped.clear()  # what comes in the same minute is counted by itself
            for minute in some:
                del self._unwritten[minute]
        await self._forget_what_is_over()

    async def _forget_what_is_over(self) -> None:
        for number, minute in enumerate(list(self._usage)):
            if number % CELLS_AT_ONCE == 0:
                await asyncio.sleep(0)
            is_over = minute.minute_s < self._over_s or minute.server_id != self._server_id
            if is_over and minute not in self._unwritten:
                self._usage.pop(minute).clear()

    async def _replace_cells(self, minutes: list[_Minute]) -> None:
        async with self._database.begin() as connection:
            await _USAGE.write(connection, minutes, self._usage_row)
            # Last, since it holds up everybody else who writes of that hour until the transaction ends.
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

    async def _tell_of_users(self) -> None:
        """They add it up: should the fate of a transaction be unknown, its calls are counted twice there."""
        if self._touch is None:
            return
        for users in list(slices(sorted(self._users), ROWS_IN_A_TRANSACTION)) or [[]]:
            await self._touch({user: self._users[user] for user in users})
            for user in users:
                del self._users[user]


def _is_of_a_row(fault: RecordsError) -> bool:
    """What was to be stored cannot be, whatever the state of the database."""
    error = fault.__context__
    state = getattr(error.orig, "sqlstate", None) if isinstance(error, DBAPIError) else None
    return isinstance(error, DataError | IntegrityError) or (state or "")[:2] in ("22", "23")


def percentiles(latencies: Mapping[int, int]) -> dict[str, int | None]:
    p50, p95, p99 = [None if us is None else round(us) for us in percentiles_us(latencies, (50, 95, 99))]
    return {"latency_p50_us": p50, "latency_p95_us": p95, "latency_p99_us": p99}


async def mark_due(connection: AsyncConnection, dialect: str, granularity: str, moments: Sequence[float]) -> None:
    """What is made of the rows that this transaction writes has to be made anew."""
    statement = insert(dialect, rollups_due)
    again = statement.on_conflict_do_update(
        index_elements=["granularity", "timestamp"], set_={"version": rollups_due.c.version + 1}
    )
    rows = [{"granularity": granularity, "timestamp": at_s, "version": 1} for at_s in moments]
    await connection.execute(again, rows)
