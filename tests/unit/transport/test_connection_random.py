"""Whatever a client sends, and wherever it is cut: the same calls, the same answers, and books that balance."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratelimit_rls.transport.grpc import connection
from ratelimit_rls.transport.grpc.connection import LAST_PING
from ratelimit_rls.transport.grpc.door import Failure, FailureCode
from ratelimit_rls.transport.http2 import frames
from ratelimit_rls.transport.http2.frames import (
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
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    Setting,
    frame,
)
from tests.unit.transport.http2_client import RELAYED, Client, fields, prefixed

quickly = settings(deadline=None, database=None)

OPENING = PREFACE + frames.settings({})

_writer = Client(greets=False)
BLOCKS = st.sampled_from(
    [
        *[_writer.plain_block(fields(path)) for path in ("/a.Service/Method",) * 4 + (RELAYED,)],
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
    """Streams as a client has them: the next one, or one of the latest."""

    def __init__(self) -> None:
        self.next_id = 1

    def __getitem__(self, back: int) -> int:
        if back == 0:
            self.next_id += 2
        return max(1, self.next_id - 2 * max(1, back))


Sent = Callable[[Ids], bytes]
"""Bytes, once it is known which streams there are."""

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
    st.sampled_from([frame(PING, 0, 0, b"12345678"), frame(PING, ACK, 0, LAST_PING), frame(0x42, 0, 0)]).map(
        of_connection
    ),
)
KINDS = st.sampled_from(
    [DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, frames.GOAWAY, WINDOW_UPDATE, CONTINUATION, 5, 0x42]
)
FLAGS = st.sampled_from([0, END_STREAM, END_HEADERS, END_HEADERS | END_STREAM, PADDED, WITH_PRIORITY, 0xFF])
RANDOM = st.builds(framed, KINDS, FLAGS, NEW | LATEST, BLOCKS | BODIES | st.binary(max_size=12))
MUTATED = st.builds(mutated, PROPER, st.integers(0, 200), st.integers(0, 255))


def answered(client: Client) -> None:
    """Everybody who waits, in turn."""
    for number, (_, stream_id, message, _, _) in enumerate(client.host.gathering):
        if number % 3:
            client.connection.answer(stream_id, message * number)
        else:
            client.connection.fail(stream_id, Failure(FailureCode.INTERNAL, "no"))
    client.settle()


def outcome(client: Client) -> object:
    calls = [(stream_id, message, head.metadata) for _, stream_id, message, _, head in client.host.gathering]
    relayed = {stream_id: (call.taken, call.is_cancelled) for stream_id, call in client.host.relayed.items()}
    return calls, relayed, client.host.left_ids, b"".join(client.socket.writes), client.socket.is_closed


@quickly
@given(
    sent=st.lists(st.one_of(PROPER, PROPER, PROPER, MUTATED), max_size=20),
    cuts=st.lists(st.integers(0, 2000), max_size=30),
)
def test_it_does_not_matter_where_bytes_are_cut_or_turns_end(sent: Sequence[Sent], cuts: Sequence[int]) -> None:
    ids = Ids()
    whole = OPENING + b"".join([one(ids) for one in sent])
    at_once, in_parts = Client(greets=False), Client(greets=False)
    at_once.give(whole)
    at = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "TURN_S", -1.0)  # after every frame that is not one of an ordinary call
        for cut in sorted({*cuts, len(whole)}):
            in_parts.give(whole[at:cut])
            at = cut
    answered(at_once)
    answered(in_parts)
    assert outcome(in_parts) == outcome(at_once)


class Told:
    """Plays the host at random, and keeps account of who was answered."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.answered_ids: list[int] = []

    def do(self, action: str, number: int) -> None:
        client, told = self.client, self.client.connection
        waiting = [stream_id for stream_id in client.asked_ids if self.may_answer(stream_id)]
        relayed = [stream_id for stream_id in client.host.relayed if told.waits(stream_id)]
        if action == "answer" and waiting:
            stream_id = waiting[number % len(waiting)]
            self.answered_ids.append(stream_id)
            told.answer(stream_id, b"x" * number)
        elif action == "fail" and waiting:
            self.answered_ids.append(waiting[0])
            told.fail(waiting[0], Failure(FailureCode.INTERNAL, "no"))
        elif action == "end" and relayed:
            told.end(relayed[0], number % 17, "over", ())
        elif action == "begin" and relayed and not client.host.relayed[relayed[0]].has_begun:
            told.begin(relayed[0])
            told.send(relayed[0], b"x" * number)
        elif action == "hand on" and relayed:
            client.hand_on(relayed[0], min(number, client.host.relayed[relayed[0]].held_bytes))
        elif action == "leave":
            told.leave()
        elif action == "wait":
            client.loop.wait(number / 1000)
        client.settle()

    def may_answer(self, stream_id: int) -> bool:
        """It was asked, and neither answered nor left."""
        return stream_id not in self.answered_ids and stream_id not in self.client.host.left_ids


ACTIONS = st.tuples(
    st.sampled_from(["answer", "answer", "answer", "fail", "begin", "end", "hand on", "leave", "wait"]),
    st.integers(0, 40_000),
)


@quickly
@given(st.lists(st.one_of(*[PROPER] * 3, *[ACTIONS] * 2), max_size=30), st.lists(RANDOM | MUTATED, max_size=5))
def test_whatever_comes_the_books_balance(proper: Sequence[Sent | tuple[str, int]], others: Sequence[Sent]) -> None:
    """What must not be comes last, as it ends most connections."""
    client, ids = Client(), Ids()
    told = Told(client)
    for one in (*proper, *others):
        if isinstance(one, tuple):
            told.do(*one)
        else:
            client.give(one(ids))
    if client.socket.is_closed:
        assert client.went_away
    elif not (client.connection._rest or client.connection._blocks.is_unfinished):
        assert client.is_well
    client.lose()
    assert sorted(told.answered_ids + client.host.left_ids) == sorted(client.asked_ids)
    assert len(set(client.asked_ids)) == len(client.asked_ids)
    assert all(call.is_cancelled or not client.connection.waits(id_) for id_, call in client.host.relayed.items())
    ended, sending = client.connection, client.connection._sending
    assert (ended._held_bytes, ended._streams, ended._is_over) == (0, {}, True)
    assert (sending.given, sending._bodies, sending.ready) == ({}, {}, [])
    assert (client.loop.timers, client.host.connections) == ([], [])
