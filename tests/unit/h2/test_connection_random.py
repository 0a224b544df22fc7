"""Property tests of a connection: random input, split at random positions, has the same effect and leaves no state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from ratelimit_rls.h2 import frames
from ratelimit_rls.h2.frame_handlers import DRAIN_PING
from ratelimit_rls.h2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PRIORITY_FLAG,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Setting,
    frame,
)
from ratelimit_rls.h2.status import RpcError, StatusCode
from tests.unit.h2.client import PROXIED_METHOD, Client, fields, prefixed

quickly = settings(deadline=None, database=None)

OPENING = PREFACE + frames.settings({})

_writer = Client(sends_preface=False)
BLOCKS = st.sampled_from(
    [
        *[_writer.plain_block(fields(path)) for path in ("/a.Service/Method",) * 4 + (PROXIED_METHOD,)],
        _writer.plain_block(fields(content_length="7")),
        _writer.plain_block(fields(grpc_timeout="soon")),
        _writer.plain_block(fields(grpc_encoding="gzip")),
        _writer.plain_block(fields()[:4]),
        _writer.plain_block(fields(te="x")),
        _writer.plain_block(fields()) + b"\x40\x01a\x01b",
        _writer.plain_block(fields()) + b"\xbe",
        b"\x20" + _writer.plain_block(fields()),
        b"",
        b"\x00\x01a\x01b",
    ]
)
BODIES = st.sampled_from(
    [
        *[prefixed(b"hi")] * 4,
        b"",
        prefixed(b"hi")[:3],
        prefixed(b"hi")[3:],
        prefixed(b"x", compressed=1),
        prefixed(b"1") + prefixed(b"2"),
        b"\0\xff\0\0\0",
        b"\0" * 16_000,
    ]
)


class Ids:
    """Stream ids of a client: the next one, or one of the latest."""

    def __init__(self) -> None:
        self.next_id = 1

    def __getitem__(self, back: int) -> int:
        if back == 0:
            self.next_id += 2
        return max(1, self.next_id - 2 * max(1, back))


Sent = Callable[[Ids], bytes]
"""Returns the bytes to send, given the stream ids in use."""

NEW = st.sampled_from([0, 0, 0, 0, 0, 1])
LATEST = st.sampled_from([1, 1, 1, 2, 3])


def framed(kind: int, flags: int, back: int, payload: bytes) -> Sent:
    return lambda ids: frame(kind, flags, ids[back], payload)


def called(back: int, block: bytes, body: bytes) -> Sent:
    def sent(ids: Ids) -> bytes:
        stream_id = ids[back]
        return frame(HEADERS, END_HEADERS, stream_id, block) + frame(DATA, END_STREAM, stream_id, body)

    return sent


def continued(back: int, block: bytes, at: int) -> Sent:
    def sent(ids: Ids) -> bytes:
        stream_id = ids[back]
        return frame(HEADERS, 0, stream_id, block[:at]) + frame(CONTINUATION, END_HEADERS, stream_id, block[at:])

    return sent


def mutated(proper: Sent, at: int, byte: int) -> Sent:
    def sent(ids: Ids) -> bytes:
        data = bytearray(proper(ids))
        data[at % len(data)] = byte
        return bytes(data)

    return sent


def padded(body: bytes, padding: int) -> bytes:
    return bytes([padding]) + body[:1000] + bytes(padding)


def of_connection(data: bytes) -> Sent:
    return lambda ids: data


WINDOWS = st.sampled_from([1, 5, 100_000]).map(lambda size: size.to_bytes(4, "big"))
SETTINGS_VALUES = st.tuples(
    st.sampled_from([Setting.INITIAL_WINDOW_SIZE, Setting.HEADER_TABLE_SIZE]), st.sampled_from([0, 1, 7, 100, 70_000])
)
PROPER = st.one_of(
    st.builds(called, NEW, BLOCKS, BODIES),
    st.builds(framed, st.just(HEADERS), st.sampled_from([END_HEADERS, END_HEADERS | END_STREAM]), NEW, BLOCKS),
    st.builds(framed, st.just(DATA), st.sampled_from([0, END_STREAM]), LATEST, BODIES),
    st.builds(framed, st.just(DATA), st.just(PADDED), LATEST, st.builds(padded, BODIES, st.integers(0, 255))),
    st.builds(framed, st.just(RST_STREAM), st.just(0), LATEST, st.just(bytes(4))),
    st.builds(framed, st.just(WINDOW_UPDATE), st.just(0), LATEST, WINDOWS),
    st.builds(continued, NEW, BLOCKS, st.integers(0, 20)),
    st.builds(of_connection, SETTINGS_VALUES.map(lambda pair: frames.settings(dict([pair])))),
    st.builds(of_connection, st.sampled_from([1, 5, 100_000]).map(lambda size: frames.window_update(0, size))),
    st.sampled_from([frame(PING, 0, 0, b"12345678"), frame(PING, ACK, 0, DRAIN_PING), frame(0x42, 0, 0)]).map(
        of_connection
    ),
)
KINDS = st.sampled_from(
    [DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, frames.GOAWAY, WINDOW_UPDATE, CONTINUATION, 5, 0x42]
)
FLAGS = st.sampled_from([0, END_STREAM, END_HEADERS, END_HEADERS | END_STREAM, PADDED, PRIORITY_FLAG, 0xFF])
RANDOM = st.builds(framed, KINDS, FLAGS, NEW | LATEST, BLOCKS | BODIES | st.binary(max_size=12))
MUTATED = st.builds(mutated, PROPER, st.integers(0, 200), st.integers(0, 255))


def answered(client: Client) -> None:
    """Respond to all waiting calls in order."""
    for number, (_, stream_id, message, _, _) in enumerate(client.server.queue):
        if number % 3:
            client.connection.respond(stream_id, message * number)
        else:
            client.connection.fail(stream_id, RpcError(StatusCode.INTERNAL, "no"))
    client.settle()


def outcome(client: Client) -> object:
    calls = [(stream_id, message, head.metadata) for _, stream_id, message, _, head in client.server.queue]
    proxied = {stream_id: (call.taken, call.is_cancelled) for stream_id, call in client.server.proxied.items()}
    return calls, proxied, client.server.cancelled_ids, b"".join(client.writes), client.is_closed


@quickly
@given(
    sent=st.lists(st.one_of(PROPER, PROPER, PROPER, MUTATED), max_size=20),
    cuts=st.lists(st.integers(0, 2000), max_size=30),
)
def test_outcome_does_not_depend_on_how_input_is_split(sent: Sequence[Sent], cuts: Sequence[int]) -> None:
    ids = Ids()
    whole = OPENING + b"".join([one(ids) for one in sent])
    at_once, in_parts = Client(sends_preface=False), Client(sends_preface=False)
    at_once.send(whole)
    at = 0
    in_parts.server.defers_all = True
    for cut in sorted({*cuts, len(whole)}):
        in_parts.send(whole[at:cut])
        at = cut
    answered(at_once)
    answered(in_parts)
    assert outcome(in_parts) == outcome(at_once)


class RandomServer:
    """Performs random server actions, and records which calls were answered."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.answered_ids: list[int] = []

    def do(self, action: str, number: int) -> None:
        client, connection = self.client, self.client.connection
        waiting = [stream_id for stream_id in client.queued_ids if self.can_answer(stream_id)]
        proxied = [stream_id for stream_id in client.server.proxied if connection.is_waiting(stream_id)]
        if action == "response" and waiting:
            stream_id = waiting[number % len(waiting)]
            self.answered_ids.append(stream_id)
            connection.respond(stream_id, b"x" * number)
        elif action == "fail" and waiting:
            self.answered_ids.append(waiting[0])
            connection.fail(waiting[0], RpcError(StatusCode.INTERNAL, "no"))
        elif action == "end" and proxied:
            connection.end_response(proxied[0], number % 17, "over", ())
        elif action == "begin" and proxied and not client.server.proxied[proxied[0]].response_started:
            connection.start_response(proxied[0])
            connection.send_message(proxied[0], b"x" * number)
        elif action == "leave":
            connection.drain()
        elif action == "wait":
            client.check_progress(number / 1000)
        client.settle()

    def can_answer(self, stream_id: int) -> bool:
        """Return whether the call is queued and neither answered nor cancelled."""
        return stream_id not in self.answered_ids and stream_id not in self.client.server.cancelled_ids


