"""One Redis server that decides: runs of the script go out together, and come back in order."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ratelimit_rls.errors import StoreTimeout, StoreUnavailable
from ratelimit_rls.store.batch import COUNTED_ONCE_S, PackedPlan, pack_batch
from ratelimit_rls.store.redis.commands import bulk, command
from ratelimit_rls.store.redis.connect import Pipe, ReplyError
from ratelimit_rls.store.redis.line import Connect, Line
from ratelimit_rls.store.script import script, script_sha

Run = Sequence[PackedPlan[bytes]]
"""Plans that one run of the script decides."""

CHANNEL = b"rl:freed"
"""Where is told which keys have been given something back, or were forgotten (after the prefix of the keys)."""


@dataclass(frozen=True, slots=True)
class Terms:
    """How servers are used, whichever they are."""

    timeout_s: float = 1.0
    connect_timeout_s: float = 10.0
    jitter_ms: int = 0
    once_s: int = COUNTED_ONCE_S
    key_prefix: bytes = b""
    must_write: bool = True  # a server counts only if it takes writes; not for who only looks, or forgets
    clock: Callable[[], int] | None = None  # for tests; without one, the server's own time decides
    on_connection: Callable[[bool], None] = lambda connected: None

    @property
    def channel(self) -> bytes:
        return self.key_prefix + CHANNEL


class Node:
    def __init__(self, name: str, connect: Connect, terms: Terms, *, must_write: bool = True) -> None:
        """`must_write`: a connection counts only if the server takes a write, so not to a replica.

        On a cluster a key belongs to one server, and which of them are masters is known otherwise.
        """
        self._terms = terms
        self._must_write = must_write
        self.line = Line(
            name,
            connect,
            self._greet,
            timeout_s=terms.timeout_s,
            connect_timeout_s=terms.connect_timeout_s,
            on_connection=terms.on_connection,
        )

    async def _greet(self, pipe: Pipe, timeout_s: float) -> None:
        greetings = [command(b"SCRIPT", b"LOAD", script())]
        if self._must_write and self._terms.must_write:
            probe = self._terms.key_prefix + b"rl:probe"
            greetings += command(b"SET", probe, b"1", b"PX", b"1000"), command(b"DEL", probe)
        try:
            async with asyncio.timeout(timeout_s):
                replies = await asyncio.gather(*map(pipe.send, greetings))
        except TimeoutError as exc:
            raise StoreTimeout(f"Redis at {self.line.name} did not take the script within {timeout_s:g} s") from exc
        for reply in replies:
            if isinstance(reply, ReplyError):
                raise StoreUnavailable(f"Redis at {self.line.name} does not serve: {reply}{hint(reply)}")

    async def decide(self, runs: Sequence[Run], *, asking: bool = False) -> list[Any]:
        """For each run its reply, a ReplyError, or a StoreError. Raises StoreUnavailable if there is no connection.

        `asking`: its slot is about to move here, and only who asks is let in.
        """
        arguments = [self._arguments(run) for run in runs]
        replies = await self._sent([_evalsha(one) for one in arguments], asking)
        again = [at for at, reply in enumerate(replies) if is_error(reply, "NOSCRIPT")]
        if again:
            # The server says that it did not run, so it may be sent again; with the text this time, which also brings
            # the script back for everybody.
            for at, reply in zip(again, await self._sent([_eval(arguments[at]) for at in again], asking), strict=True):
                replies[at] = reply
        return replies

    async def _sent(self, commands: Sequence[bytes], asking: bool) -> list[Any]:
        if not asking:
            with self.line.send(commands) as sent:
                return await sent.replies()
        with self.line.send([word for one in commands for word in (command(b"ASKING"), one)]) as sent:
            return (await sent.replies())[1::2]

    def _arguments(self, run: Run) -> tuple[int, bytes]:
        """How many arguments, and all of them, from the number of keys on."""
        terms = self._terms
        now_us = terms.clock() if terms.clock else None
        packed = pack_batch(run, time.time_ns() // 1000 if now_us is None else now_us, terms.once_s)
        now = b"" if now_us is None else b"%d" % now_us
        jitter_ms = random.randrange(terms.jitter_ms) if terms.jitter_ms else 0
        count = 1 + len(packed.keys) + 3 + 6 * len(packed.specs)
        arguments = [bulk(b"%d" % len(packed.keys)), *packed.keys]
        arguments += bulk(now), bulk(b"%d" % jitter_ms), bulk(packed.calls), *packed.specs
        return count, b"".join(arguments)

    async def close(self) -> None:
        await self.line.close()


def hint(error: ReplyError) -> str:
    """What to do about an error of a server that is thought to be the only one."""
    return "; it is a node of a cluster, so set REDIS_TYPE=CLUSTER" if str(error).startswith("MOVED") else ""


def is_error(reply: Any, word: str) -> bool:
    return isinstance(reply, ReplyError) and str(reply).startswith(word)


def _evalsha(arguments: tuple[int, bytes]) -> bytes:
    count, packed = arguments
    return b"*%d\r\n$7\r\nEVALSHA\r\n%s%s" % (count + 2, bulk(script_sha()), packed)


def _eval(arguments: tuple[int, bytes]) -> bytes:
    count, packed = arguments
    return b"*%d\r\n$4\r\nEVAL\r\n%s%s" % (count + 2, bulk(script()), packed)
