"""The server starts pipelines: an error of one batch affects no other."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import Any

from structlog.testing import capture_logs

from ratelimit_rls.transport.grpc.http2_server import Http2Server


async def failing(batch: Any) -> None:
    raise RuntimeError("no response could be sent")


def test_error_of_a_batch_without_a_task_is_logged_and_goes_no_further() -> None:
    server: Any = SimpleNamespace(in_progress=0, _has_request_ids=False)
    method: Any = SimpleNamespace(never_suspends=True, wants_metadata=False, pipeline=SimpleNamespace(run=failing))
    call: Any = (object(), 1, b"", 0.0, SimpleNamespace(deadline_in_s=inf))
    with capture_logs() as lines:
        Http2Server._start_pipeline(server, method, [call])
    assert [line["event"] for line in lines] == ["batch_failed"]
