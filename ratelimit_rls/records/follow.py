"""Keeps a process as the database is: everything at the start, and from then on what has changed.

It is told (PostgreSQL, SQLite, or whoever calls `wake`) and then asks the feed, and it asks every `poll_s` should it
not have been told. It never gives up: an outage is logged when it begins and when it ends, and what was held goes on
being held.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

import structlog

from ratelimit_rls.core.accounts import Accounts, Changed
from ratelimit_rls.errors import RateLimitRlsError, RecordsError, RecordsUnavailable, one_line
from ratelimit_rls.records.database import Database
from ratelimit_rls.records.desk import LOAD_S, Desk
from ratelimit_rls.records.held import Held
from ratelimit_rls.records.snapshot import SnapshotFile
from ratelimit_rls.records.wakers import listen, look

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0

SNAPSHOT_EVERY_S = 5.0
SNAPSHOT_SHARE = 20
"""Writing it takes at most one part in so many of the time, however often something changes."""

Origin = Literal["database", "snapshot", "nothing"]

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Following:
    """How it stands, for health pages."""

    is_connected: bool
    sequence: int
    origin: Origin  # where what is held came from
    last_error: str  # "": none since it was connected
    last_change_s: float | None  # when something was last taken over, by this process's clock


class Follower:
    def __init__(
        self,
        desk: Desk,
        database: Database,
        on_accounts: Callable[[Accounts], Awaitable[None]],
        on_changed: Callable[[Changed], None],
        poll_s: float,
        snapshot: SnapshotFile | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`on_accounts` takes everything in place of what was held, `on_changed` what is different."""
        self._desk = desk
        self._database = database
        self._on_accounts = on_accounts
        self._on_changed = on_changed
        self._poll_s = poll_s
        self._snapshot = snapshot
        self._clock = clock
        self._held: Held | None = None  # the snapshot needs all of it, beside whoever is told
        self._woken = asyncio.Event()
        self._unsaved = asyncio.Event()
        self._closing = asyncio.Event()
        self._must_load = True
        self._origin: Origin = "nothing"
        self._sequence = 0
        self._at_s = 0.0  # of the change of that number
        self._is_connected = False
        self._last_error = ""
        self._last_change_s: float | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def state(self) -> Following:
        return Following(self._is_connected, self._sequence, self._origin, self._last_error, self._last_change_s)

    def wake(self) -> None:
        """Something may have changed. From the event loop; from elsewhere by call_soon_threadsafe."""
        self._woken.set()

    async def start(self) -> None:
        """Loads everything, from the snapshot if the database is away. RecordsError if it is there and unusable."""
        try:
            await self._catch_up()
        except RecordsUnavailable as error:
            self._failed(error)
            await self._load_snapshot()
        else:
            self._succeeded()
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._hear())]
        if self._snapshot is not None:
            self._tasks.append(asyncio.create_task(self._keep_snapshot(self._snapshot)))

    async def close(self) -> None:
        """The snapshot is written before this returns, if anything has changed since it last was."""
        self._closing.set()
        for task in self._tasks[:2]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def _follow(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closing.is_set():
            if self._is_connected:
                # Not wait_for: in Python 3.11 it forgets that it was cancelled if it is woken in the same turn.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._poll_s):
                        await self._woken.wait()
            self._woken.clear()
            try:
                await self._catch_up()
            except Exception as error:  # also a fault in whoever is told: nothing may end this
                self._failed(error)
                await asyncio.sleep(pause_s)  # whoever wakes it
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                self._succeeded()
                pause_s = FIRST_PAUSE_S

    async def _catch_up(self) -> None:
        if self._must_load:
            await self._database.require_current()
        async with self._desk.reading(LOAD_S if self._must_load else LOAD_S / 4) as reader:
            changed = None if self._must_load else await reader.changed_since(self._sequence, self._at_s)
            accounts = await reader.accounts() if changed is None else None
        if accounts is not None:
            await self._take_accounts(accounts, "database")
            self._must_load = False
        elif changed is not None and changed.sequence != self._sequence:
            self._take_changed(changed)

    async def _take_accounts(self, accounts: Accounts, origin: Origin) -> None:
        await self._on_accounts(accounts)
        if self._snapshot is not None:
            self._held = await asyncio.to_thread(Held, accounts)
        self._taken(accounts.sequence, accounts.at_s, origin)

    def _take_changed(self, changed: Changed) -> None:
        if changed:
            self._on_changed(changed)
        if self._held is not None:
            self._held.apply(changed)
        self._taken(changed.sequence, changed.at_s, "database")

    def _taken(self, sequence: int, at_s: float, origin: Origin) -> None:
        self._sequence, self._at_s = sequence, at_s
        self._origin = origin
        self._last_change_s = self._clock()
        if origin == "database":
            self._unsaved.set()

    async def _load_snapshot(self) -> None:
        accounts: Accounts | None = None
        if self._snapshot is not None:
            try:
                accounts = await asyncio.to_thread(self._snapshot.read)
            except RecordsError as error:
                _log.error("the snapshot is not used", reason=str(error))
        if accounts is None:
            _log.warning("started without users, keys and stored rules: the database is away and there is no snapshot")
            return
        await self._take_accounts(accounts, "snapshot")
        _log.warning(
            "started from the snapshot: the database is away", sequence=accounts.sequence, users=len(accounts.users)
        )

    def _failed(self, error: Exception) -> None:
        """Whatever was missed, and be it that the database comes back from a backup: everything is read again then."""
        self._must_load = True
        told = str(error) if isinstance(error, RateLimitRlsError) else f"{type(error).__name__}: {error}"
        if self._is_connected or not self._last_error:
            _log.error(
                "the database cannot be followed; what is known of users, keys and rules stays as it is",
                reason=told,
                exc_info=None if isinstance(error, RateLimitRlsError) else error,
            )
        self._is_connected = False
        self._last_error = told

    def _succeeded(self) -> None:
        """Whoever was told of an outage is told of its end: a warning, since those are what is logged by default."""
        if not self._is_connected and self._last_error:
            _log.warning("the database is followed again", sequence=self._sequence)
        self._is_connected = True
        self._last_error = ""

    async def _hear(self) -> None:
        """What goes wrong here is told where everything is: asking fails, too, or else asking is enough for now."""
        waker = listen if self._database.dialect == "postgresql" else look
        pause_s = FIRST_PAUSE_S
        while True:
            began_s = time.monotonic()
            try:
                await waker(self._database, self.wake)
            except Exception as error:
                _log.debug("not told of changes", reason=type(error).__name__)
            self.wake()
            if time.monotonic() - began_s > LONGEST_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _keep_snapshot(self, snapshot: SnapshotFile) -> None:
        has_failed = False
        while True:
            await _first_of(self._unsaved, self._closing)
            if not self._unsaved.is_set() or self._held is None:
                return
            self._unsaved.clear()
            began_s = time.monotonic()
            try:
                await asyncio.to_thread(snapshot.write, self._held.accounts())
                has_failed = False
            except Exception as error:  # whatever it is, the next change is written, if that can be
                if not has_failed:
                    _log.error("the snapshot cannot be written", file=str(snapshot.path), reason=one_line(str(error)))
                has_failed = True
            pause_s = max(SNAPSHOT_EVERY_S, SNAPSHOT_SHARE * (time.monotonic() - began_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._closing.wait()


async def _first_of(*events: asyncio.Event) -> None:
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waiting:
            one.cancel()
