"""A server with few file descriptors rejects connections beyond them, rather than leave clients waiting."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from bench import wire
from tests.support.service_process import UNRESTRICTIVE_RULES, ServiceProcess

pytestmark = pytest.mark.slow

LIMIT = 200


class Poor(ServiceProcess):
    def command(self) -> Sequence[str | Path]:
        return ["sh", "-c", f'ulimit -n {LIMIT} && exec "$@"', "sh", *super().command()]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Poor]:
    (tmp_path / "rules.yaml").write_text(UNRESTRICTIVE_RULES)
    with Poor({"RLS_RULES": tmp_path / "rules.yaml"}) as running:
        yield running


def test_clients_beyond_the_descriptors_are_rejected(service: Poor) -> None:
    assert f"msg=file_descriptor_limit_low limit={LIMIT} " in service.log()
    rejected = 0
    with ExitStack() as stack:
        clients = []
        for _ in range(LIMIT + 50):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", service.grpc_port), timeout=10))
            client.sendall(wire.opening())
            clients.append(client)
        for client in clients:
            assert client.recv(9)[3] == wire.SETTINGS, "every client is greeted"
            client.setblocking(False)
            with suppress(BlockingIOError):
                rejected += b"too many connections" in client.recv(1000)
        assert service.healthcheck().status == 200
    assert rejected > 50
    assert "Too many open files" not in service.log()
