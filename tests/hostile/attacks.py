"""Attacks: one generator of hostile input each, with the expected outcome.

A generator yields what one connection sends, piece by piece; a number is a pause in seconds. When it ends, the client
keeps the connection open for `holds_s` without sending. Nothing here opens a socket: tests/hostile/attackers.py does.
"""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from random import Random
from struct import pack

from bench import wire
from bench.wire import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    SETTINGS_INITIAL_WINDOW_SIZE,
    WINDOW_UPDATE,
    frame,
)
from ratelimit_rls.protos.messages import CHECK, SHOULD_RATE_LIMIT
from ratelimit_rls.telemetry.abuse import Abuse
from ratelimit_rls.transport.grpc.health_check import HEALTH_CHECK
from tests.hostile import hpack

Sent = Iterator[bytes | float]

DOMAIN = "roomy"
DENIED_KEY = "denied"
RULES = f"""\
domain: {DOMAIN}
ext_authz: {{descriptors: [{{entries: [{{key: all, header: x}}]}}]}}
descriptors:
  - key: all
    rate_limit: {{unit: year, requests_per_unit: 4000000000}}
  - key: {DENIED_KEY}
    rate_limit: {{unit: year, requests_per_unit: 1}}
"""
"""Rules under which a well-behaved call is never denied."""

HIT = wire.rate_limit_request(DOMAIN, [[("all", "innocent")]])
EMPTY_REQUEST = wire.rate_limit_request(DOMAIN, [])

PRIORITY = 2
UNKNOWN_KIND = 0x42
CANCEL = pack(">I", 8)
FRAME_BYTES = 16_384
MAX_CONNECTIONS_PER_PEER = 300
"""Connection limit of servers under attack: below the default, so that file descriptors suffice to exceed it."""

MESSAGE_TIMEOUT_S = 2

BATCH = 100
"""Number of frames that are sent at once."""

BLOCK = hpack.call(SHOULD_RATE_LIMIT)
COMPRESSED_BLOCK = hpack.call(SHOULD_RATE_LIMIT, hpack.literal(b"grpc-encoding", b"gzip"))
CHECK_BLOCK = hpack.call(CHECK)

HEALTH_WATCH = "/grpc.health.v1.Health/Watch"
WATCH_BLOCK = hpack.call(HEALTH_WATCH)
HEALTH_CHECK_BLOCK = hpack.call(HEALTH_CHECK)
REFLECTION_BLOCK = hpack.call("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")


class Port(Enum):
    GRPC = "grpc"
    HTTP = "http"


@dataclass(frozen=True, slots=True)
class Attack:
    name: str
    sends: Callable[[Random], Sent]
    reasons: frozenset[Abuse] = frozenset()
    """Reasons of the abuse metric, at least one of which must be counted; empty: the attack is not recorded."""

    ends: bool = False
    """True if the server must close the connection."""

    connections: int = 1
    port: Port = Port.GRPC
    reads: bool = True
    """True if the client reads what the server sends."""

    holds_s: float = 0.0
    lasts_s: float = 6.0
    """Maximum duration of sending. A flood that is not closed by then was not detected."""

    waits: bool = False
    """True if the attack tests timeouts rather than the handling of input."""


def opening(settings: dict[int, int] | None = None) -> bytes:
    return wire.PREFACE + wire.settings(settings or {}) + frame(SETTINGS, wire.ACK, 0)


def ids(first: int = 1) -> Iterator[int]:
    return itertools.count(first, 2)


def message(body: bytes, *, compressed: bool = False) -> bytes:
    return pack(">BI", compressed, len(body)) + body


def head(stream_id: int, block: bytes = BLOCK, flags: int = END_HEADERS) -> bytes:
    return frame(HEADERS, flags, stream_id, block)


def data(stream_id: int, payload: bytes, *, end: bool = True) -> bytes:
    """Return as many DATA frames as the payload needs."""
    parts = [payload[at : at + FRAME_BYTES] for at in range(0, len(payload), FRAME_BYTES)] or [b""]
    flags = [0] * (len(parts) - 1) + [END_STREAM if end else 0]
    return b"".join(frame(DATA, flag, stream_id, part) for flag, part in zip(flags, parts, strict=True))


