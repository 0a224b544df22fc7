"""Peer addresses, and limits on their connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable

import pytest

from ratelimit_rls.telemetry.abuse import Abuse
from ratelimit_rls.transport.peers import (
    DISCONNECTED,
    UNIX,
    ConnectionLimits,
    Evicted,
    PendingTasks,
    has_peer_closed,
    peer_address,
    peer_group,
)
from tests.unit.transport.http2_client import Socket


@pytest.mark.parametrize(
    ("one", "other", "are_one"),
    [
        ("192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("::1", "::ffff:192.0.2.2", False),
    ],
)
def test_peer_group_is_an_address_or_ipv6_network(one: str, other: str, are_one: bool) -> None:
    assert (peer_group(one) == peer_group(other)) is are_one


def test_connections_are_limited_in_total_and_per_peer() -> None:
    limits = ConnectionLimits(3, 2)
    assert [limits.admit("192.0.2.1") for _ in range(3)] == [None, None, Abuse.TOO_MANY_CONNECTIONS_OF_PEER]
    assert [limits.admit(f"192.0.2.{number}") for number in (2, 3)] == [None, Abuse.TOO_MANY_CONNECTIONS]
    limits.release("192.0.2.1")
    assert limits.total == 2
    assert limits.admit("192.0.2.1") is None


def test_released_peers_leave_no_state() -> None:
    limits = ConnectionLimits(0, 1)
    for number in range(100):
        assert limits.admit(f"192.0.2.{number}") is None
    for number in range(100):
        limits.release(f"192.0.2.{number}")
    assert limits.total == 0
    assert limits._by_peer == {}


def test_unix_sockets_are_limited_in_total_only() -> None:
    limits = ConnectionLimits(3, 1)
    assert [limits.admit(UNIX) for _ in range(4)] == [None, None, None, Abuse.TOO_MANY_CONNECTIONS]
    limits.release(UNIX)
    assert limits.admit(UNIX) is None


@pytest.mark.parametrize(
    ("peername", "address"), [(("192.0.2.1", 1234), "192.0.2.1"), (("::1", 1, 0, 0), "::1"), ("", UNIX), (None, UNIX)]
)
def test_peer_address_of_a_connection(peername: object, address: str) -> None:
    socket = Socket()
    socket._extra["peername"] = peername  # type: ignore[attr-defined]
    assert peer_address(socket) == address


class TestPendingTasks:
    @pytest.fixture
    async def new_task(self) -> AsyncIterator[Callable[[], asyncio.Task[None]]]:
        tasks: list[asyncio.Task[None]] = []

        def new_task() -> asyncio.Task[None]:
            tasks.append(asyncio.create_task(asyncio.sleep(0)))
            return tasks[-1]

        yield new_task
        await asyncio.gather(*tasks)

    async def test_oldest_task_of_a_peer_is_evicted_at_its_limit(
        self, new_task: Callable[[], asyncio.Task[None]]
    ) -> None:
        pending = PendingTasks(10, 2)
        tasks = [new_task() for _ in range(4)]
        addresses = [f"2001:db8::{number}" for number in range(4)]  # one /64 network
        assert [pending.add(*each) for each in zip(tasks, addresses, strict=True)] == [
            None,
            None,
            Evicted(tasks[0], addresses[0], Abuse.TOO_MANY_CONNECTIONS_OF_PEER),
            Evicted(tasks[1], addresses[1], Abuse.TOO_MANY_CONNECTIONS_OF_PEER),
        ]

    async def test_oldest_task_of_the_largest_peer_is_evicted_at_the_total(
        self, new_task: Callable[[], asyncio.Task[None]]
    ) -> None:
        pending = PendingTasks(4, 3)
        addresses = ["192.0.2.1", "192.0.2.2", "192.0.2.2", "192.0.2.2"]
        tasks = [new_task() for _ in addresses]
        for each in zip(tasks, addresses, strict=True):
            assert pending.add(*each) is None
        for task in tasks[1:3]:
            assert pending.add(new_task(), "192.0.2.3") == Evicted(task, "192.0.2.2", Abuse.TOO_MANY_CONNECTIONS)

    async def test_finished_tasks_cause_no_eviction(self, new_task: Callable[[], asyncio.Task[None]]) -> None:
        pending = PendingTasks(2, 1)
        for number in range(100):
            task, address = new_task(), f"192.0.2.{number}"
            assert pending.add(task, address) is None
            evicted = pending.add(new_task(), address)
            assert evicted is not None
            pending.discard(task, address)  # a second time
            other = new_task()
            assert pending.add(other, UNIX) is None
            pending.discard(other, UNIX)
            pending.discard(next(iter(pending._by_peer[address])), address)
        assert pending._by_peer == {}

    async def test_unix_sockets_are_limited_in_total_only(self, new_task: Callable[[], asyncio.Task[None]]) -> None:
        pending = PendingTasks(2, 1)
        first = new_task()
        assert [pending.add(task, UNIX) for task in (first, new_task(), new_task())] == [
            None,
            None,
            Evicted(first, UNIX, Abuse.TOO_MANY_CONNECTIONS),
        ]


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="only Linux reports the state of a connection")
async def test_closed_peer_is_noticed_without_reading() -> None:
    accepted: asyncio.Queue[asyncio.Transport] = asyncio.Queue()

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            transport.pause_reading()
            accepted.put_nowait(transport)

    server = await asyncio.get_running_loop().create_server(Protocol, "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"unread")
    transport = await accepted.get()
    assert not has_peer_closed(transport)

    writer.close()
    async with asyncio.timeout(10):
        while not has_peer_closed(transport):
            await asyncio.sleep(0.001)
    transport.abort()
    server.close()


@pytest.mark.parametrize(
    ("family", "peer"), [(socket.AF_INET, DISCONNECTED), (socket.AF_INET6, DISCONNECTED), (socket.AF_UNIX, UNIX)]
)
def test_address_of_a_closed_tcp_connection_is_disconnected(family: socket.AddressFamily, peer: str) -> None:
    with socket.socket(family) as connection:

        class Transport(asyncio.Transport):
            def get_extra_info(self, name: str, default: object = None) -> object:
                return connection if name == "socket" else None

        assert peer_address(Transport()) == peer


def test_peer_of_a_unix_socket_is_never_reported_closed() -> None:
    with socket.socket(socket.AF_UNIX) as connection:

        class Transport(asyncio.Transport):
            def get_extra_info(self, name: str, default: object = None) -> object:
                return connection

        assert not has_peer_closed(Transport())


def test_peer_of_a_transport_without_a_socket_is_never_reported_closed() -> None:
    assert not has_peer_closed(Socket())
