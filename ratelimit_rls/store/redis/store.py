"""Batches to one Redis server.

    calls of one turn of the loop ─► runs of at most 128 limits ─► one EVALSHA each ─► answers

Several batches may be under way at once on the one connection; Redis answers them in order. A batch without an answer
in time takes the connection with it: everything behind it would be late too, and nothing piles up.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import structlog

from ratelimit_rls.core.model import Answer, Outline, Plan
from ratelimit_rls.core.plan import per_outline
from ratelimit_rls.core.refund import Refund
from ratelimit_rls.errors import StoreError, StoreTimeout, StoreUnavailable
from ratelimit_rls.settings.redis_address import RedisAddress
from ratelimit_rls.store.base import Prepared
from ratelimit_rls.store.batch import Form, PackedPlan, Spec, form_of, pack_batch, runs, unpack
from ratelimit_rls.store.redis.connect import Pipe, ReplyError, connect
from ratelimit_rls.store.script import script, script_sha

log = structlog.get_logger()

SHORTEST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
"""Between attempts to reconnect: soon enough that service is back within a second of Redis."""


class RedisStore:
    def __init__(
        self,
        address: RedisAddress,
        *,
        timeout_s: float = 1.0,
        connect_timeout_s: float = 10.0,
        jitter_ms: int = 0,
        clock: Callable[[], int] | None = None,
        on_connection: Callable[[bool], None] = lambda connected: None,
    ) -> None:
        """`clock` is for tests; without one, the server's own time decides."""
        self._address = address
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._jitter_ms = jitter_ms
        self._clock = clock
        self._on_connection = on_connection
        self._pipe: Pipe | None = None
        self._keeper: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        return self._pipe is not None and not self._pipe.closed.done()

    async def start(self) -> None:
        """Connect and load the script. Raises StoreUnavailable if that cannot be done now."""
        await self._connect()
        self._keeper = asyncio.create_task(self._keep_connected())

    async def _connect(self) -> None:
        pipe = await connect(self._address, self._connect_timeout_s)
        try:
            reply = await asyncio.wait_for(pipe.send(_command(b"SCRIPT", b"LOAD", script())), self._connect_timeout_s)
        except TimeoutError as exc:
            pipe.abort()
            late = f"Redis at {self._address} did not take the script within {self._connect_timeout_s:g} s"
            raise StoreTimeout(late) from exc
        if isinstance(reply, ReplyError):
            pipe.abort()
            raise StoreUnavailable(f"Redis at {self._address} does not take the script: {reply}")
        self._pipe = pipe
        self._on_connection(True)

    async def _keep_connected(self) -> None:
        """Wait for the connection to break, and bring it back; for as long as the store is open."""
        pause_s = SHORTEST_PAUSE_S
        while True:
            if self._pipe is not None:
                await asyncio.shield(self._pipe.closed)
                self._pipe = None
                self._on_connection(False)
                log.warning("redis connection lost", address=str(self._address))
                pause_s = SHORTEST_PAUSE_S
            try:
                await self._connect()
                log.warning("redis connection restored", address=str(self._address))
            except StoreError as exc:
                # The first reason is worth a line; the same one every second is not.
                tell = log.warning if pause_s == SHORTEST_PAUSE_S else log.debug
                tell("redis is away", error=str(exc))
                await asyncio.sleep(pause_s * random.uniform(0.5, 1))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def prepare(self, plan: Plan) -> Prepared:
        return PackedPlan(tuple(map(_bulk, plan.keys)), _form(plan.outline))

    def opposite(self, prepared: Prepared, refund: Refund) -> Prepared:
        keys = cast("PackedPlan[bytes]", prepared).keys
        own = tuple(keys[number] for number in refund.numbers)
        return PackedPlan(own, _form(refund.outline), charged_at_us=refund.charged_at_us)

    async def spend(self, batch: Sequence[Prepared]) -> list[Answer | StoreError]:
        pipe = self._pipe
        if pipe is None:
            return [StoreUnavailable(f"no connection to Redis at {self._address}")] * len(batch)
        pieces = list(runs(cast("Sequence[PackedPlan[bytes]]", batch)))
        commands = [self._arguments(piece) for piece in pieces]
        replies = [pipe.send(_evalsha(command)) for command in commands]
        answers: list[Answer | StoreError] = []
        try:
            for piece, command, told in zip(pieces, commands, await self._told(pipe, replies), strict=True):
                if isinstance(told, ReplyError) and str(told).startswith("NOSCRIPT"):
                    # The server says that it did not run, so this is the one case in which a batch may be sent again;
                    # with the text this time, which also brings the script back for everybody.
                    replies.append(pipe.send(_eval(command)))
                    (told,) = await self._told(pipe, replies[-1:])
                answers += _answers(piece, told)
        finally:
            for reply in replies:  # of a caller that has gone: whatever comes of them, nobody is there to be told
                reply.cancel()
        return answers

    async def _told(self, pipe: Pipe, replies: Sequence[asyncio.Future[Any]]) -> list[Any]:
        """What each reply says, a StoreError where there is none. What has come counts, even if it was read late."""
        await asyncio.wait(replies, timeout=self._timeout_s)
        late = [reply for reply in replies if reply.cancel()]
        if late:
            pipe.abort()
        why = StoreTimeout(f"no answer from Redis at {self._address} within {self._timeout_s:g} s")
        return [why if reply.cancelled() else reply.exception() or reply.result() for reply in replies]

    def _arguments(self, piece: Sequence[PackedPlan[bytes]]) -> tuple[int, bytes]:
        """How many arguments, and all of them, from the number of keys on."""
        now_us = self._clock() if self._clock else None
        packed = pack_batch(piece, time.time_ns() // 1000 if now_us is None else now_us)
        now = b"" if now_us is None else b"%d" % now_us
        jitter_ms = random.randrange(self._jitter_ms) if self._jitter_ms else 0
        count = 1 + len(packed.keys) + 3 + 6 * len(packed.specs)
        arguments = [_bulk(b"%d" % len(packed.keys)), *packed.keys]
        arguments += _bulk(now), _bulk(b"%d" % jitter_ms), _bulk(packed.calls), *packed.specs
        return count, b"".join(arguments)

    async def present(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of the keys that have a state."""
        return await self._those(keys, b"EXISTS")

    async def forget(self, keys: Sequence[bytes]) -> list[bytes]:
        """Drop the states under these keys; returns those that had one."""
        return await self._those(keys, b"UNLINK")

    async def _those(self, keys: Sequence[bytes], command: bytes) -> list[bytes]:
        """The keys of which the command says that it found one."""
        pipe = self._pipe
        if pipe is None:
            raise StoreUnavailable(f"no connection to Redis at {self._address}")
        told = await self._told(pipe, [pipe.send(_command(command, key)) for key in keys])
        for reply in told:
            if isinstance(reply, StoreError):
                raise reply
            if isinstance(reply, ReplyError):
                raise StoreUnavailable(f"Redis at {self._address} refused {command.decode()}: {reply}")
        return [key for key, reply in zip(keys, told, strict=True) if reply]

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._pipe is not None:
            self._pipe.abort()
            await asyncio.shield(self._pipe.closed)


def _answers(piece: Sequence[PackedPlan[bytes]], told: Any) -> Sequence[Answer | StoreError]:
    if isinstance(told, ReplyError):
        told = StoreUnavailable(f"Redis refused the batch: {told}")
    return [told] * len(piece) if isinstance(told, StoreError) else unpack(piece, told)


@per_outline
def _form(outline: Outline) -> Form[bytes]:
    """Specs as RESP, so that a batch is joined from them as they are."""
    return form_of(outline, _spec)


def _spec(spec: Spec) -> bytes:
    return b"".join([_bulk(word if isinstance(word, bytes) else b"%d" % word) for word in spec])


def _bulk(value: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(value), value)


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n%s" % (len(words), b"".join(map(_bulk, words)))


def _evalsha(arguments: tuple[int, bytes]) -> bytes:
    count, packed = arguments
    return b"*%d\r\n$7\r\nEVALSHA\r\n%s%s" % (count + 2, _bulk(script_sha()), packed)


def _eval(arguments: tuple[int, bytes]) -> bytes:
    count, packed = arguments
    return b"*%d\r\n$4\r\nEVAL\r\n%s%s" % (count + 2, _bulk(script()), packed)