CALL = message(HIT)


def call(stream_id: int) -> bytes:
    return head(stream_id) + frame(DATA, END_STREAM, stream_id, CALL)


def window_update(stream_id: int, more_bytes: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, pack(">I", more_bytes))


def batched(frames: Iterator[bytes], size: int = BATCH) -> Iterator[bytes]:
    while True:
        yield b"".join(itertools.islice(frames, size))


def flood(opened: bytes, frames: Iterator[bytes]) -> Sent:
    yield opened
    yield from batched(frames)


# Resets by the client.


def rapid_reset(_: Random) -> Sent:
    yield from flood(opening(), (call(one) + frame(RST_STREAM, 0, one, CANCEL) for one in ids()))


def rapid_reset_of_heads(_: Random) -> Sent:
    yield from flood(opening(), (head(one) + frame(RST_STREAM, 0, one, CANCEL) for one in ids()))


def reset_after_answer(_: Random) -> Sent:
    """Responses wait for a window that never opens; then their calls are reset."""
    yield opening({SETTINGS_INITIAL_WINDOW_SIZE: 0})
    stream_ids = ids()
    while True:
        some = list(itertools.islice(stream_ids, BATCH))
        yield b"".join(map(call, some))
        yield b"".join(frame(RST_STREAM, 0, one, CANCEL) for one in some)


# Resets that the server has to send.


def refused_streams(_: Random) -> Sent:
    """More streams than the server allows, each of them rejected."""
    yield from flood(opening(), map(head, ids()))


def malformed_heads(_: Random) -> Sent:
    block = BLOCK + hpack.literal(b"Upper-Case", b"x")
    yield from flood(opening(), (head(one, block, END_HEADERS | END_STREAM) for one in ids()))


def window_of_zero(_: Random) -> Sent:
    yield from flood(opening(), (head(one) + window_update(one, 0) for one in ids()))


def window_overflow(_: Random) -> Sent:
    yield from flood(opening(), (head(one) + window_update(one, 2**31 - 1) for one in ids()))


def data_after_end(_: Random) -> Sent:
    yield from flood(opening(), (call(one) + frame(DATA, 0, one, b"x") for one in ids()))


def priority_of_wrong_size(_: Random) -> Sent:
    yield from flood(opening(), (head(one) + frame(PRIORITY, 0, one, bytes(6)) for one in ids()))


# Frames that cost the server work, and the client nothing.


def pings(_: Random) -> Sent:
    yield from flood(opening(), itertools.repeat(frame(PING, 0, 0, b"12345678")))


def settings_flood(_: Random) -> Sent:
    yield from flood(opening(), itertools.repeat(wire.settings({SETTINGS_INITIAL_WINDOW_SIZE: 65_535})))


def empty_settings(_: Random) -> Sent:
    yield from flood(opening(), itertools.repeat(frame(SETTINGS, 0, 0)))


def priorities(_: Random) -> Sent:
    yield from flood(opening(), (frame(PRIORITY, 0, one, bytes(5)) for one in ids()))


def window_updates_of_connection(_: Random) -> Sent:
    yield from flood(opening(), itertools.repeat(window_update(0, 1)))


def window_updates_of_stream(_: Random) -> Sent:
    yield from flood(opening() + head(1), itertools.repeat(window_update(1, 1)))


def empty_data(_: Random) -> Sent:
    yield from flood(opening() + head(1), itertools.repeat(frame(DATA, 0, 1)))


def padded_data(_: Random) -> Sent:
    """DATA with only padding, which counts for the window but not for the message."""
    padding = frame(DATA, wire.PADDED, 1, bytes([255]) + bytes(255))
    yield from flood(opening() + head(1), itertools.repeat(padding))


def unknown_frames(_: Random) -> Sent:
    yield from flood(opening(), itertools.repeat(frame(UNKNOWN_KIND, 0, 0)))


def empty_continuations(_: Random) -> Sent:
    begun = frame(HEADERS, 0, 1, BLOCK)
    yield from flood(opening() + begun, itertools.repeat(frame(CONTINUATION, 0, 1)))


