"""Background task that keeps a process up to date with the database: all accounts at the start, then each change.

It reads the change feed when notified (LISTEN/NOTIFY, SQLite's data_version, or `wake()`), and at least every `poll_s`.
It never gives up. An outage is logged when it begins and when it ends; meanwhile the last known accounts stay in use.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

import structlog

from ratelimit_rls.common.backoff import Backoff
from ratelimit_rls.common.timers import wait_for_event
from ratelimit_rls.database.account_mirror import AccountMirror
from ratelimit_rls.database.change_notifications import listen_postgres, poll_sqlite
from ratelimit_rls.database.configuration import Configuration, ConfigurationChanges
from ratelimit_rls.database.database import Database
from ratelimit_rls.database.repository import LOAD_TIMEOUT_S, Repository
from ratelimit_rls.database.snapshot_file import SnapshotFile
from ratelimit_rls.errors import DatabaseError, DatabaseUnavailable, RateLimitRlsError, one_line

MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0

SNAPSHOT_INTERVAL_S = 5.0
SNAPSHOT_SHARE = 20
"""Writing the snapshot takes at most one part in this many of the time, however often something changes."""

Origin = Literal["database", "snapshot", "nothing"]

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class FollowerStatus:
    """Status of a follower, for health pages."""

    is_connected: bool
    sequence: int
    origin: Origin  # origin of the current accounts
    last_error: str  # "": no error since the last success
    last_change_s: float | None  # time of the last applied change, by this process's clock


class ChangeFollower:
    """Follows the change feed of a database."""

    def __init__(
        self,
        repository: Repository,
        database: Database,
        on_accounts: Callable[[Configuration], Awaitable[None]],
        on_changed: Callable[[ConfigurationChanges], None],
        poll_s: float,
        snapshot: SnapshotFile | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`on_accounts` replaces all accounts; `on_changed` applies a change."""
        self._repository = repository
        self._database = database
        self._on_accounts = on_accounts
        self._on_changed = on_changed
        self._poll_s = poll_s
        self._snapshot = snapshot
        self._clock = clock
        self._mirror: AccountMirror | None = None  # only if there is a snapshot file to write from it
        self._woken = asyncio.Event()
        self._unsaved = asyncio.Event()
        self._closing = asyncio.Event()
        self._must_load = True
        self._origin: Origin = "nothing"
        self._sequence = 0
        self._at_s = 0.0  # time of the change with that number
        self._is_connected = False
        self._last_error = ""
        self._last_change_s: float | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def state(self) -> FollowerStatus:
        return FollowerStatus(self._is_connected, self._sequence, self._origin, self._last_error, self._last_change_s)

    def wake(self) -> None:
        """Read the feed soon. Must be called in the event loop; from other threads use call_soon_threadsafe."""
        self._woken.set()

    async def start(self) -> None:
        """Load everything, from the snapshot if the database is unavailable. Raises DatabaseError if it is unusable."""
        try:
            await self._catch_up()
        except DatabaseUnavailable as error:
            self._failed(error)
            await self._load_snapshot()
        else:
            self._succeeded()
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._listen())]
        if self._snapshot is not None:
            self._tasks.append(asyncio.create_task(self._keep_snapshot(self._snapshot)))

    async def close(self) -> None:
        """Stop. Writes the snapshot first if anything has changed since it was last written."""
        self._closing.set()
        for task in self._tasks[:2]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def _follow(self) -> None:
        backoff = Backoff(MIN_BACKOFF_S, MAX_BACKOFF_S)
        while not self._closing.is_set():
            if self._is_connected:
                await wait_for_event(self._woken, self._poll_s)
            self._woken.clear()
            try:
                await self._catch_up()
            except Exception as error:  # also errors of the callbacks: nothing may end this task
                self._failed(error)
                await asyncio.sleep(backoff.next_s())  # a wake-up does not shorten it
            else:
                self._succeeded()
                backoff.reset()

    async def _catch_up(self) -> None:
        if self._must_load:
            await self._database.require_current()
        async with self._repository.reading(LOAD_TIMEOUT_S if self._must_load else LOAD_TIMEOUT_S / 4) as reader:
            changed = None if self._must_load else await reader.changed_since(self._sequence, self._at_s)
            accounts = await reader.accounts() if changed is None else None
        if accounts is not None:
            await self._apply_accounts(accounts, "database")
            self._must_load = False
        elif changed is not None and changed.sequence != self._sequence:
            self._pass_changes_on(changed)

    async def _apply_accounts(self, accounts: Configuration, origin: Origin) -> None:
        await self._on_accounts(accounts)
        if self._snapshot is not None:
            self._mirror = await asyncio.to_thread(AccountMirror, accounts)
        self._record_progress(accounts.sequence, accounts.at_s, origin)

    def _pass_changes_on(self, changed: ConfigurationChanges) -> None:
        if changed:
            self._on_changed(changed)
        if self._mirror is not None:
            self._mirror.apply(changed)
        self._record_progress(changed.sequence, changed.at_s, "database")

    def _record_progress(self, sequence: int, at_s: float, origin: Origin) -> None:
        self._sequence, self._at_s = sequence, at_s
        self._origin = origin
        self._last_change_s = self._clock()
        if origin == "database":
            self._unsaved.set()

    async def _load_snapshot(self) -> None:
        accounts: Configuration | None = None
        if self._snapshot is not None:
            try:
                accounts = await asyncio.to_thread(self._snapshot.read)
            except DatabaseError as error:
                _log.error("snapshot_unusable", error=str(error))
        if accounts is None:
            _log.warning("started_without_accounts", detail="the database is unavailable, and there is no snapshot")
            return
        await self._apply_accounts(accounts, "snapshot")
        _log.warning(
            "started_from_snapshot",
            detail="the database is unavailable",
            sequence=accounts.sequence,
            users=len(accounts.users),
        )

    def _failed(self, error: Exception) -> None:
        """Record an error. Everything is read again afterwards: changes may be missed, or the database restored."""
        self._must_load = True
        detail = str(error) if isinstance(error, RateLimitRlsError) else f"{type(error).__name__}: {error}"
        if self._is_connected or not self._last_error:
            _log.error(
                "database_follow_failed",
                error=detail,
                exc_info=None if isinstance(error, RateLimitRlsError) else error,
            )
        self._is_connected = False
        self._last_error = detail

    def _succeeded(self) -> None:
        """Log the end of an outage."""
        if not self._is_connected and self._last_error:
            _log.info("database_follow_recovered", sequence=self._sequence)
        self._is_connected = True
        self._last_error = ""

    async def _listen(self) -> None:
        """Wait for notifications, and reconnect forever.

        Errors are logged at debug only: either polling fails, too, and reports the outage, or polling suffices for now.
        """
        waker = listen_postgres if self._database.dialect == "postgresql" else poll_sqlite
        backoff = Backoff(MIN_BACKOFF_S, MAX_BACKOFF_S)
        while True:
            began_s = time.monotonic()
            try:
                await waker(self._database, self.wake)
            except Exception as error:
                _log.debug("change_notifications_failed", error=type(error).__name__)
            self.wake()
            if time.monotonic() - began_s > MAX_BACKOFF_S:
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def _keep_snapshot(self, snapshot: SnapshotFile) -> None:
        has_failed = False
        while True:
            await _wait_for_any(self._unsaved, self._closing)
            if not self._unsaved.is_set() or self._mirror is None:
                return
            self._unsaved.clear()
            began_s = time.monotonic()
            try:
                await asyncio.to_thread(snapshot.write, self._mirror.accounts())
                has_failed = False
            except Exception as error:  # try again with the next change
                if not has_failed:
                    _log.error("snapshot_write_failed", file=str(snapshot.path), error=one_line(str(error)))
                has_failed = True
            pause_s = max(SNAPSHOT_INTERVAL_S, SNAPSHOT_SHARE * (time.monotonic() - began_s))
            await wait_for_event(self._closing, pause_s)


async def _wait_for_any(*events: asyncio.Event) -> None:
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waiting:
            one.cancel()
