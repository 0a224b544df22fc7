"""One client's connection: HTTP/2 frames in, calls out; answers in, HTTP/2 frames out.

    bytes ─► _read ─► a head that is known, one message in one frame ─► gathered      nearly every call
                 └─► _slowly ─► whatever else HTTP/2 allows, or forbids

Guarantees, whatever the client sends: no more than `most_streams` calls are open, or were given up and are still being
decided; no more than MOST_HELD_BYTES of messages that are not whole are kept; who does not read its answers is not read
from; and who sends what takes long to read waits for everybody else's turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from math import inf
from random import uniform
from time import monotonic
from typing import TYPE_CHECKING, Protocol, cast

from ratelimit_rls.transport.grpc import reply
from ratelimit_rls.transport.grpc.arriving import Arriving, TurnedAway
from ratelimit_rls.transport.grpc.door import Failure, FailureCode
from ratelimit_rls.transport.grpc.head import NOWHERE, Head, HeadReader, NotGrpc
from ratelimit_rls.transport.http2 import frames
from ratelimit_rls.transport.http2.blocks import MOST_LIST_BYTES, Block, Blocks
from ratelimit_rls.transport.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER_BYTES,
    HEADERS,
    MOST_FRAME_BYTES,
    ConnectionFault,
    ErrorCode,
    Setting,
    StreamFault,
    frame,
)
from ratelimit_rls.transport.http2.requests import check_fields
from ratelimit_rls.transport.http2.sending import Sending

if TYPE_CHECKING:
    from ratelimit_rls.transport.grpc.relay import Relayed

MOST_HELD_BYTES = 16 * 2**20
WINDOW_BYTES = 16 * 2**20
GIVE_BACK_BYTES = 2**20
STREAM_WINDOW_BYTES = 5 * 2**20
"""A message of the largest size that is taken fits, with its prefix and padding."""

MOST_CUT = 1024
PREFACE_S = 20.0
"""Within which a client has to begin."""

TURN_S = 0.002
"""After which others have theirs, if it goes into anything but ordinary calls: of those, few can be open."""

LAST_PING = b"last one"
LOOK_AGAIN_S = 0.01
LINGER_S = 5.0
"""For which a connection that we closed stays for its client to read what was written."""

AGE_SPREAD = 0.1
"""Connections that were made together should not all end together."""

_ASKED = "its message is here, and its answer is not"
_ANSWERING = "its answer waits for room at the client's"

_log = logging.getLogger(__name__)


class Host(Protocol):
    """What a connection belongs to."""

    heads: HeadReader
    greeting: bytes
    most_streams: int
    most_message_bytes: int
    max_age_s: float
    max_age_grace_s: float

    def made(self, connection: Connection) -> None: ...
    def lost(self, connection: Connection) -> None: ...

    def gathered(self) -> None:
        """There may be calls where heads say that they are gathered."""
        ...

    def left(self, connection: Connection, stream_id: int) -> bool:
        """A caller whose call was gathered waits no longer. Says whether it will be answered all the same."""
        ...

    def relay(self, connection: Connection, stream_id: int, head: Head) -> Relayed:
        """A call that is served the ordinary way."""
        ...


def greeting(most_streams: int) -> bytes:
    """What a server says first."""
    return frames.settings(
        {
            Setting.MAX_CONCURRENT_STREAMS: most_streams,
            Setting.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
            Setting.MAX_HEADER_LIST_SIZE: MOST_LIST_BYTES,
        }
    ) + frames.window_update(0, WINDOW_BYTES - frames.DEFAULT_WINDOW_BYTES)


class Connection(asyncio.Protocol):
    def __init__(self, host: Host) -> None:
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._transport: asyncio.Transport
        self._sending: Sending
        self._has_preface = self._has_settings = False
        self._rest = b""  # of a frame that is not whole
        self._blocks: Blocks[Head] = Blocks()
        self._last_id = 0
        self._streams: dict[int, Head | Arriving | TurnedAway | Relayed | str] = {}
        self._cut: dict[int, None] = {}  # streams that we ended while the client may still be sending
        self._abandoned = 0  # calls that are being decided, and whose callers do not wait any longer
        self._held_bytes = 0
        self._received_bytes = 0
        self._is_full = False  # the client has to read first
        self._will_go_on = False
        self._is_leaving = False  # takes no new calls, and is closed when the last is answered
        self._is_over = False

    # What the loop tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not instances of it
        self._sending = Sending(self._transport, self._loop)
        self._host.made(self)
        self._sending.write(self._host.greeting)
        self._timers["quiet"] = self._loop.call_later(PREFACE_S, self._too_quiet)
        if self._host.max_age_s < inf:
            age_s = self._host.max_age_s * uniform(1 - AGE_SPREAD, 1 + AGE_SPREAD)
            self._timers["age"] = self._loop.call_later(age_s, self._too_old)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_over = True
        for timer in self._timers.values():
            timer.cancel()
        for stream_id in list(self._streams):
            self._drop(stream_id)
        self._host.lost(self)

    def pause_writing(self) -> None:
        self._is_full = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._is_full = False
        self._go_on_soon()

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        try:
            self._read(self._rest + data if self._rest else data)
        except ConnectionFault as fault:
            self._host.gathered()
            self._fail(fault)

    # What the host tells.

    def answer(self, stream_id: int, message: bytes) -> None:
        """Answer a call that was gathered, if its caller still waits."""
        if self._streams.pop(stream_id, None) is None:
            self._abandoned -= 1
            return
        sending = self._sending
        size = len(message)
        data_bytes = size + reply.PREFIX_BYTES
        if data_bytes > sending.most_at_once or data_bytes > sending.window:
            self._answer_slowly(stream_id, message)
            return
        sending.window -= data_bytes
        if sending.given:
            sending.given.pop(stream_id, None)
        sending.ready.append(reply.written(size)(stream_id, message))
        if not sending.will_flush:
            sending.flush_soon()

    def fail(self, stream_id: int, failure: Failure) -> None:
        """Tell the caller of a call that was gathered, if it still waits, why there is no answer."""
        if self._streams.pop(stream_id, None) is None:
            self._abandoned -= 1
        else:
            self._tell_failure(stream_id, failure)

    def waits(self, stream_id: int) -> bool:
        """Whether there is somebody to answer."""
        return stream_id in self._streams

    def let_go(self) -> None:
        """A call that was gathered is decided, and since nobody waits, not answered."""
        self._abandoned -= 1

    def begin(self, stream_id: int) -> None:
        """The head of an answer whose messages come one by one."""
        cast("Relayed", self._streams[stream_id]).has_begun = True
        self._sending.headers(stream_id, reply.HEAD)

    def send(self, stream_id: int, message: bytes) -> bool:
        """Another message of it. False: it waits for room at the client's, and `Relayed.has_room` will be called."""
        return self._sending.send(stream_id, reply.prefixed(message))

    def end(self, stream_id: int, code: int, words: str, metadata: reply.Metadata) -> None:
        """The end of such an answer, or all there is of it."""
        stream = cast("Relayed", self._streams.pop(stream_id))
        self._held_bytes -= stream.held_bytes
        block = reply.status(code, words, metadata)
        self._sending.headers(stream_id, block if stream.has_begun else reply.HEAD + block, END_STREAM)
        self._sending.forget(stream_id)
        if not stream.has_ended:
            self._cut_off(stream_id)

    def consumed(self, stream_id: int, size: int, held_bytes: int) -> None:
        """A message of a relayed call has been taken on: so many bytes on the wire, and so many here."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._held_bytes -= held_bytes
            if not cast("Relayed", stream).has_ended:
                self._sending.write(frames.window_update(stream_id, size))

    def leave(self) -> None:
        """Ask the client to make its next calls on another connection; close when those of this one are answered."""
        if not (self._is_leaving or self._is_over):
            # When the client answers the ping it has read what stands before it, and we have all calls that it made
            # before it knew.
            self._sending.write(frames.go_away(frames.LARGEST_STREAM_ID, ErrorCode.NO_ERROR))
            self._sending.write(frame(frames.PING, 0, 0, LAST_PING))

    def close(self) -> None:
        """When what is written has been sent."""
        if not self._is_over:
            self._sending.write(frames.go_away(self._last_id, ErrorCode.NO_ERROR))
            self._end()

    def abort(self) -> None:
        self._transport.abort()

    # Reading.

    def _read(self, data: bytes) -> None:
        at = 0
        if not self._has_preface:
            if not self._preface(data):
                return
            at = len(frames.PREFACE)
        now_s = monotonic()
        unpack, unpack_prefix, prefix_bytes = frames.HEADER.unpack_from, reply.PREFIX.unpack_from, reply.PREFIX_BYTES
        streams, known = self._streams, self._blocks.known
        most_streams = self._host.most_streams - self._abandoned
        is_slow = self._blocks.is_unfinished or self._is_leaving
        received_bytes = 0
        end = len(data)
        while end - at >= FRAME_HEADER_BYTES:
            word, flags, stream_id = unpack(data, at)
            length = word >> 8
            if length > MOST_FRAME_BYTES:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            start = at + FRAME_HEADER_BYTES
            stop = start + length
            if stop > end:
                break
            at = stop
            kind = word & 0xFF
            if is_slow:
                pass
            elif kind == DATA:
                head = streams.get(stream_id)
                if (
                    head.__class__ is Head
                    and flags == END_STREAM
                    and length >= prefix_bytes
                    and unpack_prefix(data, start) == (0, length - prefix_bytes)
                ):
                    received_bytes += length
                    streams[stream_id] = _ASKED
                    head.gathering.append((self, stream_id, data[start + prefix_bytes : stop], now_s, head))
                    continue
            elif kind == HEADERS and flags == END_HEADERS and stream_id > self._last_id and stream_id & 1:
                head = known.get(data[start:stop])
                if head is not None and len(streams) < most_streams:
                    self._last_id = stream_id
                    streams[stream_id] = head
                    continue
            self._slowly(kind, flags, stream_id & frames.STREAM_ID_BITS, data[start:stop])
            if self._is_over:
                break
            if monotonic() - now_s > TURN_S:
                self._transport.pause_reading()
                self._go_on_soon()
                break
            most_streams = self._host.most_streams - self._abandoned
            is_slow = self._blocks.is_unfinished or self._is_leaving
        self._rest = data[at:]
        if received_bytes:
            self._host.gathered()
            self._received(received_bytes)

    def _go_on_soon(self) -> None:
        if not self._will_go_on:
            self._will_go_on = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """With what is left of the last turn, and then with what comes."""
        self._will_go_on = False
        if not self._is_full:
            self.data_received(b"")
            if not (self._will_go_on or self._is_over):
                self._transport.resume_reading()

    def _preface(self, data: bytes) -> bool:
        """Whether it is all there. Raises ConnectionFault if something else is."""
        if data.startswith(frames.PREFACE):
            self._has_preface = True
        elif frames.PREFACE.startswith(data):
            self._rest = data
        else:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "this is a gRPC port, and speaks HTTP/2 from the beginning")
        return self._has_preface

    def _slowly(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """One frame of any kind."""
        if not self._has_settings:
            if kind != frames.SETTINGS or flags & frames.ACK:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a client's settings must come first")
            self._has_settings = True
            self._timers["quiet"].cancel()
        if self._blocks.is_unfinished is not (kind == CONTINUATION):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a header block and its continuation are apart")
        frames.check_length(kind, stream_id, payload)
        if self._is_leaving and stream_id > self._last_id and kind not in (HEADERS, CONTINUATION):
            return  # of a call that came too late
        handler = _HANDLERS.get(kind)
        if handler is None:
            return  # of a later version of the protocol
        try:
            handler(self, flags, stream_id, payload)
        except StreamFault as fault:
            self._drop(stream_id)
            self._cut_off(stream_id, fault.code)

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        block = self._blocks.begin(flags, stream_id, payload)
        if block is not None:
            self._on_block(block)

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        block = self._blocks.go_on(flags, stream_id, payload)
        if block is not None:
            self._on_block(block)

    def _on_block(self, block: Block) -> None:
        stream_id = block.stream_id
        if stream_id in self._streams:
            self._on_trailers(block)
        elif not stream_id & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a client opens a stream with an even number")
        elif stream_id > self._last_id:
            self._on_request(block)
        elif stream_id not in self._cut:
            raise ConnectionFault(ErrorCode.STREAM_CLOSED, "a stream is opened again")

    def _on_request(self, block: Block) -> None:
        if self._is_leaving:
            return  # and the client knows that it was not served
        stream_id = self._last_id = block.stream_id
        if len(self._streams) + self._abandoned >= self._host.most_streams:
            raise StreamFault(ErrorCode.REFUSED_STREAM)
        stream = self._new_stream(block)
        if isinstance(stream, Failure):
            self._tell_failure(stream_id, stream)
            if not block.flags & END_STREAM:
                self._cut_off(stream_id)
            return
        self._streams[stream_id] = stream
        if isinstance(stream, Head):
            self._blocks.remember(block, stream)
        if block.flags & END_STREAM:
            self._on_end(stream_id)

    def _new_stream(self, block: Block) -> Head | Arriving | Relayed | TurnedAway | Failure:
        try:
            if block.fields is None:
                raise NotGrpc(431, f"the headers are too large; at most {MOST_LIST_BYTES} bytes are read")
            head = self._host.heads.read(block.fields)
        except NotGrpc as told:
            return TurnedAway(told)
        if isinstance(head, Failure):
            return head
        if head.gathering is NOWHERE:
            return self._host.relay(self, block.stream_id, head)
        return head if head.content_length is None else Arriving(head)

    def _on_trailers(self, block: Block) -> None:
        """Of a request. Nothing in them is of interest, but that they end it."""
        if self._is_half_closed(block.stream_id):
            raise StreamFault(ErrorCode.STREAM_CLOSED)
        if not block.flags & END_STREAM:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR)
        check_fields(block.fields or ())
        self._on_end(block.stream_id)

    def _is_half_closed(self, stream_id: int) -> bool:
        """The client has said that it is done with it."""
        stream = self._streams[stream_id]
        return isinstance(stream, str) or (not isinstance(stream, (Head, Arriving, TurnedAway)) and stream.has_ended)

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._received(len(payload))
        stream = self._streams.get(stream_id)
        if stream is None and stream_id > self._last_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "data on a stream that is not open")
        if stream is None and stream_id in self._cut:
            return
        if stream is None or self._is_half_closed(stream_id):
            raise StreamFault(ErrorCode.STREAM_CLOSED)
        data = frames.without_padding(flags, payload)
        if isinstance(stream, Head):
            stream = self._streams[stream_id] = Arriving(stream)
        assert not isinstance(stream, str)
        held_bytes = stream.held_bytes
        failure = stream.take(data, self._host.most_message_bytes)
        self._held_bytes += stream.held_bytes - held_bytes
        if failure is None and self._held_bytes > MOST_HELD_BYTES:
            failure = Failure(FailureCode.RESOURCE_EXHAUSTED, "too many messages of this connection are not whole")
        if failure is not None:
            if isinstance(failure, NotGrpc):
                self._turn_away(stream_id, failure)
            else:
                self._tell_failure(stream_id, failure, has_begun=stream.has_begun)
            self._drop(stream_id)
            self._cut_off(stream_id)
        elif flags & END_STREAM:
            self._on_end(stream_id)
        elif len(data) < len(payload):
            self._sending.write(frames.window_update(stream_id, len(payload) - len(data)))

    def _on_end(self, stream_id: int) -> None:
        """The client has sent all it had to send of a call."""
        stream = self._streams[stream_id]
        assert not isinstance(stream, str)
        if isinstance(stream, Head):
            stream = Arriving(stream)
        if not stream.is_as_long_as_said:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR)
        if isinstance(stream, TurnedAway):
            self._turn_away(stream_id, stream.told)
        elif isinstance(stream, Arriving):
            self._on_message(stream_id, stream)
        elif (failure := stream.ended()) is not None:
            self._tell_failure(stream_id, failure, has_begun=stream.has_begun)
            self._drop(stream_id)

    def _on_message(self, stream_id: int, stream: Arriving) -> None:
        self._held_bytes -= stream.held_bytes
        message = stream.message(self._host.most_message_bytes)
        if isinstance(message, Failure):
            del self._streams[stream_id]
            self._tell_failure(stream_id, message)
        else:
            self._streams[stream_id] = _ASKED
            stream.head.gathering.append((self, stream_id, message, monotonic(), stream.head))
            self._host.gathered()

    def _on_priority(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != frames.PRIORITY_BYTES:
            raise StreamFault(ErrorCode.FRAME_SIZE_ERROR)
        frames.check_priority(stream_id, payload)

    def _on_reset(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id > self._last_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a stream is reset that is not open")
        self._drop(stream_id)

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if flags & frames.ACK:
            if payload:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "an acknowledgement of settings has none")
            return
        settings = frames.read_settings(payload)
        self._sending.write(frame(frames.SETTINGS, frames.ACK, 0))
        self._sent(self._sending.apply(settings))

    def _on_push_promise(self, flags: int, stream_id: int, payload: bytes) -> None:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a client cannot push")

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not flags & frames.ACK:
            self._sending.write(frame(frames.PING, frames.ACK, 0, payload))
        elif payload == LAST_PING and not self._is_leaving:
            self._is_leaving = True
            self._sending.write(frames.go_away(self._last_id, ErrorCode.NO_ERROR))
            self._end_when_done()

    def _on_go_away(self, flags: int, stream_id: int, payload: bytes) -> None:
        """The client means to make no more calls here; it closes the connection when it has its answers."""
        if len(payload) < 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY is too short")

    def _on_window_update(self, flags: int, stream_id: int, payload: bytes) -> None:
        more_bytes = frames.read_window_update(payload)
        if stream_id > self._last_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a window of a stream that is not open")
        if not stream_id:
            if not more_bytes:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a window that does not grow")
            self._sent(self._sending.grow(more_bytes))
        elif stream_id in self._streams:
            if not more_bytes:
                raise StreamFault(ErrorCode.PROTOCOL_ERROR)
            self._sent(self._sending.grow_stream(stream_id, more_bytes))

    def _received(self, size: int) -> None:
        """Give the client its window back: what it sent is dealt with, or bounded elsewhere."""
        self._received_bytes += size
        if self._received_bytes >= GIVE_BACK_BYTES:
            self._sending.write(frames.window_update(0, self._received_bytes))
            self._received_bytes = 0

    # Answering.

    def _answer_slowly(self, stream_id: int, message: bytes) -> None:
        """With a message that does not fit into one frame, or into the client's windows."""
        self._sending.headers(stream_id, reply.HEAD)
        if not self._sending.send(stream_id, reply.prefixed(message), reply.OK):
            self._streams[stream_id] = _ANSWERING

    def _turn_away(self, stream_id: int, told: NotGrpc) -> None:
        """Answer what is not gRPC in the words of HTTP."""
        del self._streams[stream_id]
        self._sending.headers(stream_id, reply.http_head(told.status))
        if not self._sending.send(stream_id, f"{told}\n".encode(), b""):
            self._streams[stream_id] = _ANSWERING

    def _tell_failure(self, stream_id: int, failure: Failure, *, has_begun: bool = False) -> None:
        block = reply.status(failure.code, failure.message)
        self._sending.headers(stream_id, block if has_begun else reply.HEAD + block, END_STREAM)
        self._sending.forget(stream_id)

    def _sent(self, stream_ids: list[int]) -> None:
        """All that these streams had to send is on its way."""
        for stream_id in stream_ids:
            if self._streams[stream_id] is _ANSWERING:
                del self._streams[stream_id]
            else:
                cast("Relayed", self._streams[stream_id]).has_room()

    def _cut_off(self, stream_id: int, code: ErrorCode = ErrorCode.NO_ERROR) -> None:
        """We are done with a stream that the client may still send on."""
        self._sending.write(frames.reset(stream_id, code))
        self._cut[stream_id] = None
        if len(self._cut) > MOST_CUT:
            del self._cut[next(iter(self._cut))]

    def _drop(self, stream_id: int) -> None:
        """Forget a stream, and tell whoever works on its answer."""
        stream = self._streams.pop(stream_id, None)
        self._sending.forget(stream_id)
        if stream is _ASKED:
            self._abandoned += self._host.left(self, stream_id)
        elif stream is not None and not isinstance(stream, (Head, str)):
            self._held_bytes -= stream.held_bytes
            stream.cancel()

    # The end.

    def _end_when_done(self) -> None:
        """Looked at again and again: it happens once, and to look whenever something is answered would cost more."""
        if not self._streams:
            self._end()
        elif not self._is_over:
            self._timers["done"] = self._loop.call_later(LOOK_AGAIN_S, self._end_when_done)

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._sending.flush()
            self._transport.close()
            self._timers["linger"] = self._loop.call_later(LINGER_S, self.abort)

    def _fail(self, fault: ConnectionFault) -> None:
        _log.info("a connection of the gRPC port was ended: %s (%s)", fault, fault.code.name)
        self._sending.write(frames.go_away(self._last_id, fault.code, str(fault)))
        self._end()

    def _too_quiet(self) -> None:
        self._fail(ConnectionFault(ErrorCode.SETTINGS_TIMEOUT, f"a client said nothing for {PREFACE_S:g} s"))

    def _too_old(self) -> None:
        self.leave()
        if self._host.max_age_grace_s < inf:
            self._timers["grace"] = self._loop.call_later(self._host.max_age_grace_s, self.close)


_HANDLERS: dict[int, Callable[[Connection, int, int, bytes], None]] = {
    DATA: Connection._on_data,
    HEADERS: Connection._on_headers,
    frames.PRIORITY: Connection._on_priority,
    frames.RST_STREAM: Connection._on_reset,
    frames.SETTINGS: Connection._on_settings,
    frames.PUSH_PROMISE: Connection._on_push_promise,
    frames.PING: Connection._on_ping,
    frames.GOAWAY: Connection._on_go_away,
    frames.WINDOW_UPDATE: Connection._on_window_update,
    CONTINUATION: Connection._on_continuation,
}
