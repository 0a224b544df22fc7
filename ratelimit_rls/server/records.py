"""What a process has of the database: the directory that follows it, the rules it brings, and the record it writes.

administrators ─► desk ─► database ─► follower ─► directory, stored rules ─► decisions ─► ledger ─► scribe ─► database
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import structlog

from ratelimit_rls.core.accounts import Accounts, Changed, StoredRule
from ratelimit_rls.errors import RecordsUnavailable, StoreError
from ratelimit_rls.identity.api_keys import ApiKeys
from ratelimit_rls.identity.directory import Directory, Index
from ratelimit_rls.records.database import Database
from ratelimit_rls.records.decisions import Scribe, Touched
from ratelimit_rls.records.desk import Desk
from ratelimit_rls.records.follow import Follower
from ratelimit_rls.records.key_secret import key_secret
from ratelimit_rls.records.snapshot import SnapshotFile
from ratelimit_rls.records.use import Counted
from ratelimit_rls.rules.sources.database import StoredRules
from ratelimit_rls.server.upkeep import Upkeep
from ratelimit_rls.settings import Settings
from ratelimit_rls.store.redis.listener import Listener
from ratelimit_rls.store.redis.new import InRedis
from ratelimit_rls.telemetry.collected import Series
from ratelimit_rls.telemetry.instruments import ACCOUNTS, DATABASE_AVAILABLE, FEED_SEQUENCE
from ratelimit_rls.telemetry.ledger import Ledger
from ratelimit_rls.telemetry.metrics import Metrics

log = structlog.get_logger()

CHANNEL = b"rl:changes"
"""Of Redis, behind the prefix of its keys: something in the database is different. What, the database says."""


class Records:
    def __init__(self, settings: Settings, metrics: Metrics, redis: InRedis | None) -> None:
        """Nothing is connected yet. Raises SettingsError if the database's URL, or its secret, cannot be used."""
        self.database = Database(settings.rls_database_url.get_secret_value())
        file = self.database.path if self.database.dialect == "sqlite" else None
        self.key_secret = key_secret(settings.rls_key_secret.get_secret_value(), file)
        self.desk = Desk(self.database, on_commit=self._changed_here)
        self.directory = Directory()
        self.stored_rules = StoredRules()
        self.api_keys = ApiKeys(self.directory, self.key_secret)
        self.ledger = Ledger(
            sample=settings.rls_audit_sample,
            most_waiting=settings.rls_audit_buffer,
            most_lines=settings.rls_usage_lines,
        )
        self.follower = Follower(
            self.desk,
            self.database,
            self._accounts,
            self._changed,
            settings.rls_database_poll.total_seconds(),
            SnapshotFile(Path(settings.rls_snapshot_file)) if settings.rls_snapshot_file else None,
        )
        server_id = f"{socket.gethostname()}-{os.getpid()}"
        self.scribe = Scribe(
            self.database,
            self.ledger,
            server_id=server_id,
            region=settings.rls_region,
            touch=self._touch,
            most_cells=4 * settings.rls_usage_lines,
        )
        self.upkeep = Upkeep(self.database, settings)
        self._rules: dict[str, StoredRule] = {}
        self._news = _listener(settings, redis, self.follower.wake) if redis is not None else None
        self._telling: set[asyncio.Task[None]] = set()
        metrics.watch(self.ledger.gauges)
        metrics.watch(self.scribe.gauges)
        metrics.measure(self.measured)

    async def start(self, stack: AsyncExitStack) -> None:
        """Raises RecordsError if the database is there and is not as this version needs it. If it is away, what was
        last read serves; what is to be undone at the end goes to `stack`."""
        stack.push_async_callback(self.database.close)
        with suppress(RecordsUnavailable):  # the follower says so, and tries again
            await self.database.require_current()
        stack.push_async_callback(self.follower.close)
        await self.follower.start()
        if self._news is not None:
            stack.push_async_callback(self._news.close)
            self._news.start()
        stack.push_async_callback(self.upkeep.close)
        self.upkeep.start()
        stack.push_async_callback(self.scribe.close)
        self.scribe.start()

    def measured(self) -> Iterator[tuple[Series, float]]:
        yield Series(DATABASE_AVAILABLE.name, ()), int(self.follower.state.is_connected)
        yield Series(FEED_SEQUENCE.name, ()), self.directory.sequence
        for kind, size in self.directory.sizes._asdict().items():
            yield Series(ACCOUNTS.name, (kind,)), size

    async def _accounts(self, accounts: Accounts) -> None:
        # In a thread: a hundred thousand users are a tenth of a second in which nothing else would be decided.
        self.directory.load(await asyncio.to_thread(Index, accounts))
        self._rules = {rule.rule_id: rule for rule in accounts.rules}
        self.stored_rules.put(self._rules.values())

    def _changed(self, changed: Changed) -> None:
        self.directory.apply(changed)
        for rule_id, rule in changed.rules.items():
            if rule is None:
                self._rules.pop(rule_id, None)
            else:
                self._rules[rule_id] = rule
        if changed.rules:
            self.stored_rules.put(self._rules.values())

    def _changed_here(self) -> None:
        """This process looks at once; others are told, and look by themselves should they not hear it."""
        self.follower.wake()
        if self._news is not None:
            task = asyncio.get_running_loop().create_task(self._tell(self._news))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _tell(self, news: Listener) -> None:
        try:
            await news.tell(b"changed")
        except StoreError as error:
            log.info("nobody was told of a change over redis", error=str(error))

    async def _touch(self, users: Mapping[str, Touched]) -> None:
        """Keys are known to whoever verifies them, whether descriptors name them or not."""
        used = self.api_keys.take_used()
        try:
            await self.desk.touch_keys(used)
        except BaseException:  # even if we are to end: whoever writes last tries once more
            self.api_keys.put_back(used)
            raise
        await self.desk.count_users({user: Counted(*touched) for user, touched in users.items()})


def _listener(settings: Settings, redis: InRedis, wake: Callable[[], None]) -> Listener:
    return Listener(
        f"{settings.redis}, for changes",
        redis.realms[0].connect_to_listen(),
        settings.cache_key_prefix.encode() + CHANNEL,
        lambda _: wake(),
        in_vain="changes are noticed by polling alone",
        on_connection=lambda up: wake() if up else None,  # what was said meanwhile was not heard
    )