def endless_continuations(_: Random) -> Sent:
    begun = frame(HEADERS, 0, 1, BLOCK)
    yield from flood(opening() + begun, itertools.repeat(frame(CONTINUATION, 0, 1, hpack.literal(b"a", b"b") * 1000)))


# Header blocks.


def same_block(block: bytes) -> Sent:
    """Repeated calls with the same header block."""
    yield opening()
    yield from batched((head(one, block, END_HEADERS | END_STREAM) for one in ids()), 4)


def commas_of_bin(_: Random) -> Sent:
    """A value of commas is added to the table; each call references it eight times."""
    bomb = hpack.added(b"x-bin", b"," * 4000)
    body = message(HIT)
    yield opening() + head(1, hpack.call(SHOULD_RATE_LIMIT, bomb)) + data(1, body)
    calls = (
        head(one, hpack.call(SHOULD_RATE_LIMIT, hpack.NEWEST * 8, hpack.literal(b"n", str(one).encode())))
        + data(one, body)
        for one in ids(3)
    )
    yield from batched(calls, 10)


def table_sizes(_: Random) -> Sent:
    yield from same_block((hpack.resized(0) + hpack.resized(4096)) * 2000 + BLOCK)


def tiny_fields(_: Random) -> Sent:
    yield from same_block(BLOCK + hpack.literal(b"a", b"") * 3000)


def evictions(_: Random) -> Sent:
    """Every field evicts another one from the table."""
    yield from same_block(BLOCK + b"".join(hpack.added(b"a", b"%d" % n) for n in range(2000)))


def references(_: Random) -> Sent:
    """One large field in the table, and blocks that reference it thousands of times."""
    yield opening() + head(1, hpack.call(SHOULD_RATE_LIMIT, hpack.added(b"x", b"y" * 4000)))
    block = BLOCK + hpack.NEWEST * 15_000
    yield from batched((head(one, block, END_HEADERS | END_STREAM) for one in ids(3)), 4)


def huffman_strings(_: Random) -> Sent:
    """Strings that are slowest to decode: only the shortest code, `0` (00000)."""
    text = hpack.integer(15_000, 7, 0x80) + bytes(15_000)
    yield from same_block(BLOCK + b"\x00" + hpack.string(b"x") + text)


def many_fields(_: Random) -> Sent:
    yield from same_block(BLOCK + b"".join(hpack.literal(b"f%d" % n, b"v") for n in range(300)))


# Unfinished input.


def nothing(_: Random) -> Sent:
    """No preface."""
    yield from ()


def half_a_preface(_: Random) -> Sent:
    yield wire.PREFACE[:10]


def idle(_: Random) -> Sent:
    yield opening()


def one_unfinished_call(_: Random) -> Sent:
    yield opening() + head(1)


def unfinished_head(_: Random) -> Sent:
    yield opening() + frame(HEADERS, 0, 1, BLOCK)


def unfinished_frame(_: Random) -> Sent:
    yield opening() + frame(DATA, 0, 1, bytes(FRAME_BYTES))[:1000]


def unfinished_messages(_: Random) -> Sent:
    """16 MiB in messages of maximum size that lack their last bytes."""
    size = 2**19 - 64
    yield opening()
    for one in itertools.islice(ids(), 32):
        yield head(one) + data(one, pack(">BI", 0, size) + bytes(size - 16), end=False)


def many_unfinished_messages(_: Random) -> Sent:
    yield opening()
    yield b"".join(head(one) + data(one, pack(">BI", 0, 2**19) + bytes(4096), end=False) for one in range(1, 2001, 2))


def slow_head(_: Random) -> Sent:
    yield b"POST /json HTTP/1.1\r\nHost: localhost\r\n"
    for number in itertools.count():
        yield b"X-%d: x\r\n" % number
        yield 0.25


def slow_body(_: Random) -> Sent:
    yield b"POST /json HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60000\r\n\r\n"
    while True:
        yield b" "
        yield 0.25


# Messages.


@cache
def empty_descriptors(count: int = 2_000_000) -> bytes:
    return HIT + b"\x12\x00" * count


