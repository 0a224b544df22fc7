"""The counters in Redis apart from deciding: which there are, forgetting some, and telling every process of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence

from ratelimit_rls.errors import StoreError
from ratelimit_rls.store.batch import PackedPlan
from ratelimit_rls.store.redis.commands import word_of
from ratelimit_rls.store.redis.servers import Servers

MOST_TOLD_AT_ONCE = 500
"""Keys in one message to the other processes."""

_log = logging.getLogger(__name__)


class RedisCounters:
    """`realms` are servers that know nothing of each other; the same key means another counter in each."""

    decides_here = False

    def __init__(self, *realms: Servers) -> None:
        self.realms = realms
        self._telling: set[asyncio.Task[None]] = set()

    @property
    def connected(self) -> bool:
        return all(servers.connected for servers in self.realms)

    async def start(self) -> None:
        """Connect and load the script. Raises StoreError if that cannot be done now."""
        for servers in self.realms:
            await servers.start()

    def start_in_background(self) -> None:
        """Returns at once; until there is a connection every call is answered with a StoreUnavailable."""
        for servers in self.realms:
            servers.start_in_background()

    async def present(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of the keys that have a state."""
        return await self._found(b"EXISTS", keys)

    async def forget(self, keys: Sequence[bytes]) -> list[bytes]:
        """Drop the states under these keys; returns those that had one."""
        forgotten = await self._found(b"UNLINK", keys)
        await self._tell(keys)
        return forgotten

    async def _found(self, verb: bytes, keys: Sequence[bytes]) -> list[bytes]:
        """The keys of which the verb says that it found one."""
        told = await asyncio.gather(*(servers.each(verb, keys) for servers in self.realms))
        return [key for key, *found in zip(keys, *told, strict=True) if any(found)]

    async def scan(self, match: bytes) -> AsyncIterator[list[bytes]]:
        """The keys there are, by and by; one may come twice. Raises StoreError."""
        for servers in self.realms:
            async for keys in servers.scan(match):
                yield keys

    def tell_freed(self, batch: Iterable[PackedPlan[bytes]]) -> None:
        """Tell every process, in the background, which keys the batch gave back to: refusals may be over."""
        giving = [plan for plan in batch if plan.form.gives_back or plan.charged_at_us is not None]
        if giving:
            keys = [word_of(key) for plan in giving for key in plan.keys]
            task = asyncio.create_task(self._try_to_tell(keys))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _try_to_tell(self, keys: Sequence[bytes]) -> None:
        try:
            await self._tell(keys)
        except StoreError as exc:
            # Who listens has lost its connection as well, and forgets all it remembers.
            _log.debug("others were not told which keys were freed: %s", exc)

    async def _tell(self, keys: Sequence[bytes]) -> None:
        """In the first realm, where everybody listens."""
        distinct = list(dict.fromkeys(keys))
        for at in range(0, len(distinct), MOST_TOLD_AT_ONCE):
            # No key has a line break in it (core/keys.py).
            await self.realms[0].publish(b"\n".join(distinct[at : at + MOST_TOLD_AT_ONCE]))

    async def close(self) -> None:
        await asyncio.gather(*self._telling, return_exceptions=True)
        for servers in self.realms:
            await servers.close()
