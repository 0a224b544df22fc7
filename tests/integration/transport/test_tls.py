"""TLS on both transports: admission of clients, revocation, and reload of files."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from ratelimit_rls.errors import SettingsError
from ratelimit_rls.telemetry.abuse import Abuse
from ratelimit_rls.tls.certificates import TlsFiles
from ratelimit_rls.transport import tls_listener
from tests.integration.transport.conftest import Client, Service, eventually, message
from tests.support.certificates import Authority

SERVER = "rls.test"


@dataclass
class Pair:
    certificate: Path
    key: Path

    @classmethod
    def of(cls, authority: Authority, name: str, *uris: str) -> Pair:
        return cls(*authority.issue(name, *uris))

    def replace(self, other: Pair) -> None:
        """Replace these files atomically with the other's, as in a mounted secret."""
        for used, replacement in ((self.certificate, other.certificate), (self.key, other.key)):
            new = used.with_suffix(".new")
            new.write_bytes(replacement.read_bytes())
            os.replace(new, used)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"), "another CA")


@pytest.fixture
def pair(authority: Authority, tmp_path: Path) -> Pair:
    """The server's files, which a test may replace."""
    own = Pair(tmp_path / "tls.crt", tmp_path / "tls.key")
    own.replace(Pair.of(authority, SERVER))
    return own


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    """Log entries of the test so far."""
    with capture_logs() as entries:
        yield entries


@pytest.fixture(autouse=True)
def short_reload_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_listener, "RELOAD_INTERVAL_S", 0.02)


async def connect(address: str, trusted: Authority, presented: Pair | None = None) -> AsyncIterator[Client]:
    credentials = grpc.ssl_channel_credentials(
        trusted.ca_path.read_bytes(),
        presented.key.read_bytes() if presented else None,
        presented.certificate.read_bytes() if presented else None,
    )
    async with aio.secure_channel(address, credentials, [("grpc.ssl_target_name_override", SERVER)]) as channel:
        yield Client(channel)


async def admitted(address: str, trusted: Authority, presented: Pair | None = None) -> bool:
    """Return whether a call on a new connection is answered."""
    async for client in connect(address, trusted, presented):
        try:
            return bool((await client.ask({"tenant": "t"})).overall_code == 1)
        except aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
    return False


async def test_client_that_trusts_the_ca_is_served(service: Service, pair: Pair, authority: Authority) -> None:
    address = await service.listen(tls=TlsFiles(str(pair.certificate), str(pair.key)))
    assert await admitted(address, authority)


async def test_plaintext_client_gets_no_response(service: Service, pair: Pair) -> None:
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


