"""The counters in Redis apart from decisions: listing, deleting, and notifying every process of freed ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable, Iterable, Sequence

import structlog

from ratelimit_rls.errors import StoreError
from ratelimit_rls.store.redis.deployment import Deployment
from ratelimit_rls.store.redis.resp import bulk_value
from ratelimit_rls.store.script_codec import EncodedPlan

MAX_KEYS_PER_MESSAGE = 500
"""Maximum number of keys in one message to the other processes."""

_log = structlog.get_logger()


class RedisKeyspace:
    """Counters in one or two independent deployments (`realms`); the same key is a different counter in each."""

    is_synchronous = False

    def __init__(self, *realms: Deployment) -> None:
        self.realms = realms
        self._publishing: set[asyncio.Task[None]] = set()

    def decode_key(self, key: Hashable) -> bytes:
        assert isinstance(key, bytes)
        return bulk_value(key)

    @property
    def connected(self) -> bool:
        return all(deployment.connected for deployment in self.realms)

    async def start(self) -> None:
        """Connect and load the script. Raises StoreError if that is not possible now."""
        for deployment in self.realms:
            await deployment.start()

    def start_in_background(self) -> None:
        """Connect in the background. Returns immediately; until connected, every result is a StoreUnavailable."""
        for deployment in self.realms:
            deployment.start_in_background()

    async def present(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys that have a state."""
        return await self._keys_matching(b"EXISTS", keys)

    async def forget(self, keys: Sequence[bytes]) -> list[bytes]:
        """Delete the states under these keys, and return the keys that had one."""
        deleted = await self._keys_matching(b"UNLINK", keys)
        await self._publish(keys)
        return deleted

    async def _keys_matching(self, command: bytes, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys for which the command found a state."""
        replies = await asyncio.gather(*(deployment.execute_each(command, keys) for deployment in self.realms))
        return [key for key, *found in zip(keys, *replies, strict=True) if any(found)]

    async def scan(self, match: bytes) -> AsyncIterator[list[bytes]]:
        """Yield the existing keys in batches; a key may occur twice. Raises StoreError."""
        for deployment in self.realms:
            async for keys in deployment.scan(match):
                yield keys

    def publish_freed(self, batch: Iterable[EncodedPlan[bytes]]) -> None:
        """Notify every process, in the background, which keys the batch freed: cached denials may be over."""
        refunding = [plan for plan in batch if plan.layout.frees_capacity or plan.charged_at_us is not None]
        if refunding:
            keys = [bulk_value(key) for plan in refunding for key in plan.keys]
            task = asyncio.create_task(self._try_publish(keys))
            self._publishing.add(task)
            task.add_done_callback(self._publishing.discard)

    async def _try_publish(self, keys: Sequence[bytes]) -> None:
        try:
            await self._publish(keys)
        except StoreError as exc:
            # Subscribers have lost their connection as well, and empty their caches.
            _log.debug("freed_keys_not_published", error=str(exc))

    async def _publish(self, keys: Sequence[bytes]) -> None:
        """Publish keys in the first realm, where every process subscribes."""
        distinct = list(dict.fromkeys(keys))
        for at in range(0, len(distinct), MAX_KEYS_PER_MESSAGE):
            # Keys contain no line breaks (core/storage_keys.py).
            await self.realms[0].publish(b"\n".join(distinct[at : at + MAX_KEYS_PER_MESSAGE]))

    async def close(self) -> None:
        await asyncio.gather(*self._publishing, return_exceptions=True)
        for deployment in self.realms:
            await deployment.close()
