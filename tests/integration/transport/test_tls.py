"""TLS before either transport: who gets in, with which certificates, and what a change of files does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc import aio

from ratelimit_rls.errors import SettingsError
from ratelimit_rls.transport.grpc import tls
from ratelimit_rls.transport.grpc.certificates import TlsFiles
from ratelimit_rls.transport.grpc.pipe import Pipe
from ratelimit_rls.transport.listen import listening_socket
from tests.certificates import Authority
from tests.integration.transport.conftest import Client, Service, eventually, message

SERVER = "rls.test"


@dataclass
class Pair:
    certificate: Path
    key: Path

    @classmethod
    def of(cls, authority: Authority, name: str) -> Pair:
        return cls(*authority.issue(name))

    def replace(self, other: Pair) -> None:
        """Put the other's files in place of these, each in one step, as a mounted secret changes."""
        for mine, theirs in ((self.certificate, other.certificate), (self.key, other.key)):
            new = mine.with_suffix(".new")
            new.write_bytes(theirs.read_bytes())
            os.replace(new, mine)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"), "another CA")


@pytest.fixture
def pair(authority: Authority, tmp_path: Path) -> Pair:
    """The server's files, free to be replaced."""
    own = Pair(tmp_path / "tls.crt", tmp_path / "tls.key")
    own.replace(Pair.of(authority, SERVER))
    return own


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "LOOK_EVERY_S", 0.02)


async def connect(address: str, trusted: Authority, shown: Pair | None = None) -> AsyncIterator[Client]:
    credentials = grpc.ssl_channel_credentials(
        trusted.ca_path.read_bytes(),
        shown.key.read_bytes() if shown else None,
        shown.certificate.read_bytes() if shown else None,
    )
    async with aio.secure_channel(address, credentials, [("grpc.ssl_target_name_override", SERVER)]) as channel:
        yield Client(channel)


async def admitted(address: str, trusted: Authority, shown: Pair | None = None) -> bool:
    """Whether one call on a connection of its own is answered."""
    async for client in connect(address, trusted, shown):
        try:
            return bool((await client.ask({"tenant": "t"})).overall_code == 1)
        except aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
    return False


async def test_a_client_that_trusts_the_ca_is_served(service: Service, pair: Pair, authority: Authority) -> None:
    address = await service.listen(tls=TlsFiles(str(pair.certificate), str(pair.key)))
    assert await admitted(address, authority)


async def test_plaintext_is_not_answered(service: Service, pair: Pair) -> None:
    address = await service.listen(tls=TlsFiles(str(pair.certificate), str(pair.key)))
    async with aio.insecure_channel(address) as channel:
        assert (await Client(channel).failure(message({"user": "a"})))[0] is grpc.StatusCode.UNAVAILABLE


async def test_tls_works_on_a_unix_socket(service: Service, pair: Pair, authority: Authority, tmp_path: Path) -> None:
    path = tmp_path / "tls.sock"
    address = await service.listen(target=f"unix:{path}", tls=TlsFiles(str(pair.certificate), str(pair.key)))
    assert await admitted(address, authority)
    await service.servers.pop().close()
    assert not path.exists()


async def test_only_clients_of_the_ca_are_admitted(
    service: Service, pair: Pair, authority: Authority, stranger: Authority
) -> None:
    files = TlsFiles(str(pair.certificate), str(pair.key), client_ca=str(authority.ca_path))
    address = await service.listen(tls=files)
    assert await admitted(address, authority, Pair.of(authority, "anyone.test"))
    assert not await admitted(address, authority)
    assert not await admitted(address, authority, Pair.of(stranger, "anyone.test"))


async def test_only_clients_with_an_allowed_name_are_admitted(
    service: Service, pair: Pair, authority: Authority
) -> None:
    files = TlsFiles(
        str(pair.certificate), str(pair.key), str(authority.ca_path), client_names=("envoy.test", "a.gateway.test")
    )
    address = await service.listen(tls=files)
    assert await admitted(address, authority, Pair.of(authority, "envoy.test"))
    assert await admitted(address, authority, Pair.of(authority, "*.gateway.test"))
    assert not await admitted(address, authority, Pair.of(authority, "other.test"))


async def test_alpn_is_h2_and_old_versions_are_refused(service: Service, pair: Pair, authority: Authority) -> None:
    address = await service.listen(tls=TlsFiles(str(pair.certificate), str(pair.key)))
    host, port = address.split(":")
    context = ssl.create_default_context(cafile=str(authority.ca_path))
    context.set_alpn_protocols(["http/1.1", "h2"])
    _, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=SERVER)
    assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
    writer.close()
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError):
        await asyncio.open_connection(host, int(port), ssl=context, server_hostname=SERVER)


