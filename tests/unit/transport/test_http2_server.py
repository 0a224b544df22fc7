"""The server starts pipelines: an error of one batch affects no other, and responses are written when it is decided."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import Any, cast

from structlog.testing import capture_logs

from ratelimit_rls.transport.grpc.http2_server import Http2Server, _Batch
from ratelimit_rls.transport.grpc.protocol import GrpcProtocol
from tests.unit.transport.http2_client import FakeServer


async def failing(batch: Any) -> None:
    raise RuntimeError("no response could be sent")


def test_error_of_a_batch_is_logged_and_goes_no_further() -> None:
    server: Any = SimpleNamespace(in_progress=0, _has_request_ids=False)
    method: Any = SimpleNamespace(wants_metadata=False, pipeline=SimpleNamespace(run=failing))
    call: Any = (object(), 1, b"", 0.0, SimpleNamespace(deadline_in_s=inf))
    with capture_logs() as lines:
        Http2Server._start_pipeline(server, method, [call])
    assert [line["event"] for line in lines] == ["batch_failed"]


def test_responses_of_a_batch_are_written_once_for_each_connection_when_it_is_decided() -> None:
    server = FakeServer()
    clients = [SimpleNamespace(writes=[]) for _ in range(2)]

    class WritingConnection:
        def __init__(self, client: Any) -> None:
            self.client = client
            self.unwritten: list[bytes] = []

        def respond(self, stream_id: int, message: bytes) -> None:
            if not self.unwritten:
                assert server.unflushed is not None, "a batch is being answered"
                server.unflushed.append(cast("GrpcProtocol", self))
            self.unwritten.append(message)

        def flush(self) -> None:
            self.client.writes.append(self.unwritten)

    connections = [WritingConnection(client) for client in clients]
    headers = SimpleNamespace(deadline_in_s=inf)
    calls: Any = [(connections[number % 2], 1, b"", 0.0, headers) for number in range(4)]
    accounting: Any = server
    answered: list[int] = []
    accounting.on_answered = answered.append
    batch = _Batch(accounting, calls, has_request_ids=False, wants_metadata=False)
    batch.respond_all([b"0", b"1", b"2", b"3"])
    assert [client.writes for client in clients] == [[[b"0", b"2"]], [[b"1", b"3"]]]
    assert server.unflushed is None
    assert answered == [4]
