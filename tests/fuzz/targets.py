"""Fuzz targets: a corpus, and a check that fails if an input is handled incorrectly.

A check returns a short description of the outcome. An input with a new description is kept and mutated further. Other
implementations serve as the oracle where there is one: `hpack` for header blocks, protobuf for messages. Bounds that
reject input by design are part of each check.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from struct import pack
from typing import Any, TypeVar, cast
from zlib import crc32

from google.protobuf import json_format
from google.protobuf.message import DecodeError
from hpack import Decoder as OtherDecoder
from hpack import HPACKError

from ratelimit_rls.api.ext_authz.decode import attributes, parse
from ratelimit_rls.api.rls.decode import decode
from ratelimit_rls.errors import BadRequest, TooComplex
from ratelimit_rls.h2 import frames
from ratelimit_rls.h2.call_headers import CallHeadersParser, NotGrpc
from ratelimit_rls.h2.frames import END_HEADERS, END_STREAM, Http2StreamError
from ratelimit_rls.h2.hpack import (
    FIELD_OVERHEAD_BYTES,
    MAX_FIELDS,
    MAX_FIELDS_READ,
    MAX_SIZE_UPDATES,
    Decoder,
    HpackError,
)
from ratelimit_rls.h2.status import RpcError, StatusCode
from ratelimit_rls.pipeline.message_bounds import MessageBounds
from ratelimit_rls.protos.messages import POOL, CheckRequest, RateLimitRequest, RateLimitResponse
from ratelimit_rls.transport.http.json_api import json_app
from ratelimit_rls.transport.http.json_bounds import check_json
from tests.hostile import hpack
from tests.support.readers import RandomRules
from tests.unit.h2.client import METHOD, PROXIED_METHOD, Client, prefixed

MAX_LIST_BYTES = 32_768

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    corpus: Sequence[bytes]
    words: Sequence[bytes]
    check: Callable[[bytes], str]


def kind_of(words: str) -> str:
    """Return an error message without parts of the input."""
    return re.sub(r"[\"'«].*|\d+", "", words)[:60]


def outcome(rejection: type[Exception], reads: Callable[[bytes], T], data: bytes) -> T | str:
    """Return the decoded value, or the reason of the rejection."""
    try:
        return reads(data)
    except rejection as error:
        return kind_of(str(error))


# Frames.

_RAW = 0xF0
"""From this type on, bytes are sent to the connection unchanged."""

_KINDS = 12


def record(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return a frame for the corpus, whose length stays valid when other bytes are mutated."""
    return pack(">BBBH", kind, flags, stream_id, len(payload)) + payload