async def test_clients_without_an_accepted_certificate_are_counted(
    service: Service, pair: Pair, authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    revoked, crl = Pair.of(authority, "revoked.test"), tmp_path / "crl.pem"
    crl.write_bytes(authority.crl(revoked.certificate))
    ca = str(authority.ca_path)
    files = TlsFiles(str(pair.certificate), str(pair.key), ca, client_names=("envoy.test",), crl=str(crl))
    address = await service.listen(tls=files)
    context = ssl.create_default_context(cafile=ca)
    context.set_alpn_protocols(["h2"])
    others = Pair.of(stranger, "envoy.test"), Pair.of(authority, "other.test"), revoked
    for number, other in enumerate((None, *others), 1):
        if other is not None:
            context.load_cert_chain(other.certificate, other.key)
        assert await asyncio.to_thread(tls_session, context, address, None) is None
        await eventually(lambda number=number: service.abuse.count(Abuse.UNAUTHENTICATED) == number)  # type: ignore[misc]

    host, port = address.split(":")
    _, plain = await asyncio.open_connection(host, int(port))
    plain.close()  # like a probe that only connects
    assert await admitted(address, authority, Pair.of(authority, "envoy.test"))
    assert service.abuse.count(Abuse.UNAUTHENTICATED) == 4


async def test_only_clients_with_an_allowed_spiffe_id_are_admitted(
    service: Service, pair: Pair, authority: Authority
) -> None:
    gateway, any_edge = "spiffe://prod.test/ns/gw/sa/envoy", "spiffe://prod.test/ns/edge/*"
    files = TlsFiles(
        str(pair.certificate), str(pair.key), str(authority.ca_path), client_names=("envoy.test", gateway, any_edge)
    )
    address = await service.listen(tls=files)

    async def shows(*uris: str) -> bool:
        return await admitted(address, authority, Pair.of(authority, "workload", *uris))

    assert await shows(gateway)
    assert await shows("spiffe://prod.test/ns/edge/sa/envoy")
    assert await admitted(address, authority, Pair.of(authority, "envoy.test"))
    assert not await shows("spiffe://prod.test/ns/gw/sa/envoy-2")
    assert not await shows("spiffe://prod.test/ns/edge/../gw/sa/root")
    assert not await shows(gateway, "spiffe://prod.test/ns/other/sa/b"), "an X.509-SVID has one URI"


class TestRevocation:
    @pytest.fixture
    def crl(self, authority: Authority, tmp_path: Path) -> Path:
        path = tmp_path / "crl.pem"
        path.write_bytes(authority.crl())
        return path

    @pytest.fixture
    def files(self, pair: Pair, authority: Authority, crl: Path) -> TlsFiles:
        return TlsFiles(str(pair.certificate), str(pair.key), str(authority.ca_path), crl=str(crl))

    async def test_only_revoked_client_is_rejected(
        self, service: Service, files: TlsFiles, authority: Authority, crl: Path
    ) -> None:
        bad, good = Pair.of(authority, "bad.test"), Pair.of(authority, "good.test")
        crl.write_bytes(authority.crl(bad.certificate))
        address = await service.listen(tls=files)
        assert not await admitted(address, authority, bad)
        assert await admitted(address, authority, good)

    async def test_changed_crl_is_reloaded(
        self, service: Service, files: TlsFiles, authority: Authority, crl: Path, logs: list[Any]
    ) -> None:
        bad, good = Pair.of(authority, "bad.test"), Pair.of(authority, "good.test")
        address = await service.listen(tls=files)
        async for early in connect(address, authority, bad):
            await early.ask({"tenant": "t"})

            crl.write_text("not a CRL")
            await eventually(lambda: "it has no CRL; it must be a PEM file" in str(logs))
            assert await admitted(address, authority, bad), "the previous list stays in use"

            crl.write_bytes(authority.crl(bad.certificate))
            await eventually(lambda: "tls_reloaded" in str(logs))
            assert not await admitted(address, authority, bad)
            assert await admitted(address, authority, good)
            assert (await early.ask({"tenant": "t"})).overall_code == 1, "a connection keeps its certificates"

    async def test_session_of_a_revoked_client_cannot_be_resumed(
        self, service: Service, files: TlsFiles, authority: Authority, crl: Path, logs: list[Any]
    ) -> None:
        bad = Pair.of(authority, "bad.test")
        address = await service.listen(tls=files)
        context = ssl.create_default_context(cafile=str(authority.ca_path))
        context.load_cert_chain(bad.certificate, bad.key)
        context.set_alpn_protocols(["h2"])
        first = await asyncio.to_thread(tls_session, context, address, None)
        assert first is not None, "the server gives no session, so none can be resumed"
        assert await asyncio.to_thread(tls_session, context, address, first) is not None
        crl.write_bytes(authority.crl(bad.certificate))
        await eventually(lambda: "tls_reloaded" in str(logs))
        assert await asyncio.to_thread(tls_session, context, address, first) is None

    @pytest.mark.slow
    async def test_crl_is_used_once_it_becomes_valid(
        self, service: Service, files: TlsFiles, authority: Authority, crl: Path, logs: list[Any]
    ) -> None:
        await service.listen(tls=files)
        soon = datetime.timedelta(seconds=4)
        crl.write_bytes(authority.crl(valid_from=soon))
        await eventually(lambda: "is not valid before" in str(logs))
        await eventually(lambda: "tls_reloaded" in str(logs))
        assert str(logs).count("is not valid before") == 1

    @pytest.mark.slow
    async def test_expired_crl_rejects_all_clients(
        self, service: Service, files: TlsFiles, authority: Authority, crl: Path
    ) -> None:
        client = Pair.of(authority, "client.test")
        crl.write_bytes(authority.crl(valid_until=datetime.timedelta(seconds=4)))
        with capture_logs() as logs:
            address = await service.listen(tls=files)
            await eventually(lambda: [entry["event"] for entry in logs] == ["tls_crl_expired"])
        async with asyncio.timeout(10):
            while await admitted(address, authority, client):  # OpenSSL's clock is some milliseconds behind
                pass

    @pytest.mark.slow
    @pytest.mark.parametrize("is_broken", [False, True], ids=["unchanged", "unreadable"])
    async def test_session_cannot_be_resumed_once_the_crl_has_expired(
        self, service: Service, files: TlsFiles, authority: Authority, crl: Path, is_broken: bool
    ) -> None:
        client = Pair.of(authority, "client.test")
        crl.write_bytes(authority.crl(valid_until=datetime.timedelta(seconds=4)))
        address = await service.listen(tls=files)
        contexts = []
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            context = ssl.create_default_context(cafile=str(authority.ca_path))
            context.maximum_version = version
            context.load_cert_chain(client.certificate, client.key)
            context.set_alpn_protocols(["h2"])
            session = await asyncio.to_thread(tls_session, context, address, None)
            assert await asyncio.to_thread(tls_session, context, address, session) is not None
            contexts.append((context, session))
        if is_broken:
            crl.write_text("not a CRL")
        with capture_logs() as logs:
            await eventually(lambda: "tls_crl_expired" in [entry["event"] for entry in logs])
        for context, session in contexts:
            assert await asyncio.to_thread(tls_session, context, address, session) is None
        crl.write_bytes(authority.crl())
        async with asyncio.timeout(10):
            while not await admitted(address, authority, client):
                pass

    @pytest.mark.slow
    async def test_next_expiry_is_known_after_one_crl_has_expired(
        self, pair: Pair, authority: Authority, stranger: Authority, crl: Path, tmp_path: Path
    ) -> None:
        both = tmp_path / "both.pem"
        both.write_bytes(authority.ca_path.read_bytes() + stranger.ca_path.read_bytes())
        first, second = datetime.timedelta(seconds=2), datetime.timedelta(hours=1)
        crl.write_bytes(authority.crl(valid_until=first) + stranger.crl(valid_until=second))
        files = TlsFiles(str(pair.certificate), str(pair.key), str(both), crl=str(crl))
        sooner = files.load()[1]
        assert sooner is not None
        await asyncio.sleep((sooner - datetime.datetime.now(datetime.UTC)).total_seconds() + 0.1)
        later = files.load(even_expired=True)[1]
        assert later is not None
        assert later - sooner > datetime.timedelta(minutes=50)

    def test_unusable_crl_is_a_settings_error(
        self, files: TlsFiles, authority: Authority, stranger: Authority, crl: Path
    ) -> None:
        hour = datetime.timedelta(hours=1)
        current, other_ca = authority.crl(), stranger.ca_path.read_bytes()
        for content, why in (
            (b"", "it has no CRL"),
            (current[:-40], "it has no CRL"),
            (current.replace(b"M", b"N", 1), "error parsing"),
            (current + other_ca, "it has a CERTIFICATE beside CRLs"),
            (stranger.crl(), "the CRL of CN=another CA is signed by none of the authorities"),
            (current + stranger.crl(), "the CRL of CN=another CA is signed by none of the authorities"),
            (Authority(crl.parent / "forger").crl(), "the CRL of CN=test CA is signed by none of the authorities"),
            (authority.crl(valid_until=-hour), "the CRL of CN=test CA expired at"),
            (authority.crl(valid_from=hour), "the CRL of CN=test CA is not valid before"),
            (authority.crl(delta=True), "the CRL of CN=test CA is a delta CRL"),
        ):
            crl.write_bytes(content)
            with pytest.raises(SettingsError, match=f"^GRPC_SERVER_TLS_CRL=.*: {why}"):
                files.context()
        crl.unlink()
        with pytest.raises(SettingsError, match="No such file"):
            files.context()
        with pytest.raises(SettingsError, match="GRPC_CLIENT_TLS_CACERT"):
            TlsFiles(files.certificate, files.key, crl=str(crl))

    async def test_clients_of_a_revoked_ca_are_rejected(
        self,
        service: Service,
        pair: Pair,
        authority: Authority,
        crl: Path,
        tmp_path: Path,
        logs: list[Any],
    ) -> None:
        middle = Authority(tmp_path / "middle", "middle CA", issuer=authority)
        bundle = tmp_path / "bundle.pem"
        bundle.write_bytes(authority.ca_path.read_bytes() + middle.ca_path.read_bytes())
        crl.write_bytes(authority.crl() + middle.crl())
        files = TlsFiles(str(pair.certificate), str(pair.key), str(bundle), crl=str(crl))
        address = await service.listen(tls=files)
        client = Pair.of(middle, "client.test")
        assert await admitted(address, authority, client)
        crl.write_bytes(authority.crl(middle.ca_path) + middle.crl())
        await eventually(lambda: "tls_reloaded" in str(logs))
        assert not await admitted(address, authority, client)
        assert await admitted(address, authority, Pair.of(authority, "other.test"))

    def test_each_ca_needs_a_crl(
        self, pair: Pair, authority: Authority, stranger: Authority, crl: Path, tmp_path: Path
    ) -> None:
        bundle = tmp_path / "bundle.pem"
        bundle.write_bytes(authority.ca_path.read_bytes() + stranger.ca_path.read_bytes())
        files = TlsFiles(str(pair.certificate), str(pair.key), str(bundle), crl=str(crl))
        with pytest.raises(SettingsError, match="it has no CRL of CN=another CA"):
            files.context()
        crl.write_bytes(authority.crl() + stranger.crl())
        assert files.context().verify_flags & ssl.VerifyFlags.VERIFY_CRL_CHECK_CHAIN


def tls_session(context: ssl.SSLContext, address: str, session: ssl.SSLSession | None) -> ssl.SSLSession | None:
    """Return the session that the server offers after the handshake; None if it closes the connection instead.

    Fails if a session is given and the server, which accepts the client, does not resume it.
    """
    host, port = address.split(":")
    try:
        with (
            socket.create_connection((host, int(port)), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname=SERVER, session=session) as secured,
        ):
            secured.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
            if not secured.recv(1):
                return None
            assert session is None or secured.session_reused
            return secured.session
    except OSError:
        return None


async def test_alpn_is_h2_and_old_tls_versions_are_rejected(service: Service, pair: Pair, authority: Authority) -> None:
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


async def test_new_certificates_are_used_and_invalid_ones_are_not(
    service: Service, pair: Pair, authority: Authority, stranger: Authority, logs: list[Any]
) -> None:
    address = await service.listen(tls=TlsFiles(str(pair.certificate), str(pair.key)))
    async for early in connect(address, authority):
        await early.ask({"tenant": "t"})

        pair.key.write_text("not a key")
        await eventually(lambda: "tls_reload_failed" in str(logs))
        assert await admitted(address, authority)

        pair.replace(Pair.of(stranger, SERVER))
        await eventually(lambda: "tls_reloaded" in str(logs))
        assert await admitted(address, stranger)
        assert not await admitted(address, authority)
        assert (await early.ask({"tenant": "t"})).overall_code == 1, "a connection keeps its certificates"


async def test_new_ca_replaces_the_old_one(
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


async def test_large_messages_do_not_block_other_calls(service: Service, pair: Pair, authority: Authority) -> None:
    address = await service.listen(tls=TlsFiles(str(pair.certificate), str(pair.key)))
    async for client in connect(address, authority):
        large = [client.ask(*[{"user": f"{i}" * 60_000}] * 8) for i in range(4)]
        wide = [client.ask(*[{"tenant": f"{i}"}] * 256) for i in range(4)]
        answers = await asyncio.gather(*large, *wide)
        assert [len(answer.statuses) for answer in answers] == [8] * 4 + [256] * 4


async def test_drain_delivers_the_last_responses_over_tls(service: Service, pair: Pair, authority: Authority) -> None:
    address = await service.listen(tls=TlsFiles(str(pair.certificate), str(pair.key)))
    async for client in connect(address, authority):
        await client.ask({"tenant": "t"})
        service.store.gate.clear()
        calls = [asyncio.ensure_future(client.ask({"tenant": "t"})) for _ in range(10)]
        server = service.servers.pop()
        await eventually(lambda server=server: server.in_flight == 10)  # type: ignore[misc]
        service.store.gate.set()
        await server.drain(10)
        await server.close()
        assert [answer.overall_code for answer in await asyncio.gather(*calls)] == [1] * 10


def test_unusable_tls_files_are_a_settings_error(authority: Authority, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        (["127.0.0.2"] * 2 + ["127.0.0.3"] * 2, Abuse.TOO_MANY_CONNECTIONS),
        (["127.0.0.1"] * 3, Abuse.TOO_MANY_CONNECTIONS_OF_PEER),
    ],
)
async def test_unfinished_handshakes_do_not_block_clients(
    service: Service,
    pair: Pair,
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
    others: list[str],
    reason: Abuse,
) -> None:
    monkeypatch.setattr(tls_listener, "MAX_HANDSHAKES", 4)
    monkeypatch.setattr(tls_listener, "MAX_HANDSHAKES_PER_PEER", 3)
    address = await service.listen(tls=TlsFiles(str(pair.certificate), str(pair.key)))
    host, port = address.split(":")
    silent = [await asyncio.open_connection(host, int(port), local_addr=(other, 0)) for other in others]
    context = ssl.create_default_context(cafile=str(authority.ca_path))
    context.set_alpn_protocols(["h2"])
    for _ in range(3):  # each evicts the one before
        assert await asyncio.to_thread(tls_session, context, address, None) is not None
    assert service.abuse.count(reason) == 1
    async with asyncio.timeout(5):  # half of HANDSHAKE_TIMEOUT_S
        assert await silent[0][0].read() == b""
    for _, writer in silent:
        writer.close()


async def test_handshakes_evicted_before_they_start_are_closed(
    service: Service, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_listener, "MAX_HANDSHAKES_PER_PEER", 3)
    address = await service.listen(tls=TlsFiles(str(pair.certificate), str(pair.key)))
    host, port = address.split(":")
    with contextlib.ExitStack() as stack:
        # The event loop does not run in between, so it accepts all of them at once.
        clients = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(8)]
        for client in clients:
            client.setblocking(False)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(5):  # half of HANDSHAKE_TIMEOUT_S
            assert [await loop.sock_recv(client, 1) for client in clients[:5]] == [b""] * 5
        assert service.abuse.count(Abuse.TOO_MANY_CONNECTIONS_OF_PEER) == 5
        with pytest.raises(BlockingIOError):
            clients[5].recv(1)


async def test_health_check_over_tls(service: Service, pair: Pair, authority: Authority) -> None:
    address = await service.listen(tls=TlsFiles(str(pair.certificate), str(pair.key)))
    async for client in connect(address, authority):
        check = health_pb2_grpc.HealthStub(client.channel).Check
        response = await check(health_pb2.HealthCheckRequest(service="ratelimit"), timeout=10)
        assert response.status == health_pb2.HealthCheckResponse.SERVING
