"""Discovery of the master through Redis Sentinel.

Sentinels are queried in turn, beginning with the one that answered last, so that a dead one does not delay every query.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from ratelimit_rls.errors import StoreUnavailable, one_line
from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers
from ratelimit_rls.store.redis.connection import PipelinedConnection, ReplyError, connect
from ratelimit_rls.store.redis.resp import command

MIN_ANSWER_S = 0.05
"""Minimum time for a sentinel, even if the previous ones have used up the timeout."""

MAX_ANSWER_S = 1.0
"""Timeout of a polled sentinel, after which the next one is polled."""

POLL_INTERVAL_S = 0.2
"""Interval of polling. A replaced master loses the writes it still accepts, so poll often; it is cheap for Sentinel."""

_last_responsive: dict[RedisServers, RedisAddress] = {}
"""The sentinel that answered last, for each Sentinel deployment: one or two in a process."""


async def find_master(servers: RedisServers, timeout_s: float) -> RedisAddress:
    """Return the address of the master, within the timeout. Only the server itself can confirm that it still is one.

    Raises StoreUnavailable with the error of each sentinel.
    """
    assert servers.data is not None, "only a Sentinel deployment has a master"
    first = _last_responsive.get(servers, servers.addresses[0])
    sentinels = [first, *(sentinel for sentinel in servers.addresses if sentinel != first)]
    ends = asyncio.get_running_loop().time() + timeout_s
    errors: list[str] = []
    for position, sentinel in enumerate(sentinels):
        left_s = max(MIN_ANSWER_S, ends - asyncio.get_running_loop().time())
        # One that hangs takes half of the remaining time, so that the others have some left.
        attempt_s = left_s if position == len(sentinels) - 1 else left_s / 2
        try:
            host, port = await _query(sentinel, servers.master, attempt_s)
        except StoreUnavailable as exc:
            errors.append(str(exc))
            continue
        _last_responsive[servers] = sentinel
        return replace(servers.data, host=host, port=port)
    raise StoreUnavailable(f"no sentinel knows the address of the master {servers.master!r}: {'; '.join(errors)}")


async def watch_master(
    servers: RedisServers, on_master: Callable[[RedisAddress], None], pause_s: float = POLL_INTERVAL_S
) -> None:
    """Report the address of the master repeatedly, until cancelled.

    A healthy master that is replaced stays one for about ten seconds: it accepts writes that will be lost, and the
    connection to it does not break. Only the sentinels know.
    """
    assert servers.data is not None, "only a Sentinel deployment has a master"
    for sentinel in itertools.cycle(servers.addresses):
        with suppress(StoreUnavailable):
            async with _connected(sentinel, MAX_ANSWER_S) as connection:
                while True:
                    host, port = await _master_address(connection, sentinel, servers.master, MAX_ANSWER_S)
                    # A process that leaves a master must not be sent back by a sentinel that has not noticed yet.
                    _last_responsive[servers] = sentinel
                    on_master(replace(servers.data, host=host, port=port))
                    await asyncio.sleep(pause_s)
        await asyncio.sleep(pause_s)


async def _query(sentinel: RedisAddress, master: str, timeout_s: float) -> tuple[str, int]:
    try:
        async with asyncio.timeout(timeout_s), _connected(sentinel, timeout_s) as connection:
            return await _master_address(connection, sentinel, master, timeout_s)
    except TimeoutError:
        raise StoreUnavailable(f"the sentinel at {sentinel} did not answer within {timeout_s:.2g} s") from None


@asynccontextmanager
async def _connected(sentinel: RedisAddress, timeout_s: float) -> AsyncIterator[PipelinedConnection]:
    connection = await connect(sentinel, timeout_s)
    try:
        yield connection
    finally:
        connection.abort()


async def _master_address(
    connection: PipelinedConnection, sentinel: RedisAddress, master: str, timeout_s: float
) -> tuple[str, int]:
    question = command(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", master.encode())
    try:
        async with asyncio.timeout(timeout_s):
            reply = await connection.send(question)
    except TimeoutError:
        raise StoreUnavailable(f"the sentinel at {sentinel} did not answer within {timeout_s:.2g} s") from None
    if reply is None:
        raise StoreUnavailable(f"the sentinel at {sentinel} has no master of this name")
    if isinstance(reply, ReplyError):
        raise StoreUnavailable(f"the sentinel at {sentinel} returned an error: {one_line(str(reply))}")
    try:
        host, port = reply
        return host.decode(), int(port)
    except (TypeError, ValueError, AttributeError):
        raise StoreUnavailable(f"the sentinel at {sentinel} did not return a host and a port") from None
