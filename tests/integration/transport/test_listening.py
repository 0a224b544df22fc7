"""Listening and shutdown of the gRPC port."""

from __future__ import annotations

import asyncio
import socket
import stat
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from grpc import aio

from ratelimit_rls.errors import SettingsError
from ratelimit_rls.protos.messages import RateLimitResponse
from ratelimit_rls.transport.grpc.runtime_dir import runtime_dir
from ratelimit_rls.transport.sockets import listening_socket
from tests.integration.transport.conftest import Client, Service, eventually, message


async def test_unix_socket_serves_calls(service: Service, tmp_path: Path) -> None:
    address = await service.listen(target=f"unix:{tmp_path}/rls.sock")
    async with aio.insecure_channel(address) as channel:
        assert (await Client(channel).ask({"user": "a"})).overall_code == 1


async def test_unix_socket_has_the_configured_mode(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "rls.sock"
    await service.listen(target=f"unix:{path}", socket_mode=0o660)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660


async def test_stale_socket_is_replaced(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "rls.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    async with aio.insecure_channel(await service.listen(target=f"unix:{path}")) as channel:
        assert (await Client(channel).ask({"user": "a"})).overall_code == 1


async def test_live_socket_is_not_replaced(service: Service, tmp_path: Path) -> None:
    address = await service.listen(target=f"unix:{tmp_path}/live.sock")
    with pytest.raises(SettingsError, match="another process listens there"):
        await service.listen(target=address)
    async with aio.insecure_channel(address) as channel:
        assert (await Client(channel).ask({"user": "a"})).overall_code == 1


async def test_address_in_use_is_a_settings_error(service: Service, tmp_path: Path) -> None:
    with listening_socket("127.0.0.1:0") as taken:
        target = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SettingsError, match=f"cannot listen on {target}: .*in use"):
            await service.listen(target=target)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "target", ["unix:@abstract", "unix:/nowhere/rls.sock", "127.0.0.1:99999", "no.such.host.invalid:1"]
)
async def test_invalid_address_is_a_settings_error(service: Service, target: str) -> None:
    with pytest.raises(SettingsError, match="cannot listen"):
        await service.listen(target=target)


async def test_two_servers_share_a_port_with_reuse_port(service: Service) -> None:
    first = await service.listen(reuse_port=True)
    assert await service.listen(reuse_port=True, target=first) == first


async def test_internal_sockets_are_in_a_private_directory(service: Service, short_path: Path) -> None:
    await service.listen()
    modes = [stat.S_IMODE(directory.stat().st_mode) for directory in short_path.iterdir()]
    assert modes == [0o700]
    await service.servers.pop().close()
    assert list(short_path.iterdir()) == []


async def test_drain_waits_for_calls_in_flight(client: Client, service: Service) -> None:
    service.store.gate.clear()
    calls = [client.raw(message({"tenant": "t"})) for _ in range(10)]
    (server,) = service.servers
    await eventually(lambda: server.in_flight == 10)
    draining = asyncio.create_task(server.drain(10))
    await asyncio.sleep(0.02)
    assert not draining.done()
    service.store.gate.set()
    await draining
    await server.close()
    answers = [RateLimitResponse.FromString(await call) for call in calls]
    assert sorted(answer.statuses[0].limit_remaining for answer in answers) == list(range(990, 1000))
    service.servers.clear()


async def test_close_delivers_the_last_response(client: Client, service: Service) -> None:
    service.store.gate.clear()
    calls = [client.raw(message({"tenant": "t"})) for _ in range(50)]
    (server,) = service.servers
    await eventually(lambda: server.in_flight == 50)
    service.store.gate.set()
    while server.in_flight:
        await asyncio.sleep(0)
    await server.close()
    assert len([await call for call in calls]) == 50
    service.servers.clear()


async def test_call_in_flight_may_finish_during_close(client: Client, service: Service) -> None:
    service.store.gate.clear()
    call = client.raw(message({"tenant": "t"}))
    server = service.servers.pop()
    await eventually(lambda: server.in_flight == 1)
    closing = asyncio.create_task(server.close())
    await asyncio.sleep(0.01)
    service.store.gate.set()
    assert RateLimitResponse.FromString(await call).overall_code == 1
    await closing


async def test_drain_has_a_timeout(client: Client, service: Service) -> None:
    service.store.gate.clear()
    call = client.raw(message({"tenant": "t"}))
    (server,) = service.servers
    await eventually(lambda: server.in_flight == 1)
    async with asyncio.timeout(2):
        await server.drain(0.05)
        await server.close()
    with pytest.raises(aio.AioRpcError) as cut:
        await call
    assert cut.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    service.servers.clear()


async def test_connections_end_at_their_maximum_age(service: Service) -> None:
    address = await service.listen(max_connection_age_s=0.05, max_connection_age_grace_s=0.05)
    async with aio.insecure_channel(address) as channel:
        client = Client(channel)
        await client.ask({"user": "a"})
        await eventually(lambda: channel.get_state() is grpc.ChannelConnectivity.IDLE)
        assert (await client.ask({"user": "a"})).statuses[0].limit_remaining == 0


def test_runtime_directory_is_the_first_writable_one(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path / "missing"))
    monkeypatch.setenv("TMPDIR", str(short_path))
    assert runtime_dir().parent == short_path
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    (short_path / "own").mkdir()
    assert runtime_dir(str(short_path / "own")).parent == short_path / "own"


def test_unusable_runtime_directory_is_a_settings_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"RLS_RUNTIME_DIR=.*No such file or directory; it must be a directory"):
        runtime_dir(str(tmp_path / "missing"))
    long = tmp_path / ("x" * 100)
    long.mkdir()
    with pytest.raises(SettingsError, match="too long for a Unix socket"):
        runtime_dir(str(long))
    assert list(long.iterdir()) == []


async def test_hundreds_of_connections_in_one_iteration_are_accepted(service: Service) -> None:
    """If the backlog were full, clients would retry after a second."""
    host, _, port = (await service.listen()).rpartition(":")
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=0.5))