ACTIONS = st.tuples(
    st.sampled_from(["response", "response", "response", "fail", "begin", "end", "leave", "wait"]),
    st.integers(0, 40_000),
)


@quickly
@given(st.lists(st.one_of(*[PROPER] * 3, *[ACTIONS] * 2), max_size=30), st.lists(RANDOM | MUTATED, max_size=5))
def test_random_input_leaves_no_state_behind(proper: Sequence[Sent | tuple[str, int]], others: Sequence[Sent]) -> None:
    """Invalid input comes last, because it closes most connections."""
    client, ids = Client(), Ids()
    random_server = RandomServer(client)
    for one in (*proper, *others):
        if isinstance(one, tuple):
            random_server.do(*one)
        else:
            client.send(one(ids))
    if client.is_closed:
        assert client.goaways
    elif not (client.connection._buffer or client.connection._header_blocks.is_unfinished):
        assert client.is_alive
    client.disconnect()
    assert sorted(random_server.answered_ids + client.server.cancelled_ids) == sorted(client.queued_ids)
    assert len(set(client.queued_ids)) == len(client.queued_ids)
    assert all(
        call.is_cancelled or not client.connection.is_waiting(id_) for id_, call in client.server.proxied.items()
    )
    ended, sending = client.connection, client.connection._outbound
    assert (ended._unfinished_bytes, ended._streams, ended._is_closed) == (0, {}, True)
    assert (sending.stream_credit, sending._pending, sending.ready) == ({}, {}, [])
