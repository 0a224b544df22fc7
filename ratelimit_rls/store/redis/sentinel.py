"""Where the master is, as the sentinels say.

They are asked in turn, the one that answered last time first, so that a dead one is not waited for again and again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from ratelimit_rls.errors import StoreUnavailable, one_line
from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers
from ratelimit_rls.store.redis.commands import command
from ratelimit_rls.store.redis.connect import Pipe, ReplyError, connect

SHORTEST_ANSWER_S = 0.05
"""What a sentinel is given, even when those before it have used up all the time."""

LONGEST_ANSWER_S = 1.0
"""Of a sentinel that is watched: then the next one is."""

WATCH_EVERY_S = 0.2
"""What a master takes after it was replaced is lost, so it is asked often; it costs the sentinel next to nothing."""

_answered: dict[RedisServers, RedisAddress] = {}
"""The sentinel that answered last, for each Redis that is found so: one or two in a process."""


async def find_master(servers: RedisServers, timeout_s: float) -> RedisAddress:
    """How to reach the master, within that time. Whether it still is one, only itself can say.

    Raises StoreUnavailable with what each sentinel said.
    """
    assert servers.data is not None, "only sentinels know of a master"
    first = _answered.get(servers, servers.addresses[0])
    in_turn = [first, *(sentinel for sentinel in servers.addresses if sentinel != first)]
    ends = asyncio.get_running_loop().time() + timeout_s
    said: list[str] = []
    for place, sentinel in enumerate(in_turn):
        left_s = max(SHORTEST_ANSWER_S, ends - asyncio.get_running_loop().time())
        # One that hangs takes half of what is left, so that there is something left for those after it.
        patience_s = left_s if place == len(in_turn) - 1 else left_s / 2
        try:
            host, port = await _ask(sentinel, servers.master, patience_s)
        except StoreUnavailable as exc:
            said.append(str(exc))
            continue
        _answered[servers] = sentinel
        return replace(servers.data, host=host, port=port)
    raise StoreUnavailable(f"no sentinel tells where the master {servers.master!r} is: {'; '.join(said)}")


async def watch_master(
    servers: RedisServers, on_told: Callable[[RedisAddress], None], pause_s: float = WATCH_EVERY_S
) -> None:
    """For as long as it runs: tell where the master is, again and again.

    A master that is replaced while it is well stays one for about ten seconds: it takes writes that will be lost, and
    the connection to it does not break. Nobody but the sentinels knows better.
    """
    assert servers.data is not None, "only sentinels know of a master"
    for sentinel in itertools.cycle(servers.addresses):
        with suppress(StoreUnavailable):
            async with _asked(sentinel, LONGEST_ANSWER_S) as pipe:
                while True:
                    host, port = await _where(pipe, sentinel, servers.master, LONGEST_ANSWER_S)
                    # Whoever leaves a master on this word must not be sent back by one that has not heard of it yet.
                    _answered[servers] = sentinel
                    on_told(replace(servers.data, host=host, port=port))
                    await asyncio.sleep(pause_s)
        await asyncio.sleep(pause_s)


async def _ask(sentinel: RedisAddress, master: str, timeout_s: float) -> tuple[str, int]:
    try:
        async with asyncio.timeout(timeout_s), _asked(sentinel, timeout_s) as pipe:
            return await _where(pipe, sentinel, master, timeout_s)
    except TimeoutError:
        raise StoreUnavailable(f"the sentinel at {sentinel} did not answer within {timeout_s:.2g} s") from None


@asynccontextmanager
async def _asked(sentinel: RedisAddress, timeout_s: float) -> AsyncIterator[Pipe]:
    pipe = await connect(sentinel, timeout_s)
    try:
        yield pipe
    finally:
        pipe.abort()


async def _where(pipe: Pipe, sentinel: RedisAddress, master: str, timeout_s: float) -> tuple[str, int]:
    question = command(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", master.encode())
    try:
        async with asyncio.timeout(timeout_s):
            reply = await pipe.send(question)
    except TimeoutError:
        raise StoreUnavailable(f"the sentinel at {sentinel} did not answer within {timeout_s:.2g} s") from None
    if reply is None:
        raise StoreUnavailable(f"the sentinel at {sentinel} knows no master of this name")
    if isinstance(reply, ReplyError):
        raise StoreUnavailable(f"the sentinel at {sentinel} refused: {one_line(str(reply))}")
    try:
        host, port = reply
        return host.decode(), int(port)
    except (TypeError, ValueError, AttributeError):
        raise StoreUnavailable(f"the sentinel at {sentinel} did not answer with a host and a port") from None
