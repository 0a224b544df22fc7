"""Calls that are handed on: what a caller is told when that itself goes wrong."""

from __future__ import annotations

from typing import Any

import pytest

from ratelimit_rls.transport.grpc.head import NOWHERE, Head
from ratelimit_rls.transport.grpc.relay import Relayed
from tests.unit.transport.http2_client import RELAYED

HEAD = Head(RELAYED, 1.0, (), b"identity", None, None, NOWHERE)


class Broken:
    """A channel that nothing can be sent on."""

    def stream_stream(self, path: str) -> Any:
        raise RuntimeError("a secret")


class Told:
    """A connection that only listens."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, int, str]] = []

    def end(self, stream_id: int, code: int, words: str, metadata: object) -> None:
        self.ends.append((stream_id, code, words))


async def test_a_call_that_cannot_be_handed_on_ends_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()
    await Relayed(told, 7, HEAD).run(Broken())  # type: ignore[arg-type]
    assert told.ends == [(7, 13, "internal error")]
    assert "RuntimeError: a secret" in caplog.text
