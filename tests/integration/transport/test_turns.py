"""A client that floods its connection is read to the end, a turn at a time, on real sockets with and without TLS."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from ratelimit_rls.transport.grpc import connection
from ratelimit_rls.transport.grpc.certificates import TlsFiles
from ratelimit_rls.transport.http2 import frames
from ratelimit_rls.transport.http2.frames import ACK, PING, PREFACE, frame
from tests.certificates import Authority
from tests.integration.transport.conftest import Service

pytestmark = pytest.mark.parametrize("transport", ["native"])

PINGS = 2000
ANSWER = frame(PING, ACK, 0, b"12345678")


@pytest.fixture(params=["plain", "TLS"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> TlsFiles | None:
    if request.param == "plain":
        return None
    certificate, key = Authority(tmp_path).issue("rls.test")
    return TlsFiles(str(certificate), str(key))


async def test_every_frame_of_a_flood_is_read(
    service: Service, files: TlsFiles | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "TURN_S", -1.0)  # each frame has a turn of its own
    trusting = None
    if files is not None:
        trusting = ssl.create_default_context()
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        trusting.set_alpn_protocols(["h2"])
    host, _, port = (await service.listen(tls=files)).rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=trusting)
    writer.write(PREFACE + frames.settings({}) + frame(PING, 0, 0, b"12345678") * PINGS)
    received = b""
    async with asyncio.timeout(20):
        while received.count(ANSWER) < PINGS:
            received += await reader.read(2**20)
        writer.write(frame(PING, 0, 0, b"at last!"))
        while b"at last!" not in received:
            received += await reader.read(2**20)
    writer.close()