@cache
def empty_entries(count: int = 2_000_000) -> bytes:
    entries = b"\x0a\x00" * count
    return HIT + b"\x12" + varint(len(entries)) + entries


@cache
def empty_headers(count: int = 1_500_000) -> bytes:
    """A CheckRequest with many headers without name and value."""
    return nested(b"\x1a\x00" * count, 2, 4, 1)


@cache
def empty_header_map(count: int = 1_500_000) -> bytes:
    """A CheckRequest with many empty raw headers, each of which is an object."""
    return nested(b"\x0a\x00" * count, 13, 2, 4, 1)


@cache
def empty_extensions(count: int = 1_500_000) -> bytes:
    return nested(b"\x52\x00" * count, 1)


@cache
def empty_metadata(count: int = 1_500_000) -> bytes:
    """Namespaces of metadata_context."""
    return nested(b"\x0a\x00" * count, 11, 1)


def nested(body: bytes, *numbers: int) -> bytes:
    """A message in fields of these numbers, the innermost first."""
    for number in numbers:
        body = bytes([number << 3 | 2]) + varint(len(body)) + body
    return body


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


@cache
def zipped(body: bytes) -> bytes:
    return message(gzip.compress(body), compressed=True)


def calls_of(body: bytes, block: bytes, calls: int, *, at_once: bool = False) -> Sent:
    yield opening()
    for one in itertools.islice(ids(), calls):
        yield head(one, block) + data(one, body)
        if not at_once:
            yield 0.05


def zipped_descriptors(_: Random) -> Sent:
    yield from calls_of(zipped(empty_descriptors()), COMPRESSED_BLOCK, 8, at_once=True)


def zipped_entries(_: Random) -> Sent:
    yield from calls_of(zipped(empty_entries()), COMPRESSED_BLOCK, 8, at_once=True)


def zipped_headers(_: Random) -> Sent:
    block = hpack.call(CHECK, hpack.literal(b"grpc-encoding", b"gzip"))
    yield from calls_of(zipped(empty_headers()), block, 8, at_once=True)


def zipped_zeros(_: Random) -> Sent:
    yield from calls_of(zipped(bytes(64 * 2**20)), COMPRESSED_BLOCK, 50, at_once=True)


