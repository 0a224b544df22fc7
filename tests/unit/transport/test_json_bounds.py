"""Limits of /json: the size is checked before reading, and the number of values before parsing."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from ratelimit_rls.api.rls.codec import RlsCodec
from ratelimit_rls.errors import TooComplex
from ratelimit_rls.pipeline.message_bounds import MessageBounds
from ratelimit_rls.pipeline.throttle_queue import ThrottleQueue
from ratelimit_rls.telemetry.abuse import Abuse, AbuseLog
from ratelimit_rls.transport.health import Health
from ratelimit_rls.transport.http import json_api as json_module
from ratelimit_rls.transport.http.json_api import MAX_BODY_BYTES, json_app
from ratelimit_rls.transport.http.json_bounds import MAX_VALUES, check_json
from tests.support.pipelines import new_pipeline
from tests.unit.transport.test_rls_codec import Limiter

PEER = "192.0.2.7"


class Caller:
    """Calls the application without a server."""

    def __init__(self, bounds: MessageBounds | None = None) -> None:
        self.abuse = AbuseLog()
        self.limiter = Limiter()
        queue = ThrottleQueue(10, 0.003)
        codec = RlsCodec(self.limiter, bounds=bounds or MessageBounds())
        self.app = json_app(new_pipeline(codec, self.limiter.metrics, queue), queue, Health(()), abuse=self.abuse)
        self.received = 0

    async def post(self, *chunks: bytes, length: int | str | None = None) -> tuple[int, str]:
        headers = [(b"content-length", str(length).encode())] if length is not None else []
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/json",
            "headers": headers,
            "query_string": b"",
            "client": (PEER, 1234),
        }
        response: dict[str, Any] = {"body": b""}
        events = self._events(chunks)

        async def receive() -> dict[str, Any]:
            self.received += 1
            return await anext(events)

        async def send(message: Any) -> None:
            response["status"] = message.get("status", response.get("status"))
            response["body"] += message.get("body", b"")

        await self.app(scope, receive, send)
        return response["status"], response["body"].decode()

    async def _events(self, chunks: tuple[bytes, ...]) -> AsyncIterator[dict[str, Any]]:
        for number, chunk in enumerate(chunks, 1):
            yield {"type": "http.request", "body": chunk, "more_body": number < len(chunks)}


def body_with(descriptors: int) -> str:
    one = {"entries": [{"key": "user", "value": 'a, [b] {c} \\ "'}]}
    return json.dumps({"domain": "edge", "descriptors": [one] * descriptors})


def values(read: Any) -> int:
    """Count the values of a parsed body without the outermost; an empty object or array counts twice."""
    inner = list(read.values()) if isinstance(read, dict) else read if isinstance(read, list) else None
    return 0 if inner is None else max(1, len(inner)) + sum(map(values, inner))


class TestNumberOfValues:
    def test_limit_on_values(self) -> None:
        check_json(b"[" + b"1," * 9 + b"1]", max_values=10)
        with pytest.raises(TooComplex, match="more than 10 values in the body"):
            check_json(b"[" + b"1," * 10 + b"1]", max_values=10)

    def test_strings_may_contain_any_characters(self) -> None:
        text = json.dumps(["[{,:" * 1000, 'a"b,' * 1000, "\\,", '\\\\",', '\\"'])
        check_json(text.encode(), max_values=5)
        with pytest.raises(TooComplex):
            check_json(text.encode(), max_values=4)

    @settings(deadline=None, database=None)
    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text('ab,[{"\\:ä\n'),
            lambda inner: (
                st.lists(inner, max_size=4) | st.dictionaries(st.text('a,["\\', max_size=3), inner, max_size=4)
            ),
        ),
        st.booleans(),
    )
    def test_count_is_exact(self, read: Any, ascii_alone: bool) -> None:
        text = json.dumps(read, ensure_ascii=ascii_alone).encode()
        count = values(read)
        check_json(text, max_values=count)
        if count:
            with pytest.raises(TooComplex):
                check_json(text, max_values=count - 1)

    @pytest.mark.parametrize(
        "body",
        [
            b"[" + b"1e-400," * 9000 + b"1]",
            b'{"descriptors":[' + b"{}," * 20_000 + b"{}]}",
            b'{"descriptors":[{"entries":[' + b"{}," * 20_000 + b"{}]}]}",
            b"[" * 60_000,
            b'{"a":' * 12_000,
            b'"' * 60_000 + b"," * 2000,
            b'","' * 20_000,
        ],
    )
    async def test_json_bombs_are_not_parsed(self, body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("google.protobuf.json_format.Parse", None)
        caller = Caller()

        assert await caller.post(body) == (400, "more than 1000 values in the body\n")
        assert caller.abuse.count(Abuse.MESSAGE_TOO_COMPLEX) == 1
        assert caller.limiter.prepared == 0

    @pytest.mark.parametrize(
        "body",
        [
            pytest.param(b'{"domain":"' + b'\\"' * 30_000, id="a text that does not end"),
            pytest.param(b'"\\' * 30_000, id="backslashes and quotes"),
            pytest.param(b"\\" * 60_001, id="backslashes"),
            pytest.param(b'{"hitsAddend":' + b"1" * 60_000 + b"}", id="a number of sixty thousand digits"),
            pytest.param(b'{"hitsAddend":"' + b"1" * 60_000 + b'"}', id="the same as a text"),
            pytest.param(b'{"hitsAddend":0.' + b"1" * 60_000 + b"}", id="as many behind the point"),
            pytest.param(b"[" * MAX_VALUES + b"]" * MAX_VALUES, id="as deep as may be"),
            pytest.param(b'{"' + b"x" * 60_000 + b'":1}', id="a long name"),
            pytest.param(b'{"' + "é\n".encode() * 20_000 + b'":1}', id="a long name that cannot be printed"),
        ],
    )
    async def test_check_takes_linear_time(self, body: bytes) -> None:
        """Quadratic work would take seconds; linear work takes milliseconds on a quiet machine."""
        begun_s = time.process_time()
        status, words = await Caller().post(body)

        assert time.process_time() - begun_s < 1
        assert status == 400
        assert len(words) < 700


async def test_error_text_is_truncated_before_formatting(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(json_module, "header_value", lambda text: str(sizes.append(len(text))))  # type: ignore[func-returns-value]

    await Caller().post(b'{"' + b"x" * 60_000 + b'":1}')

    assert sizes == [json_module.MAX_ERROR_CHARACTERS]


class TestBodySize:
    async def test_content_length_is_checked_before_reading(self) -> None:
        caller = Caller()

        assert await caller.post(length=MAX_BODY_BYTES + 1) == (
            413,
            "the body is too large; at most 65536 bytes are allowed (RLS_MAX_JSON_BYTES)\n",
        )
        assert caller.received == 0
        assert caller.abuse.count(Abuse.MESSAGE_TOO_LARGE) == 1

    @pytest.mark.parametrize("length", ["9" * 5000, "٣", "-1", "x", "1_0", ""])
    async def test_invalid_content_length_does_not_fail(self, length: str) -> None:
        """The server rejects these earlier; the app must not fail on them."""
        status, _ = await Caller().post(body_with(1).encode(), length=length)

        assert status == (413 if length.startswith("9") else 200)

    async def test_body_without_content_length_is_counted(self) -> None:
        caller = Caller()

        status, _ = await caller.post(*[b" " * 40_000] * 9)

        assert (status, caller.received) == (413, 2)
        assert caller.abuse.count(Abuse.MESSAGE_TOO_LARGE) == 1

    async def test_body_of_maximum_size_is_accepted(self) -> None:
        caller = Caller()
        body = body_with(1).encode().ljust(MAX_BODY_BYTES)

        status, _ = await caller.post(body, length=len(body))

        assert status == 200
        assert not any(caller.abuse.measured())


async def test_ordinary_body_with_many_descriptors() -> None:
    assert (await Caller().post(body_with(150).encode()))[0] in (200, 429)


async def test_message_bounds_apply_to_json() -> None:
    caller = Caller(MessageBounds(descriptors=2))

    assert (await caller.post(body_with(2).encode()))[0] == 200
    assert await caller.post(body_with(3).encode()) == (
        400,
        "at most 2 descriptors are allowed in one message (RLS_MAX_DESCRIPTORS)\n",
    )
    assert caller.abuse.count(Abuse.MESSAGE_TOO_COMPLEX) == 1


def test_abuse_is_recorded_by_peer_address() -> None:
    scope = {"type": "http", "headers": [], "client": (PEER, 1)}

    assert json_module._peer(Request(scope)) == PEER
    assert json_module._peer(Request({**scope, "client": None})) == "unix"


async def test_message_that_is_too_large_is_413() -> None:
    """RLS_MAX_MESSAGE_BYTES may be smaller than RLS_MAX_JSON_BYTES."""
    body = json.dumps({"domain": "edge", "descriptors": [{"entries": [{"key": "user", "value": "x" * 2000}]}]}).encode()
    status, text = await Caller(MessageBounds(message_bytes=1024)).post(body)
    assert (status, text) == (413, "the message is too large; at most 1024 bytes are read\n")
