"""Slow input is read completely over several iterations, on real sockets with and without TLS."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from ratelimit_rls.h2 import frames
from ratelimit_rls.h2.flood_budgets import ALLOWANCES, Allowance
from ratelimit_rls.h2.frames import ACK, PING, PREFACE, frame
from ratelimit_rls.h2.reasons import Reason
from ratelimit_rls.tls.certificates import TlsFiles
from ratelimit_rls.transport.grpc import protocol
from tests.integration.transport.conftest import Service
from tests.support.certificates import Authority

PINGS = 2000
ANSWER = frame(PING, ACK, 0, b"12345678")


@pytest.fixture(params=["plain", "TLS"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> TlsFiles | None:
    if request.param == "plain":
        return None
    certificate, key = Authority(tmp_path).issue("rls.test")
    return TlsFiles(str(certificate), str(key))


async def test_no_frame_is_lost_between_iterations(
    service: Service, files: TlsFiles | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "SLOW_SLICE_S", -1.0)  # one iteration per frame
    monkeypatch.setitem(ALLOWANCES, Reason.PING_FLOOD, Allowance(PINGS + 1, 0, 0))
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