def framed(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + 5 <= len(data):
        kind, flags, stream_id = data[at : at + 3]
        size = int.from_bytes(data[at + 3 : at + 5], "big")
        payload = data[at + 5 : at + 5 + size]
        at += 5 + size
        yield payload if kind >= _RAW else frames.frame(kind % _KINDS, flags, stream_id, payload[:16_384])


BLOCK = hpack.call(METHOD)
CALL = [
    record(frames.HEADERS, END_HEADERS, 1, BLOCK),
    record(frames.DATA, END_STREAM, 1, prefixed(b"hello")),
]
SECOND = [
    record(frames.HEADERS, END_HEADERS, 3, hpack.call(PROXIED_METHOD)),
    record(frames.DATA, 0, 3, prefixed(b"hello")),
    record(frames.DATA, END_STREAM, 3, prefixed(b"more")),
]
FRAME_RECORDS = [
    *CALL,
    *SECOND,
    record(frames.HEADERS, 0, 5, BLOCK[:9]),
    record(frames.CONTINUATION, END_HEADERS, 5, BLOCK[9:]),
    record(frames.HEADERS, END_HEADERS | frames.PADDED | frames.PRIORITY_FLAG, 7, b"\x02" + bytes(5) + BLOCK + b"\0\0"),
    record(frames.HEADERS, END_HEADERS | END_STREAM, 9, b"\x82\x86\x84"),
    record(frames.DATA, frames.PADDED, 7, b"\x03abc\0\0\0"),
    record(frames.RST_STREAM, 0, 1, pack(">I", 8)),
    record(frames.PRIORITY, 0, 1, bytes(5)),
    record(frames.SETTINGS, 0, 0, pack(">HI", 4, 0)),
    record(frames.SETTINGS, 0, 0, pack(">HIHI", 1, 0, 5, 16_384)),
    record(frames.SETTINGS, frames.ACK, 0),
    record(frames.PING, 0, 0, b"12345678"),
    record(frames.PING, frames.ACK, 0, b"last one"),
    record(frames.GOAWAY, 0, 0, bytes(8)),
    record(frames.WINDOW_UPDATE, 0, 0, pack(">I", 1)),
    record(frames.WINDOW_UPDATE, 0, 1, pack(">I", 2**31 - 1)),
    record(frames.PUSH_PROMISE, 0, 1, bytes(4)),
    record(11, 0, 0, b"unknown"),
    record(_RAW, 0, 0, b"\0\0\xff\x09\0\0\0\0\0"),
]
_ANSWERS = (b"", b"x" * 7, b"x" * 20_000, None)


def check_frames(data: bytes) -> str:
    """A connection continues or closes with a reason for any input in any pieces, and frees all its state."""
    client = Client()
    pieces = list(framed(data))
    for number, piece in enumerate(pieces):
        # Pieces may end within frames.
        at = len(piece) * (number % 3) // 2
        for part in (piece[:at], piece[at:]):
            if part and not client.is_closed:
                client.send(part)
        if number % 2:
            _answer_some(client, number)
    ended = client.connection
    if client.is_closed:
        assert client.goaways, "it was closed without a GOAWAY"
        fate = f"{client.goaways[-1][1].name}"
    else:
        fate = f"{len(client.queued)} calls, {len(client.server.proxied)} proxied, {len(client.responses)} answers"
    client.disconnect()
    assert (ended._unfinished_bytes, ended._streams, ended._is_closed) == (0, {}, True)
    sending = ended._outbound
    assert (sending.stream_credit, sending._pending, sending.ready) == ({}, {}, [])
    return fate


def _answer_some(client: Client, number: int) -> None:
    for connection, stream_id, _, _, _ in client.server.queue:
        if connection.is_waiting(stream_id) and stream_id not in client.responses:
            answer = _ANSWERS[number // 2 % len(_ANSWERS)]
            if answer is None:
                connection.fail(stream_id, RpcError(StatusCode.INTERNAL, "no"))
            else:
                connection.respond(stream_id, answer)
    client.settle()


# Header blocks.

_SEPARATOR = b"\xff\xff\xff\xff\xff\xff"
"""Separates blocks of one connection. In HPACK it is an oversized integer."""

FIELDS = [
    hpack.added(b"x", b"y" * 200),
    hpack.added(b"custom-key", b"custom-value"),
    hpack.literal(b"te", b"trailers"),
    b"\x10" + hpack.string(b"never") + hpack.string(b"indexed"),
    bytes.fromhex("418cf1e3c2e5f23a6ba0ab90f4ff"),
    bytes.fromhex("408825a849e95ba97d7f8925a849e95bb8e8b4bf"),
    hpack.NEWEST,
    hpack.indexed(63),
    hpack.integer(62, 6, 0x40) + hpack.string(b"again"),
]
BLOCKS = [
    BLOCK,
    BLOCK + _SEPARATOR + BLOCK,
    b"\x82\x86\x84" + b"".join(FIELDS),
    b"".join(FIELDS) + _SEPARATOR + b"".join(reversed(FIELDS[6:])),
    hpack.resized(0) + hpack.resized(4096) + BLOCK,
    hpack.added(b"a", b"") * 120 + _SEPARATOR + BLOCK,
]


def check_hpack(data: bytes) -> str:
    """Blocks decode as in the hpack library, or are rejected because of a documented limit."""
    decoder, other = Decoder(max_list_bytes=MAX_LIST_BYTES), OtherDecoder(2**40)

    def other_reads(block: bytes) -> list[tuple[bytes, bytes]]:
        return [(name, value) for name, value in other.decode(block, raw=True)]

    fate = ""
    for block in data.split(_SEPARATOR):
        expected = outcome(HPACKError, other_reads, block)
        fields = outcome(HpackError, decoder.decode, block)
        if isinstance(fields, str):
            assert (
                isinstance(expected, str)
                or len(expected) > MAX_FIELDS_READ
                or _leading_updates(block) > MAX_SIZE_UPDATES
            ), f"rejected: {fields}; another implementation reads {expected}"
            return f"{fate} {fields}"
        assert not isinstance(expected, str), f"another implementation rejects what is read as {fields}"
        if fields is None:
            size = sum(len(name) + len(value) + FIELD_OVERHEAD_BYTES for name, value in expected)
            assert len(expected) > MAX_FIELDS or size > MAX_LIST_BYTES
        else:
            assert fields == expected
        assert decoder._fields[62:] == [tuple(field) for field in other.header_table.dynamic_entries]
        fate += f" {len(fields or ()).bit_length()}{len(decoder._fields).bit_length()}"
    return fate


def _leading_updates(block: bytes) -> int:
    count = at = 0
    while at < len(block) and 0x20 <= block[at] < 0x40:
        count += 1
        continues = block[at] == 0x3F
        at += 1
        while continues and at < len(block):
            continues = block[at] >= 0x80
            at += 1
    return count


# Request headers.

HEADS = [
    BLOCK,
    hpack.call(PROXIED_METHOD, hpack.literal(b"grpc-timeout", b"5S"), hpack.literal(b"x-bin", b"AAEC,AAE=")),
    hpack.call(METHOD, hpack.literal(b"grpc-encoding", b"gzip"), hpack.literal(b"content-length", b"10")),
    hpack.call(METHOD, hpack.literal(b"traceparent", b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01")),
    b"\x82\x86\x84" + hpack.literal(b"user-agent", b"curl"),
]
HEAD_WORDS = [
    *(hpack.literal(name, value) for name, value in [(b"te", b"x"), (b"connection", b"close"), (b"A", b"b")]),
    *(hpack.literal(b"x-bin", value) for value in [b",,,,", b"!", b"=", b"A", b"AA==,AA", b"\xff"]),
    *(hpack.literal(b"grpc-timeout", value) for value in [b"", b"S", b"1", b"123456789S", b"0n", b"-1S"]),
    *(hpack.literal(b"content-length", value) for value in [b"1", b"", b"-1", b"9" * 30, b"\xb2"]),
    hpack.literal(b":path", b"/x"),
    hpack.literal(b":authority", b"a\0b"),
    hpack.literal(b"x", b"a\r\nb"),
    b"\x82",
    b"\x83",
    b"\x86",
]


def check_heads(data: bytes) -> str:
    """A header list is parsed, or is rejected in one of the documented ways."""
    try:
        fields = Decoder(max_list_bytes=MAX_LIST_BYTES).decode(data)
    except HpackError:
        return "no list"
    if fields is None:
        return "too large"
    gathering: list[Any] = []
    try:
        head = CallHeadersParser({METHOD: gathering}, "x-request-id").read(fields)
    except NotGrpc as rejection:
        return f"{rejection.status}"
    except Http2StreamError as fault:
        return fault.code.name
    if isinstance(head, RpcError):
        return kind_of(head.message)
    assert [value for name, value in fields if name == b":path"] == [head.path.encode("latin-1")]
    assert (head.queue is gathering) == (head.path == METHOD)
    assert head.deadline_in_s >= 0
    assert not any(b"\0" in value or b"\n" in value or b"\r" in value for _, value in fields)
    return f"{head.path == METHOD} {len(head.metadata)} {head.content_length is None}"


# Messages.


def request(**fields: Any) -> bytes:
    return json_format.ParseDict(fields, RateLimitRequest(), descriptor_pool=POOL).SerializeToString()


def descriptor(**entries: str) -> dict[str, Any]:
    return {"entries": [{"key": key, "value": value} for key, value in entries.items()]}


REQUESTS = [
    request(domain="edge", descriptors=[descriptor(plan="free", user="alice"), descriptor(path="/")], hitsAddend=3),
    request(domain="édge", descriptors=[descriptor(plan="frée")]),
    request(domain="edge", descriptors=[{**descriptor(a="b"), "limit": {"requestsPerUnit": 5, "unit": "MINUTE"}}]),
    request(domain="edge", descriptors=[{**descriptor(a="b"), "hitsAddend": 7}, {"isNegativeHits": True}]),
    request(domain="e" * 200, descriptors=[descriptor(a="x" * 200)] * 3),
    b"",
]
PROTOBUF_WORDS = [
    b"\x0a\x00",
    b"\x12\x00",
    b"\x12\x02\x0a\x00",
    b"\x12\x04\x0a\x02\x0a\x00",
    b"\x18\x80\x80\x80\x80\x10",
    b"\x1a\x00",
    b"\x22\x00",
    b"\x0b\x0c",
    b"\x0b",
    b"\x0c",
    b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
    b"\x80\x00",
    b"\x09" + bytes(8),
    b"\x0d" + bytes(4),
    b"\xc3\xa9",
    b"\xff",
    b"\x12\x00" * 300,
    b"\x0a\x00" * 300,
]
ORDINARY_BYTES = 2000
"""A message below this size, in total and in its parts, is not rejected for its size."""


TIGHT = MessageBounds(descriptors=4, entries=8, entry_bytes=200, check_fields=40)


def check_rls(data: bytes) -> str:
    """A RateLimitRequest decodes as in protobuf, or is rejected: by protobuf, or because of a bound."""
    expected = outcome(DecodeError, RateLimitRequest.FromString, data)
    bounded = outcome(BadRequest, lambda data: decode(data, bounds=TIGHT), data)
    if not isinstance(bounded, str):
        texts = [text for one in bounded.descriptors for entry in one.entries for text in entry]
        assert len(bounded.descriptors) <= TIGHT.descriptors
        assert len(texts) <= 2 * TIGHT.entries
        assert max((len(text.encode()) for text in (bounded.domain, *texts)), default=0) <= TIGHT.entry_bytes
    read = outcome(BadRequest, decode, data)
    if isinstance(read, str):
        assert isinstance(expected, str) or not _is_ordinary(expected, data), f"rejected: {read}"
        return read
    assert not isinstance(expected, str), f"protobuf rejects what is read as {read}"
    read_by_protobuf = [
        (
            [(entry.key, entry.value) for entry in one.entries],
            one.limit.requests_per_unit if one.HasField("limit") else None,
            one.hits_addend.value if one.HasField("hits_addend") else None,
            one.is_negative_hits,
        )
        for one in expected.descriptors
    ]
    assert (read.domain, read.hits) == (expected.domain, expected.hits_addend)
    assert [
        ([*map(tuple, one.entries)], one.limit and one.limit.requests_per_unit, one.hits, one.is_refund)
        for one in read.descriptors
    ] == read_by_protobuf
    size = sum(len(entries) for entries, *_ in read_by_protobuf)
    return f"{len(read_by_protobuf)} {size} {len(read.domain).bit_length()} {data.isascii()} {isinstance(bounded, str)}"


def _is_ordinary(message: Any, data: bytes) -> bool:
    return (
        len(data) < ORDINARY_BYTES
        and len(message.descriptors) < 50
        and all(len(one.entries) < 20 for one in message.descriptors)
    )


RULES = [RandomRules(seed) for seed in range(16)]
RULES_MESSAGES = [message for one in RULES for message in one.messages(5)]


def check_readers(data: bytes) -> str:
    """The compiled reader prepares a RateLimitRequest as the general one does, under some random rules."""
    return f"{[one.readers.compare_one(data) for one in RULES[crc32(data) % 4 :: 4]]}"


def check_request(**fields: Any) -> bytes:
    return json_format.ParseDict({"attributes": fields}, CheckRequest(), descriptor_pool=POOL).SerializeToString()


_SOURCE = {"address": {"socketAddress": {"address": "192.0.2.1", "portValue": 7}}}
_HTTP = {"method": "GET", "path": "/a?b=c", "host": "example.com", "headers": {"x-api-key": "k", "x": "y"}}
CHECKS = [
    check_request(source=_SOURCE, request={"http": _HTTP}, contextExtensions={"ratelimit_domain": "edge"}),
    check_request(
        request={"http": {"headerMap": {"headers": [{"key": "x", "rawValue": "/w=="}, {"key": "x", "value": "é"}]}}}
    ),
    check_request(metadataContext={"filterMetadata": {"jwt": {"sub": "alice", "n": 1, "deep": {"a": [1, {}]}}}}),
    b"",
]
_WANTED = [("jwt", "sub"), ("jwt", "n"), ("jwt", "deep", "a"), ("none", "x")]


def check_authz(data: bytes) -> str:
    """A CheckRequest decodes as in protobuf, or is rejected: by protobuf, or because of a bound."""
    expected = outcome(DecodeError, CheckRequest.FromString, data)
    bounded = outcome(BadRequest, lambda data: parse(data, TIGHT), data)
    if not isinstance(bounded, str):
        assert fields_of(bounded) <= TIGHT.check_fields
    context = outcome(BadRequest, parse, data)
    if isinstance(context, str):
        assert isinstance(expected, str) or not _is_ordinary_check(expected.attributes, data), f"rejected: {context}"
        return context
    assert not isinstance(expected, str)
    assert context == expected.attributes
    parsed = attributes(context, _WANTED)
    http = expected.attributes.request.http
    assert (parsed.method, parsed.host, parsed.path) == (http.method, http.host, http.path.partition("?")[0])
    if not http.header_map.headers:
        assert dict(parsed.headers) == dict(http.headers)
    return (
        f"{len(parsed.headers)} {len(parsed.context)} {len(parsed.metadata)} {bool(parsed.peer)} {bool(parsed.query)}"
    )


def fields_of(message: Any) -> int:
    """Count the fields of a message, including submessages. On the wire there are at least as many."""
    count = 0
    for field, value in message.ListFields():
        if field.type != field.TYPE_MESSAGE:
            count += 1
        elif field.message_type.GetOptions().map_entry:
            in_values = field.message_type.fields_by_name["value"].type == field.TYPE_MESSAGE
            count += sum(1 + (fields_of(value[key]) if in_values else 0) for key in value)
        elif field.is_repeated:
            count += sum(1 + fields_of(one) for one in value)
        else:
            count += 1 + fields_of(value)
    return count


def _is_ordinary_check(context: Any, data: bytes) -> bool:
    http = context.request.http
    return (
        len(data) < ORDINARY_BYTES
        and len(http.headers) + len(http.header_map.headers) < 50
        and len(context.context_extensions) < 20
        and len(context.metadata_context.filter_metadata) < 20
    )


# JSON.

BODIES = [
    json.dumps({"domain": "edge", "descriptors": [descriptor(plan="free", user="alice")], "hitsAddend": 3}).encode(),
    json.dumps({"domain": "é", "descriptors": [{**descriptor(a='"\\'), "hitsAddend": "7"}, {}]}).encode(),
    b'{"domain":"edge","descriptors":[{"entries":[{"key":"a","value":"b"}],"limit":{"unit":"DAY","requestsPerUnit":1}}]}',
    b'{"domain":"edge","hitsAddend":1e2,"descriptors":null}',
    b'{"domain":"' + b"x" * 300 + b'"}',
    b"[1,2,{}]",
]
JSON_WORDS = [
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b'\\"', b"\\\\", b"\\u0022", b"\\ud800", b"null", b"true"),
    *(
        b'"a":1,',
        b"{},",
        b"[],",
        b'"",',
        b"-1",
        b"1e999",
        b"NaN",
        b"0" * 30,
        b"\xff",
        b"\xef\xbb\xbf",
        b"\0",
        b" " * 50,
    ),
    *(b"[" * 200, b"{}," * 30, b'{"a":' * 50, b'"domain":"twice",'),
]
MAX_VALUES = 20
ANSWER = RateLimitResponse(overall_code=1).SerializeToString()


class RecordingPipeline:
    """Fake pipeline behind the page."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    async def check(self, message: bytes) -> bytes:
        self.messages.append(message)
        return ANSWER


def check_body(data: bytes) -> str:
    """Values of JSON are counted correctly; a RateLimitRequest is passed on, and everything else is rejected."""
    values = _values(data)
    try:
        check_json(data, MAX_VALUES)
        assert values is None or values.count - 1 <= MAX_VALUES
    except TooComplex:
        assert values is None or values.count + values.empty > MAX_VALUES
    pipeline = RecordingPipeline()
    status = asyncio.run(_posted(pipeline, data))
    expected = outcome(Exception, lambda data: json_format.Parse(data, RateLimitRequest(), descriptor_pool=POOL), data)
    if status == 200:
        assert pipeline.messages == [expected.SerializeToString()]  # type: ignore[union-attr]
    else:
        assert (status, pipeline.messages) == (400, [])
        assert isinstance(expected, str) or values is None or values.count > ORDINARY_VALUES
    return f"{status} {values and values.count} {expected if isinstance(expected, str) else ''}"


ORDINARY_VALUES = 500
"""This many values are never rejected."""


@dataclass(slots=True)
class _Values:
    count: int = 0
    empty: int = 0  # objects and arrays


def _values(data: bytes) -> _Values | None:
    """Count the values of a JSON text; None if it is not JSON."""
    found = _Values()

    def count(value: Any) -> None:
        found.count += 1
        if isinstance(value, list):  # objects are tuples of pairs
            found.empty += not value
            for one in value:
                count(one)
        elif isinstance(value, tuple):
            found.empty += not value[0]
            for _, one in value[0]:
                count(one)

    try:
        count(json.loads(data.decode(), object_pairs_hook=lambda pairs: (pairs,)))
    except (ValueError, RecursionError):
        return None
    return found


async def _posted(pipeline: RecordingPipeline, body: bytes) -> int:
    """Post to the page over ASGI, and return the status of the response."""
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    app = json_app(cast("Any", pipeline), cast("Any", None), cast("Any", None))
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": "/json",
        "headers": [],
        "query_string": b"",
        "client": None,
    }
    await app(scope, receive, send)
    (status,) = statuses
    return status


TARGETS = [
    Target("frames", [b"".join(FRAME_RECORDS), b"".join(CALL), b"".join(SECOND)], FRAME_RECORDS, check_frames),
    Target("header blocks", BLOCKS, [*FIELDS, hpack.resized(0), hpack.resized(100), _SEPARATOR], check_hpack),
    Target("heads", HEADS, HEAD_WORDS, check_heads),
    Target("compiled reader", RULES_MESSAGES, PROTOBUF_WORDS, check_readers),
    Target("RateLimitRequest", REQUESTS, PROTOBUF_WORDS, check_rls),
    Target("CheckRequest", CHECKS, PROTOBUF_WORDS, check_authz),
    Target("JSON", BODIES, JSON_WORDS, check_body),
]