def zipped_watches(_: Random) -> Sent:
    """Messages of a proxied call, each of which unpacks to 4 MiB: as many as a frame has room for."""
    block = hpack.call(HEALTH_WATCH, hpack.literal(b"grpc-encoding", b"gzip"))
    body = zipped(bytes(4 * 2**20 - 10))
    bodies = body * (FRAME_BYTES // len(body))
    yield opening()
    stream_ids = ids()
    while True:
        yield b"".join(head(one, block) + frame(DATA, 0, one, bodies) for one in itertools.islice(stream_ids, 20))
        yield 0.1


def reflected_messages(_: Random) -> Sent:
    """Messages of reflection that are as long as can be, on calls that are never ended, and no answer is taken."""
    yield opening({SETTINGS_INITIAL_WINDOW_SIZE: 0})
    body = message(b"\x22" + varint(60_000) + b"x" * 60_000)
    for one in itertools.islice(ids(), 30):
        yield head(one, REFLECTION_BLOCK) + data(one, body, end=False)
    yield 0.5
    for one in itertools.islice(ids(), 30):
        yield data(one, body * 20, end=False)


def plain_descriptors(_: Random) -> Sent:
    yield from calls_of(message(empty_descriptors()), BLOCK, 4)


def plain_entries(_: Random) -> Sent:
    yield from calls_of(message(empty_entries()), BLOCK, 4)


def plain_headers(_: Random) -> Sent:
    yield from calls_of(message(empty_headers()), CHECK_BLOCK, 4)


def plain_header_map(_: Random) -> Sent:
    yield from calls_of(message(empty_header_map()), CHECK_BLOCK, 4)


def plain_extensions(_: Random) -> Sent:
    yield from calls_of(message(empty_extensions()), CHECK_BLOCK, 4)


def plain_metadata(_: Random) -> Sent:
    yield from calls_of(message(empty_metadata()), CHECK_BLOCK, 4)


# Health and reflection.


def watches(_: Random) -> Sent:
    """Open more long-lived calls than the server allows."""
    yield opening()
    stream_ids = ids()
    for _number in range(10):
        yield b"".join(head(one, WATCH_BLOCK) + data(one, message(b"")) for one in itertools.islice(stream_ids, 100))
        yield 0.1


def unfinished_checks(_: Random) -> Sent:
    """Health checks and watches without their messages."""
    yield opening()
    yield b"".join(head(one, HEALTH_CHECK_BLOCK) for one in range(1, 1001, 2))
    yield b"".join(head(one, WATCH_BLOCK) for one in range(1001, 1061, 2))


def health_checks(_: Random) -> Sent:
    """Send health checks as fast as they are read: valid, unknown services, malformed. Each is answered."""
    bodies = [message(body) for body in (b"", b"\x0a\x09ratelimit", b"\x0a\x01x", b"\xff\xff")]
    yield opening() + window_update(0, 2**31 - 1 - wire.DEFAULT_WINDOW_BYTES)
    stream_ids = ids()
    while True:
        yield b"".join(
            head(one, HEALTH_CHECK_BLOCK) + data(one, bodies[one // 2 % 4]) for one in itertools.islice(stream_ids, 50)
        )
        yield 0.01


# HTTP/1.


def posted(body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST /json HTTP/1.1", b"Host: localhost", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


@cache
def empty_json() -> bytes:
    """4 MiB of descriptors without entries."""
    return b'{"domain":"roomy","descriptors":[' + b"{}," * (4 * 2**20 // 3 - 20) + b"{}]}"


@cache
def small_json() -> bytes:
    """A body of about the maximum size that consists of minimal values."""
    return b'{"domain":"roomy","descriptors":[' + b"{}," * 20_000 + b"{}]}"


def large_json(_: Random) -> Sent:
    yield posted(empty_json())


def json_of_small_parts(_: Random) -> Sent:
    for _number in range(4):
        yield posted(small_json())


def deep_json(_: Random) -> Sent:
    """Nesting deeper than the limits on body size, number of values and recursion."""
    for depth in (100_000, 60_000, 900):
        yield posted(b'{"domain":' + b"[" * depth)


def two_lengths(_: Random) -> Sent:
    body = b"0\r\n\r\nGET /healthcheck HTTP/1.1\r\nHost: localhost\r\n\r\n"
    yield posted(body, b"Transfer-Encoding: chunked")


def foreign_origin(_: Random) -> Sent:
    body = b'{"domain":"roomy","descriptors":[{"entries":[{"key":"all","value":"x"}]}]}'
    for _number in range(20):
        yield posted(body, b"Origin: https://attacker.example", b"Content-Type: text/plain")


# Responses that are not read.


def never_reads(_: Random) -> Sent:
    """PINGs and calls whose responses stay in the server's buffers."""
    yield opening({SETTINGS_INITIAL_WINDOW_SIZE: 2**31 - 1}) + window_update(0, 2**30)
    yield from batched(map(call, ids()))


def shut_window(_: Random) -> Sent:
    """Calls whose responses wait forever for a window."""
    yield opening({SETTINGS_INITIAL_WINDOW_SIZE: 0})
    yield b"".join(map(call, range(1, 2001, 2)))


def tiny_windows(_: Random) -> Sent:
    """Windows that allow one byte of each response at a time."""
    yield opening({SETTINGS_INITIAL_WINDOW_SIZE: 1})
    stream_ids = ids()
    while True:
        some = list(itertools.islice(stream_ids, 50))
        yield b"".join(map(call, some))
        for _number in range(20):
            yield b"".join(window_update(one, 1) for one in some)
            yield 0.002


# Ordinary calls that are denied.


def denied_calls(chance: Random) -> Sent:
    """Calls as fast as they are answered, so that as many denials as possible are recorded."""
    yield opening() + window_update(0, 2**31 - 1 - wire.DEFAULT_WINDOW_BYTES)
    stream_ids = ids()
    while True:
        yield b"".join(
            head(one) + data(one, message(wire.rate_limit_request(DOMAIN, [[(DENIED_KEY, f"{chance.randrange(50)}")]])))
            for one in itertools.islice(stream_ids, 20)
        )
        yield 0.01


IDLE = frozenset({Abuse.IDLE_TIMEOUT, Abuse.KEEPALIVE_TIMEOUT})
BY_RESETS = frozenset({Abuse.RAPID_RESET})
BY_PROVOKED = frozenset({Abuse.RESETS_PROVOKED})
BY_HEADERS = frozenset({Abuse.HPACK_FLOOD, Abuse.HEADERS_TOO_LARGE, Abuse.RESETS_PROVOKED})
BY_CONTINUATIONS = frozenset({Abuse.CONTINUATION_FLOOD, Abuse.HEADERS_TOO_LARGE})
BY_MESSAGE = frozenset({Abuse.MESSAGE_TOO_COMPLEX, Abuse.MESSAGE_TOO_LARGE, Abuse.DECOMPRESSION_BOMB})
BY_COMPRESSION = frozenset({Abuse.COMPRESSED_MESSAGE})
BY_CONNECTIONS = frozenset({Abuse.TOO_MANY_CONNECTIONS, Abuse.TOO_MANY_CONNECTIONS_OF_PEER})
BY_WRITING = frozenset({Abuse.WRITE_TIMEOUT, Abuse.RESETS_PROVOKED})
"""A client that does not read exceeds the limit on concurrent streams if it is faster than the server."""

BY_TIME = frozenset({Abuse.HTTP_TIMEOUT})
UNFINISHED = IDLE | {Abuse.UNFINISHED_BYTES}
BY_STREAMS = UNFINISHED | {Abuse.TOO_MANY_STREAMS}


def after_reset(following: bytes) -> Callable[[Random], Sent]:
    """Frames without end on a stream that the server has reset."""

    def sends(_: Random) -> Sent:
        yield opening() + call(1)
        yield 0.2
        yield frame(DATA, 0, 1, b"x")  # the stream is closed: RST_STREAM
        yield 0.1
        while True:
            yield following * (20_000 // (len(following) // len(frame(DATA, 0, 1))))

    return sends


CONTINUED = frame(HEADERS, 0, 1, b"") + frame(CONTINUATION, 0, 1, b"") * 62 + frame(CONTINUATION, END_HEADERS, 1, b"")


def heads_reset_late(_: Random) -> Sent:
    """Streams that are opened, never used, and reset later than a rapid reset."""
    yield opening()
    stream_ids = ids()
    while True:
        opened = list(itertools.islice(stream_ids, 1000))
        yield b"".join(map(head, opened))
        yield 0.013
        yield b"".join(frame(RST_STREAM, 0, stream_id, CANCEL) for stream_id in opened)


def calls_at_once(_: Random) -> Sent:
    """Calls in one piece, as many as one connection may have open."""
    yield opening() + call(1)
    yield 0.5
    yield b"".join(map(call, range(3, 2003, 2)))


def heads_at_once(_: Random) -> Sent:
    yield opening() + call(1)
    yield 0.5
    yield b"".join(map(head, range(3, 2003, 2)))


def in_rounds(body: Callable[[int], bytes]) -> Callable[[Random], Sent]:
    """400 different messages at a time, within all budgets of frames."""

    def sends(_: Random) -> Sent:
        yield opening()
        stream_ids = ids()
        numbers = itertools.count(1)
        while True:
            opened = itertools.islice(stream_ids, 400)
            yield b"".join(head(one) + data(one, message(body(next(numbers) % 2**20))) for one in opened)
            yield 0.6

    return sends


def many_entries(hits: int) -> bytes:
    return EMPTY_REQUEST + b"\x18" + varint(hits) + b"\x12" + varint(2040) + b"\x0a\x00" * 1020


def overlong_tags(hits: int) -> bytes:
    """The tag of a descriptor in three bytes, where one would do."""
    return EMPTY_REQUEST + b"\x18" + varint(hits) + b"\x92\x80\x00\x00" * 255


def unpacked_backlog(_: Random) -> Sent:
    """Half a KiB that unpacks to half a MiB, 50 calls at a time."""
    size = 2**19 - 200
    body = zipped(HIT + b"\x7a" + varint(size) + bytes(size))
    yield opening()
    stream_ids = ids()
    while True:
        yield b"".join(head(one, COMPRESSED_BLOCK) + data(one, body) for one in itertools.islice(stream_ids, 50))


ATTACKS = [
    Attack("rapid reset", rapid_reset, BY_RESETS, ends=True),
    Attack("rapid reset of heads", rapid_reset_of_heads, BY_RESETS, ends=True),
    Attack("reset after the answer began", reset_after_answer, BY_RESETS, ends=True),
    Attack("refused streams", refused_streams, BY_PROVOKED, ends=True),
    Attack("malformed heads", malformed_heads, BY_PROVOKED, ends=True),
    Attack("WINDOW_UPDATE of 0", window_of_zero, BY_PROVOKED, ends=True),
    Attack("WINDOW_UPDATE beyond 2^31", window_overflow, BY_PROVOKED, ends=True),
    Attack("DATA after the end", data_after_end, BY_PROVOKED, ends=True),
    Attack("PRIORITY of a wrong size", priority_of_wrong_size, BY_PROVOKED | {Abuse.PRIORITY_FLOOD}, ends=True),
    Attack("PING flood", pings, frozenset({Abuse.PING_FLOOD}), ends=True),
    Attack("PING flood, answers unread", pings, frozenset({Abuse.PING_FLOOD}), ends=True, reads=False),
    Attack("SETTINGS flood", settings_flood, frozenset({Abuse.SETTINGS_FLOOD}), ends=True),
    Attack("empty SETTINGS flood", empty_settings, frozenset({Abuse.SETTINGS_FLOOD}), ends=True),
    Attack("PRIORITY flood", priorities, frozenset({Abuse.PRIORITY_FLOOD}), ends=True),
    Attack(
        "WINDOW_UPDATE flood, connection",
        window_updates_of_connection,
        frozenset({Abuse.WINDOW_UPDATE_FLOOD}),
        ends=True,
    ),
    Attack("WINDOW_UPDATE flood, stream", window_updates_of_stream, frozenset({Abuse.WINDOW_UPDATE_FLOOD}), ends=True),
    Attack("empty DATA flood", empty_data, frozenset({Abuse.EMPTY_DATA_FLOOD}), ends=True),
    Attack("DATA of padding", padded_data, frozenset({Abuse.EMPTY_DATA_FLOOD}), ends=True),
    Attack("DATA after a reset", after_reset(frame(DATA, 0, 1)), frozenset({Abuse.EMPTY_DATA_FLOOD}), ends=True),
    Attack("CONTINUATION after a reset", after_reset(CONTINUED), BY_HEADERS, ends=True),
    Attack("unused streams, reset late", heads_reset_late, BY_RESETS, ends=True),
    Attack("1,000 calls on each connection", calls_at_once, connections=MAX_CONNECTIONS_PER_PEER - 50, holds_s=3),
    Attack(
        "1,000 heads on each connection",
        heads_at_once,
        BY_STREAMS,
        connections=MAX_CONNECTIONS_PER_PEER - 50,
        holds_s=5,
    ),
    Attack("unknown frames", unknown_frames, frozenset({Abuse.UNKNOWN_FRAME_FLOOD}), ends=True),
    Attack("empty CONTINUATION flood", empty_continuations, BY_CONTINUATIONS, ends=True),
    Attack("endless CONTINUATION", endless_continuations, BY_CONTINUATIONS, ends=True),
    Attack("-bin commas by index", commas_of_bin, BY_HEADERS, ends=True),
    Attack("table size updates", table_sizes, BY_HEADERS, ends=True),
    Attack("tiny fields", tiny_fields, BY_HEADERS, ends=True),
    Attack("evictions", evictions, BY_HEADERS, ends=True),
    Attack("references to a large field", references, BY_HEADERS, ends=True),
    Attack("Huffman strings", huffman_strings, BY_HEADERS, ends=True),
    Attack("300 header fields", many_fields, BY_HEADERS, ends=True),
    Attack("no preface", nothing, IDLE, ends=True, connections=20, holds_s=60, waits=True),
    Attack("half a preface", half_a_preface, IDLE, ends=True, connections=20, holds_s=60, waits=True),
    Attack("idle connections", idle, BY_CONNECTIONS, connections=MAX_CONNECTIONS_PER_PEER + 100, holds_s=3),
    Attack(
        "an unfinished call on each connection",
        one_unfinished_call,
        BY_CONNECTIONS,
        connections=MAX_CONNECTIONS_PER_PEER + 100,
        holds_s=3,
    ),
    Attack("unfinished HEADERS", unfinished_head, UNFINISHED, ends=True, connections=20, holds_s=60, waits=True),
    Attack("unfinished frame", unfinished_frame, UNFINISHED, ends=True, connections=20, holds_s=60, waits=True),
    Attack("unfinished messages", unfinished_messages, UNFINISHED, connections=40, holds_s=5),
    Attack("many unfinished messages", many_unfinished_messages, UNFINISHED, connections=40, holds_s=5),
    Attack("two million descriptors, gzip", zipped_descriptors, BY_MESSAGE, holds_s=1),
    Attack("two million entries, gzip", zipped_entries, BY_MESSAGE, holds_s=1),
    Attack("ext_authz headers, gzip", zipped_headers, BY_MESSAGE, holds_s=1),
    Attack("64 MiB of zeros, gzip", zipped_zeros, BY_MESSAGE, holds_s=1),
    Attack("512 KiB each of 600 bytes, gzip", unpacked_backlog),
    Attack("1,020 entries each", in_rounds(many_entries)),
    Attack("255 descriptors each, overlong tags", in_rounds(overlong_tags)),
    Attack("4 MiB of zeros, gzip, health", zipped_watches, BY_COMPRESSION),
    Attack("long messages of reflection", reflected_messages, BY_MESSAGE, connections=10, holds_s=2),
    Attack("two million descriptors", plain_descriptors, BY_MESSAGE, holds_s=1),
    Attack("two million entries", plain_entries, BY_MESSAGE, holds_s=1),
    Attack("ext_authz headers", plain_headers, BY_MESSAGE, holds_s=1),
    Attack("ext_authz raw headers", plain_header_map, BY_MESSAGE, holds_s=1),
    Attack("ext_authz context extensions", plain_extensions, BY_MESSAGE, holds_s=1),
    Attack("ext_authz metadata", plain_metadata, BY_MESSAGE, holds_s=1),
    Attack("watches of health", watches, frozenset({Abuse.PROXIED_CALL_BUDGET}), connections=10, holds_s=2),
    Attack(
        "unfinished health checks", unfinished_checks, IDLE, connections=10, holds_s=3 * MESSAGE_TIMEOUT_S, waits=True
    ),
    Attack("health checks", health_checks, connections=10),
    Attack("never reads", never_reads, BY_WRITING, ends=True, reads=False, lasts_s=60, waits=True),
    Attack("shut window", shut_window, IDLE, connections=10, holds_s=3 * MESSAGE_TIMEOUT_S, waits=True),
    Attack("tiny windows", tiny_windows),
    Attack("slow head", slow_head, BY_TIME, ends=True, connections=50, port=Port.HTTP, lasts_s=30, waits=True),
    Attack("slow body", slow_body, BY_TIME, ends=True, connections=50, port=Port.HTTP, lasts_s=60, waits=True),
    Attack("4 MiB of JSON", large_json, BY_MESSAGE, port=Port.HTTP, holds_s=1),
    Attack("JSON of small parts", json_of_small_parts, BY_MESSAGE, port=Port.HTTP, holds_s=1),
    Attack("deep JSON", deep_json, BY_MESSAGE, port=Port.HTTP, holds_s=1),
    Attack("Content-Length and Transfer-Encoding", two_lengths, port=Port.HTTP, holds_s=1),
    Attack("foreign Origin", foreign_origin, frozenset({Abuse.CROSS_ORIGIN}), port=Port.HTTP, holds_s=1),
    Attack("denied calls", denied_calls),
]
