"""TLS 1.3 KeyUpdate messages over real sockets: a few are answered, a flood ends its connection and nothing else."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from ratelimit_rls.telemetry.abuse import Abuse
from ratelimit_rls.tls import key_updates as module
from ratelimit_rls.tls.certificates import TlsFiles
from ratelimit_rls.tls.key_updates import MAX_KEY_UPDATES, BoundedSslObject
from tests.integration.transport.conftest import Service
from tests.support.certificates import Authority

SERVER = "rls.test"
UPDATE_REQUESTED = b"\x18\0\0\1\1"
HANDSHAKE, APPLICATION_DATA = b"\x16", b"\x17\3\3"
FLOOD = 9000
"""Messages that fit into one read of the loop: some 0.2 s of work for OpenSSL."""


def expand(secret: bytes, label: bytes, size: int) -> bytes:
    """HKDF-Expand-Label of RFC 8446, with an empty context."""
    label = b"tls13 " + label
    info = size.to_bytes(2, "big") + bytes([len(label)]) + label + b"\0"
    return HKDFExpand(SHA384(), size, info).derive(secret)


def key_updates(secret: bytes, count: int) -> bytes:
    """Return KeyUpdate records, each encrypted with the keys that follow from the previous one.

    `secret` is that of the client's first record.
    """
    records = []
    for _ in range(count):
        header = APPLICATION_DATA + (len(UPDATE_REQUESTED + HANDSHAKE) + 16).to_bytes(2, "big")
        sealed = AESGCM(expand(secret, b"key", 32)).encrypt(
            expand(secret, b"iv", 12), UPDATE_REQUESTED + HANDSHAKE, header
        )
        records.append(header + sealed)
        secret = expand(secret, b"traffic upd", 48)
    return b"".join(records)


class Updater:
    """A client that performs a handshake, and then sends records of its own making."""

    def __init__(self, address: str, authority: Authority, directory: Path) -> None:
        context = ssl.create_default_context(cafile=str(authority.ca_path))
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_alpn_protocols(["h2"])
        keys = directory / "keys.log"
        context.keylog_filename = str(keys)
        host, port = address.split(":")
        plain = socket.create_connection((host, int(port)), timeout=20)
        self._tls = context.wrap_socket(plain, server_hostname=SERVER)
        assert self._tls.cipher()[0] == "TLS_AES_256_GCM_SHA384"  # type: ignore[index]
        lines = [line.split() for line in keys.read_text().splitlines()]
        (self.secret,) = [bytes.fromhex(one[2]) for one in lines if one[0] == "CLIENT_TRAFFIC_SECRET_0"]

    def send(self, count: int) -> bool:
        """Returns whether the connection was ended within half a second, or while it was sent."""
        with socket.socket(fileno=socket.dup(self._tls.fileno())) as plain:
            try:
                plain.sendall(key_updates(self.secret, count))
                self._tls.settimeout(0.5)
                while self._tls.recv(65536):
                    pass
            except TimeoutError:
                return False
            except OSError:
                return True
        return True

    def close(self) -> None:
        self._tls.close()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


@pytest.fixture
async def address(service: Service, authority: Authority) -> str:
    certificate, key = authority.issue(SERVER)
    return await service.listen(tls=TlsFiles(str(certificate), str(key)))


@pytest.fixture
def handled(monkeypatch: pytest.MonkeyPatch) -> list[BoundedSslObject]:
    """One entry for each message that OpenSSL has read."""
    seen: list[BoundedSslObject] = []
    handle = BoundedSslObject.on_key_update

    def on_key_update(self: BoundedSslObject) -> None:
        seen.append(self)
        handle(self)

    monkeypatch.setattr(BoundedSslObject, "on_key_update", on_key_update)
    return seen


async def test_a_flood_of_key_updates_ends_the_connection_before_it_is_read(
    service: Service, address: str, authority: Authority, tmp_path: Path, handled: list[BoundedSslObject]
) -> None:
    client = await asyncio.to_thread(Updater, address, authority, tmp_path)
    assert await asyncio.to_thread(client.send, FLOOD)
    assert len(handled) == MAX_KEY_UPDATES + 1
    assert service.abuse.count(Abuse.TLS_KEY_UPDATE_FLOOD) == 1
    client.close()


async def test_a_few_key_updates_do_not_end_the_connection(
    service: Service, address: str, authority: Authority, tmp_path: Path, handled: list[BoundedSslObject]
) -> None:
    client = await asyncio.to_thread(Updater, address, authority, tmp_path)
    assert not await asyncio.to_thread(client.send, MAX_KEY_UPDATES)
    assert len(handled) == MAX_KEY_UPDATES
    assert service.abuse.count(Abuse.TLS_KEY_UPDATE_FLOOD) == 0
    client.close()


def test_time_allows_more(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(module, "monotonic", lambda: now_s)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    module.bound_key_updates(context)
    connection = context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_side=True)
    assert isinstance(connection, BoundedSslObject)
    for _ in range(MAX_KEY_UPDATES):
        connection.on_key_update()
    for _ in range(100):
        now_s += 1 / module.KEY_UPDATES_PER_SECOND
        connection.on_key_update()
    assert not connection.incoming.eof
    connection.on_key_update()
    assert connection.incoming.eof
