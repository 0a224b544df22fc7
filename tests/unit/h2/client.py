"""Test client of one HTTP/2 connection, without a socket and without time. It decodes headers with the hpack library.

The test sets the time (`now_s`), and nothing here waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from struct import pack
from typing import Any, NamedTuple

from hpack import Decoder, Encoder

from ratelimit_rls.h2 import frames
from ratelimit_rls.h2.call_headers import CallHeaders, CallHeadersParser, QueuedCall
from ratelimit_rls.h2.config import Config
from ratelimit_rls.h2.connection import Connection
from ratelimit_rls.h2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    ErrorCode,
    Http2ConnectionError,
    Setting,
    frame,
)
from ratelimit_rls.h2.status import RpcError, StatusCode

METHOD = "/a.Service/Method"
PROXIED_METHOD = "/another.Service/Method"
MAX_STREAMS = 8
MAX_MESSAGE_BYTES = 4 * 2**20

Fields = list[tuple[str, str]]


class Frame(NamedTuple):
    kind: int
    flags: int
    stream_id: int
    payload: bytes


def split(data: bytes) -> Iterator[Frame]:
    at = 0
    while at < len(data):
        word, flags, stream_id = frames.HEADER.unpack_from(data, at)
        at += frames.FRAME_HEADER_BYTES
        payload = data[at : at + (word >> 8)]
        assert len(payload) == word >> 8, "truncated frame"
        at += len(payload)
        yield Frame(word & 0xFF, flags, stream_id, payload)


def prefixed(message: bytes, *, compressed: int = 0) -> bytes:
    return pack(">BI", compressed, len(message)) + message


def fields(path: str = METHOD, **others: str) -> Fields:
    """Return the header fields of a call. Keywords add fields; underscores become hyphens."""
    named = {"te": "trailers", "content-type": "application/grpc"}
    named |= {name.replace("_", "-"): value for name, value in others.items()}
    pseudo = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "here"}
    return [*pseudo.items(), *named.items()]


class FakeStreamingCall:
    """Fake streaming call. It fails when the test sets `failure` or `failure_at_end`."""

    def __init__(self, headers: CallHeaders) -> None:
        self.headers = headers
        self.response_started = self.has_ended = False
        self.buffered_bytes = 0
        self.taken = b""
        self.window_openings = 0
        self.is_cancelled = False
        self.failure: RpcError | None = None
        self.failure_at_end: RpcError | None = None

    @property
    def matches_content_length(self) -> bool:
        return self.headers.content_length in (None, len(self.taken))

    def receive_data(self, data: bytes, max_bytes: int) -> RpcError | None:
        self.taken += data
        self.buffered_bytes += len(data)
        return self.failure

    def on_end_stream(self) -> RpcError | None:
        self.has_ended = True
        return self.failure_at_end

    def on_writable(self) -> None:
        self.window_openings += 1

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeApplication:
    """Fake application on a connection. It sends no responses by itself."""

    def __init__(self) -> None:
        self.queue: list[QueuedCall] = []
        self.config = Config(CallHeadersParser({METHOD: self.queue}), MAX_STREAMS, MAX_MESSAGE_BYTES)
        self.abuse: Counter[StrEnum] = Counter()
        self.buffered_bytes = 0
        self.queue_notifications = 0
        self.cancelled_ids: list[int] = []
        self.delays_all = False  # all queued calls are delayed
        self.defers_all = False  # input is deferred after every slow frame
        self.proxied: dict[int, FakeStreamingCall] = {}


class RecordingConnection(Connection):
    """Connection that reports to a FakeApplication."""

    def __init__(self, application: FakeApplication) -> None:
        super().__init__(application.config)
        self.application = application
        self.writes: list[bytes] = []
        self.has_announced = self.is_deferred = self.is_ready = self.is_drained = False

    def flush(self) -> None:
        data = self.data_to_send()
        assert not data or self.has_announced
        self.has_announced = False
        if data and not self.is_closed:
            self.writes.append(data)

    def on_output(self) -> None:
        assert not self.has_announced
        self.has_announced = True

    def on_calls_queued(self) -> None:
        self.application.queue_notifications += 1

    def on_cancelled(self, stream_id: int) -> bool:
        self.application.cancelled_ids.append(stream_id)
        return not self.application.delays_all

    def on_abuse(self, reason: StrEnum, times: int = 1) -> None:
        self.application.abuse[reason] += times

    def on_buffered(self, more_bytes: int) -> None:
        self.application.buffered_bytes += more_bytes
        assert self.application.buffered_bytes == self.buffered_bytes

    def on_ready(self) -> None:
        assert not self.is_ready
        self.is_ready = True

    def on_draining(self) -> None:
        assert not self.is_drained
        self.is_drained = True

    def on_close(self, error: Http2ConnectionError | None) -> None:
        self.writes.append(self.data_to_send())
        self.has_announced = False

    def open_stream(self, stream_id: int, headers: CallHeaders) -> FakeStreamingCall:
        self.application.proxied[stream_id] = FakeStreamingCall(headers)
        return self.application.proxied[stream_id]

    def defer_slow_input(self) -> bool:
        self.is_deferred = self.application.defers_all
        return self.is_deferred


@dataclass
class Response:
    """Response received on one stream."""

    blocks: list[dict[str, str]] = field(default_factory=list)
    data: bytes = b""
    frames_of_data: list[int] = field(default_factory=list)  # their sizes
    has_ended: bool = False
    reset: ErrorCode | None = None

    @property
    def status(self) -> tuple[StatusCode | int, str]:
        trailers = self.blocks[-1]
        return int(trailers["grpc-status"]), trailers.get("grpc-message", "")

    @property
    def message(self) -> bytes:
        """The message of a successful response with one message."""
        assert [*map(dict, self.blocks)] == [
            {":status": "200", "content-type": "application/grpc"},
            {"grpc-status": "0"},
        ]
        assert self.has_ended
        assert self.data[:5] == pack(">BI", 0, len(self.data) - 5)
        return self.data[5:]


class Client:
    """A client, with the connection and the application it talks to."""

    connection: Any

    def __init__(self, server: Any = None, *, sends_preface: bool = True) -> None:
        self.now_s = 1000.0
        self.encoder = Encoder()
        self.decoder = Decoder()
        self.responses: dict[int, Response] = {}
        self.connection_frames: list[Frame] = []  # frames of the connection
        self._read_writes = 0
        self._connect(server)
        self.next_id = 1
        if sends_preface:
            self.send(PREFACE + frames.settings({}))
            self.connection_frames.clear()

    def _connect(self, server: FakeApplication | None) -> None:
        self.server = server or FakeApplication()
        self.connection = RecordingConnection(self.server)
        self.connection.start(self.now_s)

    @property
    def writes(self) -> list[bytes]:
        """Everything that the connection has sent."""
        writes: list[bytes] = self.connection.writes
        return writes

    @property
    def is_closed(self) -> bool:
        return bool(self.connection.is_closed)

    # ── writing ──

    def send(self, data: bytes) -> None:
        """Send data to the connection, and read its output."""
        self.connection.receive_data(data, self.now_s)
        while self.connection.is_deferred and not self.is_closed:
            self.connection.is_deferred = False
            self.connection.receive_data(b"", self.now_s)
        self.settle()

    def settle(self) -> None:
        self.connection.flush()
        self._read()

    def check_progress(self, seconds: float) -> bool:
        """Check for progress once a second. Return False if the client cannot be reached."""
        is_reached = True
        for _ in range(int(seconds)):
            self.now_s += 1
            is_reached = is_reached and self.connection.check_progress(self.now_s)
        self.settle()
        return is_reached

    def block(self, headers: Iterable[tuple[str, str]]) -> bytes:
        return bytes(self.encoder.encode(headers, huffman=False))

    def plain_block(self, headers: Iterable[tuple[str, str]]) -> bytes:
        """Encode headers without the dynamic table, so that the block is valid at any time."""
        return bytes(self.encoder.encode(((*field, True) for field in headers), huffman=False))

    def open(self, headers: Fields | None = None, *, flags: int = 0, data: bytes | None = None) -> int:
        """Open a stream. With `data`, send it and end the stream."""
        stream_id = self.next_id
        self.next_id += 2
        request = frame(HEADERS, END_HEADERS | flags, stream_id, self.block(headers or fields()))
        if data is not None:
            request += frame(DATA, END_STREAM, stream_id, data)
        self.send(request)
        return stream_id

    def call(self, message: bytes = b"hello", headers: Fields | None = None) -> int:
        return self.open(headers, data=prefixed(message))

    def data(self, stream_id: int, data: bytes, flags: int = 0) -> None:
        self.send(frame(DATA, flags, stream_id, data))

    def settings(self, values: dict[Setting, int]) -> None:
        self.send(frames.settings(values))

    def window(self, stream_id: int, more_bytes: int) -> None:
        self.send(frames.window_update(stream_id, more_bytes))

    def reset(self, stream_id: int, code: ErrorCode = ErrorCode.CANCEL) -> None:
        self.send(frames.rst_stream(stream_id, code))

    def disconnect(self) -> None:
        self.connection.terminate()
        self.settle()

    # ── reading ──

    def _read(self) -> None:
        new, self._read_writes = self.writes[self._read_writes :], len(self.writes)
        for one in split(b"".join(new)):
            if one.stream_id == 0:
                self.connection_frames.append(one)
                continue
            response = self.responses.setdefault(one.stream_id, Response())
            assert one.kind in (HEADERS, DATA, RST_STREAM, frames.WINDOW_UPDATE)
            if one.kind == frames.WINDOW_UPDATE:
                self.connection_frames.append(one)
                continue
            assert response.reset is None or one.kind == RST_STREAM
            if one.kind == RST_STREAM:
                response.reset = ErrorCode(int.from_bytes(one.payload, "big"))
                continue
            assert not response.has_ended
            if one.kind == HEADERS:
                assert one.flags & END_HEADERS
                block = dict(self.decoder.decode(one.payload))
                assert (":status" in block) != bool(response.blocks), "headers must come once, and first"
                response.blocks.append(block)  # type: ignore[arg-type]
            else:
                assert response.blocks, "DATA before HEADERS"
                response.data += one.payload
                response.frames_of_data.append(len(one.payload))
            response.has_ended = bool(one.flags & END_STREAM)

    @property
    def queued(self) -> list[bytes]:
        """Messages of the queued calls."""
        return [message for _, _, message, _, _ in self.server.queue]

    @property
    def queued_ids(self) -> list[int]:
        return [stream_id for _, stream_id, _, _, _ in self.server.queue]

    def respond(self, stream_id: int, message: bytes = b"world") -> Response:
        self.connection.respond(stream_id, message)
        self.settle()
        return self.responses.get(stream_id, Response())

    def frames_of_type(self, kind: int) -> list[Frame]:
        return [one for one in self.connection_frames if one.kind == kind]

    @property
    def goaways(self) -> list[tuple[int, ErrorCode]]:
        """Last stream id and error code of each GOAWAY."""
        return [
            (int.from_bytes(one.payload[:4], "big"), ErrorCode(int.from_bytes(one.payload[4:8], "big")))
            for one in self.frames_of_type(GOAWAY)
        ]

    @property
    def error(self) -> ErrorCode | None:
        """Error code with which the connection was closed; None if it is open."""
        if not self.is_closed:
            assert not self.goaways
            return None
        ((_, code),) = self.goaways
        return code

    @property
    def is_alive(self) -> bool:
        """True if the connection still works."""
        pings = len(self.frames_of_type(PING))
        self.send(frame(PING, 0, 0, b"are you?"))
        return not self.is_closed and len(self.frames_of_type(PING)) == pings + 1

    @property
    def acknowledged(self) -> int:
        """Number of acknowledged SETTINGS frames."""
        return sum(one.flags & frames.ACK for one in self.frames_of_type(SETTINGS))