async def test_new_certificates_are_used_and_broken_ones_are_not(
    service: Service, pair: Pair, authority: Authority, stranger: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    address = await service.listen(tls=TlsFiles(str(pair.certificate), str(pair.key)))
    async for early in connect(address, authority):
        await early.ask({"tenant": "t"})

        pair.key.write_text("not a key")
        await eventually(lambda: "the ones before stay" in caplog.text)
        assert await admitted(address, authority)

        pair.replace(Pair.of(stranger, SERVER))
        await eventually(lambda: "TLS files reloaded" in caplog.text)
        assert await admitted(address, stranger)
        assert not await admitted(address, authority)
        assert (await early.ask({"tenant": "t"})).overall_code == 1, "a connection keeps what it began with"


async def test_a_new_ca_admits_its_clients_and_no_longer_the_old_ones(
    service: Service, pair: Pair, authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    client_ca = tmp_path / "client-ca.pem"
    client_ca.write_bytes(authority.ca_path.read_bytes())
    address = await service.listen(tls=TlsFiles(str(pair.certificate), str(pair.key), str(client_ca)))
    old, new = Pair.of(authority, "client.test"), Pair.of(stranger, "client.test")
    assert await admitted(address, authority, old)
    client_ca.write_bytes(stranger.ca_path.read_bytes())
    async with asyncio.timeout(10):
        while not await admitted(address, authority, new):
            pass
    assert not await admitted(address, authority, old)


async def test_large_messages_pass_both_ways_while_others_go_on(
    service: Service, pair: Pair, authority: Authority
) -> None:
    address = await service.listen(tls=TlsFiles(str(pair.certificate), str(pair.key)))
    async for client in connect(address, authority):
        large = [client.ask({"user": f"{i}" * 1_000_000}) for i in range(4)]
        wide = [client.ask(*[{"tenant": f"{i}"}] * 1000) for i in range(4)]
        answers = await asyncio.gather(*large, *wide)
        assert [len(answer.statuses) for answer in answers] == [1] * 4 + [1000] * 4


async def test_draining_delivers_the_last_answers_through_tls(
    service: Service, pair: Pair, authority: Authority
) -> None:
    address = await service.listen(tls=TlsFiles(str(pair.certificate), str(pair.key)))
    async for client in connect(address, authority):
        await client.ask({"tenant": "t"})
        service.store.gate.clear()
        calls = [asyncio.ensure_future(client.ask({"tenant": "t"})) for _ in range(10)]
        server = service.servers.pop()
        await eventually(lambda server=server: server.in_flight == 10)
        service.store.gate.set()
        await server.drain(10)
        await server.close()
        assert [answer.overall_code for answer in await asyncio.gather(*calls)] == [1] * 10


def test_files_that_cannot_be_used_are_a_sentence(authority: Authority, tmp_path: Path) -> None:
    certificate, key = map(str, authority.issue(SERVER))
    _, other_key = map(str, authority.issue("other.test"))
    with pytest.raises(SettingsError, match=r"GRPC_SERVER_TLS_CERT=missing.*No such file"):
        TlsFiles("missing", key).context()
    with pytest.raises(SettingsError, match=r"KEY_VALUES_MISMATCH.*belonging to the certificate"):
        TlsFiles(certificate, other_key).context()
    with pytest.raises(SettingsError, match="must be a PEM file"):
        TlsFiles(certificate, key, client_ca=key).context()
    with pytest.raises(SettingsError, match="GRPC_CLIENT_TLS_CACERT"):
        TlsFiles(certificate, key, client_names=("envoy.test",))


async def taken_bytes(writer: asyncio.StreamWriter) -> int:
    """How much can be written before nothing moves any more."""
    taken = 0
    with contextlib.suppress(TimeoutError):
        while taken < 64 * 2**20:
            writer.write(bytes(2**20))
            taken += 2**20
            await asyncio.wait_for(writer.drain(), 0.3)
    return taken


@pytest.mark.parametrize("writer_is", ["client", "server"])
async def test_a_side_that_does_not_read_stops_the_other(
    pair: Pair, authority: Authority, tmp_path: Path, writer_is: str
) -> None:
    behind: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
    server = await asyncio.start_unix_server(lambda _, writer: behind.put_nowait(writer), tmp_path / "behind.sock")
    listener = tls.TlsListener(TlsFiles(str(pair.certificate), str(pair.key)))
    listening = listening_socket("127.0.0.1:0")
    port = listening.getsockname()[1]
    pipe = Pipe(tmp_path / "behind.sock")
    listener.start(listening, pipe.new_end)
    context = ssl.create_default_context(cafile=str(authority.ca_path))
    _, near = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=SERVER)
    far = await behind.get()
    for end in (near, far):
        end.transport.pause_reading()
    assert await taken_bytes(near if writer_is == "client" else far) < 32 * 2**20
    for end in (near, far):
        end.transport.abort()
    server.close()
    await listener.close()
    await pipe.close(1)
