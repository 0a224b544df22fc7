"""HTTP/2 client connection with a fixed number of calls in flight and minimal parsing of responses.

Of each response it reads the frame headers, the first two bytes of the message (the overall code) and the trailers,
which are recognised by their bytes after the first few. All other frames are handled off the hot path.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat

from bench import wire
from bench.blocks import HeaderBlockReader, UnreadableBlock
from bench.traced_headers import HEADER_TABLE_BYTES, TracedHeaderBlocks

AUTHORITY = "ratelimit"
GRPC_PREFIX_BYTES = 5
FRAME_HEADER_BYTES = 9
RECEIVE_BYTES = 262_144
MAX_REQUEST_BYTES = 16_384  # one frame, within the initial stream window of every server
WINDOW_BYTES = 2**30  # window that is returned to the server whenever it has sent as much

_HEADER = struct.Struct(">IBI")
_STREAM_ID = struct.Struct(">I")


class LoadError(Exception):
    """The load failed, so that the figures of this run would be meaningless."""


Address = tuple[str, int] | str
"""Host and port, or the path of a Unix socket."""


def connected(address: Address) -> socket.socket:
    if isinstance(address, str):
        plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            plain.connect(address)
        except OSError:
            plain.close()
            raise
        return plain
    plain = socket.create_connection(address, timeout=10)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return plain


@dataclass(frozen=True, slots=True)
class Target:
    """Address of a server and the method to call."""

    address: Address
    tls: ssl.SSLContext | None = None
    method: wire.Method = wire.SHOULD_RATE_LIMIT
    traced: bool = False  # every call has a new traceparent

    def connect(self) -> socket.socket:
        plain = connected(self.address)
        if self.tls is None:
            return plain
        secured = self.tls.wrap_socket(plain, server_hostname="localhost")
        if secured.selected_alpn_protocol() != "h2":
            raise LoadError(f"{self.address}: the server did not choose h2 by ALPN")
        return secured


def _heads(target: Target, timeout: str | None) -> Iterator[bytes]:
    """Return the HEADERS frame of each call on a new connection, in order; HTTP requests have their own."""
    if target.method is wire.HTTP:
        return repeat(b"")
    scheme, path = "https" if target.tls else "http", target.method.path
    if target.traced:
        return map(_head, TracedHeaderBlocks(wire.call_headers(AUTHORITY, timeout, path), scheme))
    first, later = wire.header_blocks(scheme, AUTHORITY, timeout, path)
    return chain([_head(first)], repeat(_head(later)))


def _head(block: bytes) -> bytes:
    return wire.frame(wire.HEADERS, wire.END_HEADERS, 0, block)


class Connection:
    def __init__(self, target: Target, timeout: str | None = "5S") -> None:
        self.answered = 0
        self.denied = 0  # responses that deny the request
        self.sent = 0
        self.reads = 0
        self.samples: list[bytes] = []  # messages of some responses, to be decoded with protobuf
        self.wants_samples = 0
        self._watches_writability = False
        self._blocks = HeaderBlockReader()
        self._rest = b""
        self._unsent = b""
        self._stream_id = 1
        self._may_send_bytes = wire.DEFAULT_WINDOW_BYTES
        self._received_bytes = 0
        self._max_streams = 100
        self._settled = False
        self._passes = target.method.passes
        self._heads = _heads(target, timeout)
        self.socket = target.connect()
        self._send(wire.opening())

    def prime(self, calls: Iterator[bytes], in_flight: int) -> None:
        """Make two calls, one after the other, so that all later calls are like the second."""
        while not self._settled:
            self.receive()
        if self._max_streams < in_flight:
            raise LoadError(f"the server takes {self._max_streams} calls on a connection, fewer than {in_flight}")
        for _ in range(2):
            self.send_calls(1, calls)
            while self.answered < self.sent:
                self.receive()
        self.socket.setblocking(False)

    def send_calls(self, count: int, calls: Iterator[bytes]) -> int:
        """Send up to `count` calls, as many as the server's window allows; return their number."""
        out = bytearray()
        heads, put, id_offset = self._heads, _STREAM_ID.pack_into, wire.STREAM_ID_OFFSET
        stream_id, window_bytes, sent = self._stream_id, self._may_send_bytes, 0
        while sent < count:
            if window_bytes < MAX_REQUEST_BYTES:
                break
            data, head = next(calls), next(heads)
            at, head_bytes = len(out), len(head)
            out += head
            out += data
            put(out, at + id_offset, stream_id)
            if head_bytes:
                put(out, at + head_bytes + id_offset, stream_id)
                window_bytes -= len(data) - FRAME_HEADER_BYTES  # flow control applies to DATA only
            stream_id += 2
            sent += 1
        self._stream_id, self._may_send_bytes = stream_id, window_bytes
        self.sent += sent
        self._send(bytes(out))
        return sent

    def receive(self) -> int:
        """Receive data; return the number of finished calls."""
        try:
            chunk = self.socket.recv(RECEIVE_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError):
            return 0
        if not chunk:
            raise LoadError(f"the server closed a connection with {self.in_flight} calls in flight")
        self.reads += 1
        buffer = self._rest + chunk if self._rest else chunk
        finished = self._take(buffer)
        self.answered += finished
        self._received_bytes += len(chunk)
        if self._received_bytes > WINDOW_BYTES:
            self._send(wire.window_update(self._received_bytes))
            self._received_bytes = 0
        return finished

    @property
    def in_flight(self) -> int:
        return self.sent - self.answered

    @property
    def blocked(self) -> bool:
        """True if the socket buffer is full; the next `send_calls` sends the rest."""
        return bool(self._unsent)

    def watch_writability(self, poll: select.epoll) -> None:
        """Register for writability while data is waiting to be sent."""
        if self.blocked != self._watches_writability:
            self._watches_writability = self.blocked
            poll.modify(self.socket.fileno(), select.EPOLLIN | (select.EPOLLOUT if self.blocked else 0))

    def close(self) -> None:
        self.socket.close()

    def _take(self, buffer: bytes) -> int:
        unpack, known, known_ok = _HEADER.unpack_from, self._blocks.known, self._blocks.known_ok
        passes = self._passes
        finished = at = 0
        end = len(buffer)
        while end - at >= FRAME_HEADER_BYTES:
            word, flags, stream_id = unpack(buffer, at)
            start = at + FRAME_HEADER_BYTES
            stop = start + (word >> 8)
            if stop > end:
                break
            kind = word & 0xFF
            if kind == wire.HEADERS:
                block = buffer[start:stop]
                if flags & wire.END_STREAM:
                    finished += 1
                    if block not in known_ok:
                        self._trailers(flags, block)
                elif block not in known:
                    self._read(flags, block)
            elif kind == wire.DATA:
                if self.wants_samples:
                    self._sample(buffer[start:stop])
                if not buffer.startswith(passes, start + GRPC_PREFIX_BYTES):
                    self.denied += 1
            else:
                self._control(kind, flags, stream_id, buffer[start:stop])
            at = stop
        self._rest = buffer[at:]
        return finished

    def _trailers(self, flags: int, block: bytes) -> None:
        if not self._read(flags, block):
            raise LoadError(f"a call failed: {self._blocks.last_headers()}")

    def _read(self, flags: int, block: bytes) -> bool:
        if not flags & wire.END_HEADERS or flags & (wire.PADDED | wire.PRIORITY):
            raise LoadError("the server sends header blocks in a form (continued, padded) that is not read here")
        try:
            return self._blocks.read(block)
        except UnreadableBlock as error:
            raise LoadError(str(error)) from error

    def _sample(self, payload: bytes) -> None:
        self.samples.append(payload[GRPC_PREFIX_BYTES:])
        self.wants_samples -= 1

    def _control(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == wire.WINDOW_UPDATE:
            if stream_id == 0:
                self._may_send_bytes += int.from_bytes(payload, "big") & 0x7FFFFFFF
        elif kind == wire.SETTINGS and not flags & wire.ACK:
            self._settings(payload)
        elif kind == wire.PING and not flags & wire.ACK:
            self._send(wire.frame(wire.PING, wire.ACK, 0, payload))
        elif kind == wire.RST_STREAM:
            raise LoadError(f"the server reset a call: HTTP/2 error {int.from_bytes(payload, 'big')}")
        elif kind == wire.GOAWAY:
            raise LoadError(f"the server sent GOAWAY: HTTP/2 error {int.from_bytes(payload[4:8], 'big')}")
        elif kind == wire.CONTINUATION:
            raise LoadError("the server continues a header block that was whole")

    def _settings(self, payload: bytes) -> None:
        values = dict(struct.iter_unpack(">HI", payload))
        self._max_streams = values.get(wire.SETTINGS_MAX_CONCURRENT_STREAMS, 2**31)
        if values.get(wire.SETTINGS_HEADER_TABLE_SIZE, HEADER_TABLE_BYTES) < HEADER_TABLE_BYTES:
            raise LoadError("the server's header table is smaller than the default, which the header blocks need")
        if values.get(wire.SETTINGS_INITIAL_WINDOW_SIZE, wire.DEFAULT_WINDOW_BYTES) < MAX_REQUEST_BYTES:
            raise LoadError("the server's window for a call is too small for one request")
        self._send(wire.frame(wire.SETTINGS, wire.ACK, 0))
        self._settled = True

    def _send(self, data: bytes) -> None:
        data = self._unsent + data
        try:
            sent = self.socket.send(data) if data else 0
        except (BlockingIOError, ssl.SSLWantWriteError):
            sent = 0
        self._unsent = data[sent:]
