"""Services of a process that need the database: account directory, stored rules, and recorded decisions and usage.

administrators ─► repository ─► database ─► follower ─► directory, stored rules
decisions ─► recorder ─► writer ─► database
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import structlog

from ratelimit_rls.database.change_follower import ChangeFollower
from ratelimit_rls.database.configuration import Configuration, ConfigurationChanges
from ratelimit_rls.database.database import Database
from ratelimit_rls.database.hash_secret import load_key_secret
from ratelimit_rls.database.repository import Repository
from ratelimit_rls.database.snapshot_file import SnapshotFile
from ratelimit_rls.database.usage.counters import UserUsage
from ratelimit_rls.database.usage.writer import UsageWriter, UserActivity
from ratelimit_rls.errors import DatabaseUnavailable, StoreError
from ratelimit_rls.identity.api_keys import ApiKeyVerifier
from ratelimit_rls.identity.directory import AccountIndex, Directory
from ratelimit_rls.rules.sources.database import StoredRulesSource
from ratelimit_rls.rules.stored_rule import StoredRule
from ratelimit_rls.server.maintenance import Maintenance
from ratelimit_rls.settings import Settings
from ratelimit_rls.store.redis.factory import AnyRedisStore
from ratelimit_rls.store.redis.pubsub import PubSub
from ratelimit_rls.telemetry.instruments import ACCOUNTS, DATABASE_AVAILABLE, DATABASE_WRITABLE, FEED_SEQUENCE
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.telemetry.series import Series
from ratelimit_rls.telemetry.usage_recorder import UsageRecorder

_log = structlog.get_logger()

CHANGES_CHANNEL = b"rl:changes"
"""Redis channel (after the key prefix) that announces a change in the database.

The change itself is read from there.
"""


class DatabaseServices:
    def __init__(self, settings: Settings, metrics: Metrics, redis: AnyRedisStore | None) -> None:
        """Construct without connecting. Raises SettingsError if the database URL or the key secret is unusable."""
        self.database = Database(settings.rls_database_url.get_secret_value())
        file = self.database.path if self.database.dialect == "sqlite" else None
        self.key_secret = load_key_secret(settings.rls_key_secret.get_secret_value(), file)
        self.repository = Repository(self.database, on_commit=self._on_commit)
        self.directory = Directory()
        self.stored_rules = StoredRulesSource()
        self.api_keys = ApiKeyVerifier(self.directory, self.key_secret)
        self.usage_recorder = UsageRecorder(
            sample=settings.rls_audit_sample,
            max_waiting=settings.rls_audit_buffer,
            max_lines=settings.rls_usage_lines,
            denials_per_minute=settings.rls_audit_refusals_per_minute,
        )
        self.follower = ChangeFollower(
            self.repository,
            self.database,
            self._load_accounts,
            self._apply_changes,
            settings.rls_database_poll.total_seconds(),
            SnapshotFile(Path(settings.rls_snapshot_file)) if settings.rls_snapshot_file else None,
        )
        server_id = f"{socket.gethostname()}-{os.getpid()}"
        self.usage_writer = UsageWriter(
            self.database,
            self.usage_recorder,
            server_id=server_id,
            region=settings.rls_region,
            touch=self._touch,
            max_cells=4 * settings.rls_usage_lines,
        )
        self.maintenance = Maintenance(self.database, settings)
        self._rules: dict[str, StoredRule] = {}
        self._pubsub = _listener(settings, redis, self.follower.wake) if redis is not None else None
        self._publishing: set[asyncio.Task[None]] = set()
        metrics.export_values(self.usage_recorder.gauges)
        metrics.export_values(self.usage_writer.gauges)
        metrics.export_series(self.measured)

    async def start(self, stack: AsyncExitStack) -> None:
        """Start all services and register their cleanup on `stack`.

        Raises DatabaseError if the schema is not the one this version needs. If the database is unavailable, the last
        snapshot is used.
        """
        stack.push_async_callback(self.database.close)
        with suppress(DatabaseUnavailable):  # the follower logs it and retries
            await self.database.require_current()
        stack.push_async_callback(self.follower.close)
        await self.follower.start()
        if self._pubsub is not None:
            stack.push_async_callback(self._pubsub.close)
            self._pubsub.start()
        stack.push_async_callback(self.maintenance.close)
        self.maintenance.start()
        stack.push_async_callback(self.usage_writer.close)
        self.usage_writer.start()

    def measured(self) -> Iterator[tuple[Series, float]]:
        yield Series(DATABASE_AVAILABLE.name, ()), int(self.follower.state.is_connected)
        yield Series(DATABASE_WRITABLE.name, ()), int(self.database.write_health.writes_succeed)
        yield Series(FEED_SEQUENCE.name, ()), self.directory.sequence
        for kind, size in self.directory.sizes._asdict().items():
            yield Series(ACCOUNTS.name, (kind,)), size

    async def _load_accounts(self, accounts: Configuration) -> None:
        # In a thread: indexing 100,000 users takes 0.1 s, which would block all decisions.
        self.directory.load(await asyncio.to_thread(AccountIndex, accounts))
        self._rules = {rule.rule_id: rule for rule in accounts.rules}
        self.stored_rules.put(self._rules.values())

    def _apply_changes(self, changed: ConfigurationChanges) -> None:
        self.directory.apply(changed)
        for rule_id, rule in changed.rules.items():
            if rule is None:
                self._rules.pop(rule_id, None)
            else:
                self._rules[rule_id] = rule
        if changed.rules:
            self.stored_rules.put(self._rules.values())

    def _on_commit(self) -> None:
        """Read the change in this process at once and notify the others, which also poll in case they miss it."""
        self.follower.wake()
        if self._pubsub is not None:
            task = asyncio.get_running_loop().create_task(self._publish(self._pubsub))
            self._publishing.add(task)
            task.add_done_callback(self._publishing.discard)

    async def _publish(self, pubsub: PubSub) -> None:
        try:
            await pubsub.publish(b"changed")
        except StoreError as error:
            _log.info("change_publish_failed", error=str(error))

    async def _touch(self, users: Mapping[str, UserActivity]) -> None:
        """Write the last use of keys and users.

        Used keys come from the verifier, whether descriptors name them or not.
        """
        used = self.api_keys.take_usage()
        try:
            await self.repository.touch_keys(used)
        except BaseException:  # even on cancellation: the final write tries once more
            self.api_keys.put_back(used)
            raise
        await self.repository.count_users({user: UserUsage(*touched) for user, touched in users.items()})


def _listener(settings: Settings, redis: AnyRedisStore, wake: Callable[[], None]) -> PubSub:
    return PubSub(
        f"{settings.redis}, for changes",
        redis.realms[0].pubsub_connect(),
        settings.cache_key_prefix.encode() + CHANGES_CHANNEL,
        lambda _: wake(),
        consequence="changes are noticed by polling alone",
        on_connection=lambda up: wake() if up else None,  # messages sent while disconnected were lost
    )
