"""Servers that answer but cannot run the script: one sentence says why, and they are used once that is fixed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest
from pydantic import SecretStr

from ratelimit_rls.core.model import StoreResult
from ratelimit_rls.errors import StoreUnavailable, StoreUnusable
from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers
from ratelimit_rls.store.redis.factory import redis_store
from ratelimit_rls.store.redis.script_node import RedisOptions
from tests.support.redis_servers import RedisCluster
from tests.support.servers import RedisServer, redis_binaries
from tests.support.stores import call, long_step

NO_SCRIPT = (
    "its user may not run the script with FCALL or EVALSHA: grant +evalsha +eval +script|load, "
    "and on Redis 7 and Valkey +fcall +function|load"
)
REPLICA = "it is a replica, which accepts no writes: name its master, or the sentinels with REDIS_TYPE=SENTINEL"
USER, PASSWORD = "limiter", "hush"


class Unusable(NamedTuple):
    server: RedisServer
    reason: str
    fix: Callable[[], object]
    user: str = ""

    @property
    def address(self) -> RedisAddress:
        return RedisAddress(
            "127.0.0.1", self.server.port, username=self.user, password=SecretStr(PASSWORD if self.user else "")
        )


def set_user(server: RedisServer, *rights: str) -> None:
    server.cli("ACL", "SETUSER", USER, "reset", "on", f">{PASSWORD}", "~rl:*", "&*", "+@all", *rights)


def without(server: RedisServer, *rights: str, reason: str = NO_SCRIPT) -> Unusable:
    set_user(server, *rights)
    return Unusable(server, reason, lambda: set_user(server), USER)


def no_form(server: RedisServer, _: ExitStack) -> Unusable:
    """The script can be loaded but not run."""
    return without(server, "-evalsha", "-eval", *(["-fcall"] if has_functions(server) else []))


def no_scripting(server: RedisServer, _: ExitStack) -> Unusable:
    return without(server, "-@scripting")


def no_command_of_the_script(server: RedisServer, _: ExitStack) -> Unusable:
    """The permissions are those that an earlier release needed."""
    which = "EXISTS" if "valkey" in server.binary.name else "all commands"
    reason = f"its user may not run {which} in the script: grant what docs/operations.md lists for a dedicated user"
    return without(server, "-incrby", "-get", "-exists", reason=reason)


def no_undo(server: RedisServer, _: ExitStack) -> Unusable:
    """A run that charges and then fails could not delete the counter again."""
    return without(server, "-del", reason="grant what docs/operations.md lists for a dedicated user")


def other_keys(server: RedisServer, _: ExitStack) -> Unusable:
    server.cli("ACL", "SETUSER", USER, "reset", "on", f">{PASSWORD}", "~other:*", "+@all")
    return Unusable(server, "grant what docs/operations.md lists", lambda: set_user(server), USER)


def replica(server: RedisServer, stack: ExitStack) -> Unusable:
    master = stack.enter_context(RedisServer(server.binary))
    server.cli("REPLICAOF", "127.0.0.1", master.port)
    return Unusable(server, REPLICA, lambda: server.cli("REPLICAOF", "NO", "ONE"))


def no_lua(server: RedisServer, _: ExitStack) -> Unusable:
    """Valkey as if built without Lua, which is a module there; elsewhere its commands have no name."""
    if "valkey" in server.binary.name:
        server.cli("MODULE", "UNLOAD", "lua")
    reason = "it runs no Lua scripts (ERR Could not find scripting engine 'lua'): use Redis 6.2 or later or Valkey"
    if "valkey" not in server.binary.name:
        restart(server, *(part for name in ("EVAL", "EVALSHA", "SCRIPT") for part in ("--rename-command", name, "")))
        reason = "it runs no Lua scripts (ERR unknown command"
    return Unusable(server, reason, lambda: restart(server))


def restart(server: RedisServer, *extra: str) -> None:
    server.kill()
    server.extra = list(extra)
    server.start()


def has_functions(server: RedisServer) -> bool:
    return not str(server.cli("INFO", "server")["redis_version"]).startswith("6.")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(
    params=[
        pytest.param("redis-6.2", marks=pytest.mark.slow),
        pytest.param("redis-on-path", marks=pytest.mark.slow),
        "valkey-9",
    ]
)
def server(request: pytest.FixtureRequest, stack: ExitStack) -> RedisServer:
    """Return a server of its own: some cannot be repaired without a restart."""
    binary = redis_binaries().get(request.param)
    if binary is None:
        pytest.skip(f"{request.param} is not on this machine")
    extra = ["--enable-module-command", "yes"] if request.param == "valkey-9" else []
    return stack.enter_context(RedisServer(binary, extra=extra))


@pytest.mark.parametrize(
    "make",
    [no_form, no_scripting, no_command_of_the_script, no_undo, other_keys, replica, no_lua],
    ids=lambda make: make.__name__,
)
async def test_reason_is_reported_and_the_server_is_used_once_it_is_fixed(
    make: Callable[[RedisServer, ExitStack], Unusable], server: RedisServer, stack: ExitStack
) -> None:
    unusable = make(server, stack)
    servers = RedisServers("single", (unusable.address,))
    waiting = redis_store(servers, None, RedisOptions())
    with pytest.raises(StoreUnusable) as raised:
        await waiting.start()
    await waiting.close()
    assert unusable.reason in raised.value.reason
    assert str(raised.value) == f"Redis at {servers} is not usable: {raised.value.reason}"
    assert USER not in raised.value.reason
    assert len(raised.value.reason) < 250, "the script itself, or other arguments of a command"

    reasons: list[str] = []
    store = redis_store(servers, None, RedisOptions(on_unusable=reasons.append))
    store.start_in_background()
    try:
        await until(lambda: bool(reasons))
        assert reasons[-1] == raised.value.reason
        (answer,) = await store.spend([store.prepare(call(long_step("k")))])
        assert isinstance(answer, StoreUnavailable)
        assert not store.connected
        await asyncio.to_thread(unusable.fix)
        await until(lambda: store.connected)
        (answer,) = await store.spend([store.prepare(call(long_step("k")))])
        assert isinstance(answer, StoreResult), answer
    finally:
        await store.close()


async def test_a_server_that_stops_answering_has_no_reason_any_more(any_redis: RedisServer) -> None:
    set_user(any_redis, "-@scripting")
    address = RedisAddress("127.0.0.1", any_redis.port, username=USER, password=SecretStr(PASSWORD))
    reasons: list[str] = []
    store = redis_store(RedisServers("single", (address,)), None, RedisOptions(on_unusable=reasons.append))
    store.start_in_background()
    try:
        await until(lambda: bool(reasons))
        any_redis.kill()
        await until(lambda: reasons[-1] == "")
    finally:
        await store.close()
        any_redis.start()


@pytest.mark.parametrize("rights", [("+fcall",), ("+evalsha", "+eval"), ("+evalsha",)], ids=" ".join)
@pytest.mark.parametrize("server", [pytest.param("redis-on-path", marks=pytest.mark.slow), "valkey-9"], indirect=True)
async def test_one_way_to_run_the_script_suffices(server: RedisServer, rights: tuple[str, ...]) -> None:
    set_user(server, "-fcall", "-evalsha", "-eval", *rights)
    address = RedisAddress("127.0.0.1", server.port, username=USER, password=SecretStr(PASSWORD))
    store = redis_store(RedisServers("single", (address,)), None, RedisOptions())
    await store.start()
    try:
        (answer,) = await store.spend([store.prepare(call(long_step("k")))])
        assert isinstance(answer, StoreResult), answer
    finally:
        await store.close()


@pytest.mark.slow
@pytest.mark.parametrize("binary", ["redis-6.2", "valkey-9"])
async def test_reason_is_reported_of_a_cluster(binary: str, stack: ExitStack) -> None:
    cluster = stack.enter_context(RedisCluster(redis_binaries()[binary]))
    no_slots = "its user may not run CLUSTER SLOTS: grant +cluster|slots and +cluster|info"
    no_functions = ["-fcall"] if has_functions(cluster.nodes[0]) else []
    await check_cluster(cluster, ["-evalsha", "-eval", *no_functions], NO_SCRIPT)
    await check_cluster(cluster, ["-cluster"], no_slots)


async def check_cluster(cluster: RedisCluster, rights: list[str], reason: str) -> None:
    for node in cluster.nodes:
        set_user(node, *rights)
    servers = RedisServers(
        "cluster",
        tuple(
            RedisAddress("127.0.0.1", node.port, username=USER, password=SecretStr(PASSWORD)) for node in cluster.nodes
        ),
    )
    waiting = redis_store(servers, None, RedisOptions())
    with pytest.raises(StoreUnavailable) as raised:
        await waiting.start()
    await waiting.close()
    assert str(raised.value).endswith(reason)

    reasons: list[str] = []
    store = redis_store(servers, None, RedisOptions(on_unusable=reasons.append))
    store.start_in_background()
    try:
        await until(lambda: bool(reasons))
        assert set(reasons) == {reason}
        for node in cluster.nodes:
            set_user(node)
        await until(lambda: store.connected)
        (answer,) = await store.spend([store.prepare(call(long_step("k")))])
        assert isinstance(answer, StoreResult), answer
    finally:
        await store.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.005)
