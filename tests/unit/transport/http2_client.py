"""A client of one connection without a socket: it writes frames, and reads ours with another implementation's table.

Nothing here waits. Turns of the loop and the time are the test's to give.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from struct import pack
from typing import Any, NamedTuple

from hpack import Decoder, Encoder

from ratelimit_rls.transport.grpc.connection import Connection, greeting
from ratelimit_rls.transport.grpc.door import Failure, FailureCode
from ratelimit_rls.transport.grpc.head import Arrived, Head, HeadReader
from ratelimit_rls.transport.http2 import frames
from ratelimit_rls.transport.http2.frames import (
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
    Setting,
    frame,
)

METHOD = "/a.Service/Method"
RELAYED = "/another.Service/Method"
MOST_STREAMS = 8
MOST_MESSAGE_BYTES = 4 * 2**20

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
        assert len(payload) == word >> 8, "a frame is cut short"
        at += len(payload)
        yield Frame(word & 0xFF, flags, stream_id, payload)


def prefixed(message: bytes, *, compressed: int = 0) -> bytes:
    return pack(">BI", compressed, len(message)) + message


def fields(path: str = METHOD, **others: str) -> Fields:
    """Of a call. A keyword stands for a field; its underscores are hyphens there."""
    named = {"te": "trailers", "content-type": "application/grpc"}
    named |= {name.replace("_", "-"): value for name, value in others.items()}
    pseudo = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "here"}
    return [*pseudo.items(), *named.items()]


class Timer:
    def __init__(self, loop: Loop, due_s: float, callback: Callable[[], object]) -> None:
        self.loop, self.due_s, self.callback = loop, due_s, callback

    def cancel(self) -> None:
        if self in self.loop.timers:
            self.loop.timers.remove(self)


class Loop:
    """What a connection needs of one."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timers: list[Timer] = []
        self._soon: list[Callable[[], object]] = []

    def call_soon(self, callback: Callable[[], object]) -> None:
        self._soon.append(callback)

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Timer:
        timer = Timer(self, self.now_s + delay_s, callback)
        self.timers.append(timer)
        return timer

    def turn(self) -> None:
        now, self._soon = self._soon, []
        for callback in now:
            callback()

    def run(self) -> None:
        """Until nothing is left to do at this moment."""
        while self._soon:
            self.turn()

    def wait(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while due := [timer for timer in self.timers if timer.due_s <= until_s]:
            first = min(due, key=lambda timer: timer.due_s)
            self.timers.remove(first)
            self.now_s = first.due_s
            first.callback()
            self.run()
        self.now_s = until_s


class Socket(asyncio.Transport):
    """What a connection is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.reads = True
        self.is_closed = False
        self.is_aborted = False

    def write(self, data: Any) -> None:
        assert not self.is_closed
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


class RelayedCall:
    """A call that somebody else would serve. It takes what it is told to, and fails when it is told to."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.has_begun = self.has_ended = False
        self.held_bytes = 0
        self.taken = b""
        self.rooms = 0
        self.is_cancelled = False
        self.failure: Failure | None = None
        self.failure_at_end: Failure | None = None

    @property
    def is_as_long_as_said(self) -> bool:
        return self.head.content_length in (None, len(self.taken))

    def take(self, data: bytes, most_bytes: int) -> Failure | None:
        self.taken += data
        self.held_bytes += len(data)
        return self.failure

    def ended(self) -> Failure | None:
        self.has_ended = True
        return self.failure_at_end

    def has_room(self) -> None:
        self.rooms += 1

    def cancel(self) -> None:
        self.is_cancelled = True


class Host:
    """What a connection belongs to. It answers nothing by itself."""

    def __init__(self) -> None:
        self.gathering: list[Arrived] = []
        self.heads = HeadReader({METHOD: self.gathering})
        self.most_streams = MOST_STREAMS
        self.most_message_bytes = MOST_MESSAGE_BYTES
        self.greeting = greeting(MOST_STREAMS)
        self.max_age_s = self.max_age_grace_s = inf
        self.connections: list[Connection] = []
        self.gathered_times = 0
        self.left_ids: list[int] = []
        self.holds_all = False  # every call that was gathered
        self.relayed: dict[int, RelayedCall] = {}

    def made(self, connection: Connection) -> None:
        self.connections.append(connection)

    def lost(self, connection: Connection) -> None:
        self.connections.remove(connection)

    def gathered(self) -> None:
        self.gathered_times += 1

    def left(self, connection: Connection, stream_id: int) -> bool:
        self.left_ids.append(stream_id)
        return not self.holds_all

    def relay(self, connection: Connection, stream_id: int, head: Head) -> Any:
        self.relayed[stream_id] = RelayedCall(head)
        return self.relayed[stream_id]


@dataclass
class Answer:
    """What came back on one stream."""

    blocks: list[dict[str, str]] = field(default_factory=list)
    data: bytes = b""
    frames_of_data: list[int] = field(default_factory=list)  # their sizes
    has_ended: bool = False
    reset: ErrorCode | None = None

    @property
    def status(self) -> tuple[FailureCode | int, str]:
        trailers = self.blocks[-1]
        return int(trailers["grpc-status"]), trailers.get("grpc-message", "")

    @property
    def message(self) -> bytes:
        """Of an answer with one, and nothing wrong."""
        assert [*map(dict, self.blocks)] == [
            {":status": "200", "content-type": "application/grpc"},
            {"grpc-status": "0"},
        ]
        assert self.has_ended
        assert self.data[:5] == pack(">BI", 0, len(self.data) - 5)
        return self.data[5:]


class Client:
    """And the whole of what it talks to."""

    def __init__(self, host: Host | None = None, *, greets: bool = True) -> None:
        self.host = host or Host()
        self.loop = Loop()
        self.socket = Socket()
        self.encoder = Encoder()
        self.decoder = Decoder()
        self.answers: dict[int, Answer] = {}
        self.others: list[Frame] = []  # of the connection
        self._read_writes = 0
        running = asyncio._get_running_loop()
        asyncio._set_running_loop(self.loop)  # type: ignore[arg-type]
        try:
            self.connection = Connection(self.host)
        finally:
            asyncio._set_running_loop(running)
        self.connection.connection_made(self.socket)
        self.next_id = 1
        if greets:
            self.give(PREFACE + frames.settings({}))
            self.others.clear()

    # ── writing ──

    def give(self, data: bytes) -> None:
        """Have the connection read this, and read what it writes."""
        self.connection.data_received(data)
        self.settle()

    def settle(self) -> None:
        self.loop.run()
        self._read()

    def block(self, headers: Iterable[tuple[str, str]]) -> bytes:
        return bytes(self.encoder.encode(headers, huffman=False))

    def plain_block(self, headers: Iterable[tuple[str, str]]) -> bytes:
        """Without a table, so it means the same wherever it stands."""
        return bytes(self.encoder.encode(((*field, True) for field in headers), huffman=False))

    def open(self, headers: Fields | None = None, *, flags: int = 0, data: bytes | None = None) -> int:
        """A stream. With data, it ends."""
        stream_id = self.next_id
        self.next_id += 2
        request = frame(HEADERS, END_HEADERS | flags, stream_id, self.block(headers or fields()))
        if data is not None:
            request += frame(DATA, END_STREAM, stream_id, data)
        self.give(request)
        return stream_id

    def ask(self, message: bytes = b"hello", headers: Fields | None = None) -> int:
        return self.open(headers, data=prefixed(message))

    def data(self, stream_id: int, data: bytes, flags: int = 0) -> None:
        self.give(frame(DATA, flags, stream_id, data))

    def settings(self, values: dict[Setting, int]) -> None:
        self.give(frames.settings(values))

    def window(self, stream_id: int, more_bytes: int) -> None:
        self.give(frames.window_update(stream_id, more_bytes))

    def reset(self, stream_id: int, code: ErrorCode = ErrorCode.CANCEL) -> None:
        self.give(frames.reset(stream_id, code))

    def hand_on(self, stream_id: int, size: int, held_bytes: int | None = None) -> None:
        """Whoever serves a relayed call takes so many bytes on."""
        held_bytes = size if held_bytes is None else held_bytes
        self.host.relayed[stream_id].held_bytes -= held_bytes
        self.connection.consumed(stream_id, size, held_bytes)
        self.settle()

    def lose(self) -> None:
        self.connection.connection_lost(None)
        self.loop.run()

    # ── reading ──

    def _read(self) -> None:
        new, self._read_writes = self.socket.writes[self._read_writes :], len(self.socket.writes)
        for one in split(b"".join(new)):
            if one.stream_id == 0:
                self.others.append(one)
                continue
            answer = self.answers.setdefault(one.stream_id, Answer())
            assert one.kind in (HEADERS, DATA, RST_STREAM, frames.WINDOW_UPDATE)
            if one.kind == frames.WINDOW_UPDATE:
                self.others.append(one)
                continue
            assert answer.reset is None or one.kind == RST_STREAM
            if one.kind == RST_STREAM:
                answer.reset = ErrorCode(int.from_bytes(one.payload, "big"))
                continue
            assert not answer.has_ended
            if one.kind == HEADERS:
                assert one.flags & END_HEADERS
                block = dict(self.decoder.decode(one.payload))
                assert (":status" in block) != bool(answer.blocks), "one head, and it comes first"
                answer.blocks.append(block)
            else:
                assert answer.blocks, "data before a head"
                answer.data += one.payload
                answer.frames_of_data.append(len(one.payload))
            answer.has_ended = bool(one.flags & END_STREAM)

    @property
    def asked(self) -> list[bytes]:
        """Messages that the host was given."""
        return [message for _, _, message, _, _ in self.host.gathering]

    @property
    def asked_ids(self) -> list[int]:
        return [stream_id for _, stream_id, _, _, _ in self.host.gathering]

    def answer(self, stream_id: int, message: bytes = b"world") -> Answer:
        self.connection.answer(stream_id, message)
        self.settle()
        return self.answers.get(stream_id, Answer())

    def of_kind(self, kind: int) -> list[Frame]:
        return [one for one in self.others if one.kind == kind]

    @property
    def went_away(self) -> list[tuple[int, ErrorCode]]:
        """What each GOAWAY said: the last stream that was looked at, and why."""
        return [
            (int.from_bytes(one.payload[:4], "big"), ErrorCode(int.from_bytes(one.payload[4:8], "big")))
            for one in self.of_kind(GOAWAY)
        ]

    @property
    def fault(self) -> ErrorCode | None:
        """Why the connection was ended; None: it was not."""
        if not self.socket.is_closed:
            assert not self.went_away
            return None
        ((_, code),) = self.went_away
        return code

    @property
    def is_well(self) -> bool:
        """It goes on working."""
        pings = len(self.of_kind(PING))
        self.give(frame(PING, 0, 0, b"are you?"))
        return not self.socket.is_closed and len(self.of_kind(PING)) == pings + 1

    @property
    def acknowledged(self) -> int:
        """Settings of ours that were taken."""
        return sum(one.flags & frames.ACK for one in self.of_kind(SETTINGS))
