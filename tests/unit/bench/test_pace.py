"""The paced load says the truth: calls go out when they are due, once each, and their latency counts from then."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pygrpc_native import EVENT_CALL, NativeGrpcFront

from bench import wire
from bench.connection import LoadError, Target
from bench.pace import Paced, percentile
from ratelimit_rls.transport.grpc.messages import RateLimitResponse

OK = RateLimitResponse(overall_code=RateLimitResponse.OK).SerializeToString()
OVER_LIMIT = RateLimitResponse(overall_code=RateLimitResponse.OVER_LIMIT).SerializeToString()
PRIMING = 2  # calls on each connection before the first that is due

Seen = list[tuple[float, bytes]]
Answer = Callable[[NativeGrpcFront, int, int], None]
"""What is done about a call: the server, the call's id, and how many calls came before it."""


def request(number: int) -> bytes:
    return wire.rate_limit_request("pace", [[("number", str(number))]])


def requests(count: int) -> list[bytes]:
    return [wire.data(request(number)) for number in range(count)]


class Eventful(list[bytes]):
    """Calls of which one has something happen to the load when it is about to be sent."""

    def __init__(self, calls: list[bytes], at: int, happens: Callable[[], None]) -> None:
        super().__init__(calls)
        self._at, self._happens = at, happens

    def __iter__(self) -> Iterator[bytes]:
        for number, call in enumerate(super().__iter__()):
            if number == self._at:
                self._happens()
            yield call


def ok(server: NativeGrpcFront, call_id: int, _before: int) -> None:
    server.respond(call_id, OK)


@contextmanager
def front(path: Path, answer: Answer = ok, seen: Seen | None = None, most_streams: int = 1024) -> Iterator[Target]:
    """A real gRPC server that notes what it was asked and when, and takes one call at a time."""
    noted = [] if seen is None else seen
    server = NativeGrpcFront(
        f"unix:{path}", [(wire.METHOD, False)], io_threads=1, call_details=True, max_concurrent_streams=most_streams
    )
    server.start()

    def dispatch() -> None:
        while (events := server.recv_batch_details(64)) is not None:
            for kind, call_id, _, message, _, _ in events:
                if kind == EVENT_CALL and message is not None:
                    noted.append((time.perf_counter(), message))
                    answer(server, call_id, len(noted) - 1)

    thread = threading.Thread(target=dispatch)
    thread.start()
    try:
        yield Target(str(path))
    finally:
        server.close()
        thread.join()


def test_every_call_is_sent_once_and_answered(tmp_path: Path) -> None:
    seen: Seen = []
    calls = requests(2 * PRIMING + 300)
    with front(tmp_path / "grpc.sock", seen=seen) as target, Paced(target, calls, connections=2) as load:
        one, two = load.run(1_000, 0.1), load.run(1_000, 0.2)
    assert (one.calls, two.calls) == (100, 200)
    assert Counter(message for _, message in seen) == Counter(request(number) for number in range(len(calls)))
    for latencies in (one, two):
        assert 0 < latencies.p50_us <= latencies.p99_us <= latencies.p99_9_us <= latencies.max_us


def test_calls_are_sent_at_the_pace_asked_for(tmp_path: Path) -> None:
    seen: Seen = []
    with front(tmp_path / "grpc.sock", seen=seen) as target, Paced(target, requests(1)) as load:
        before = time.perf_counter()
        latencies = load.run(500, 0.3)
    sent = sorted(at for at, _ in seen)[4 * PRIMING :]
    assert len(sent) == 150
    assert all(at >= before + number / 500 for number, at in enumerate(sent)), "a call came before it was due"
    assert 0 < latencies.per_s <= 500


@pytest.mark.parametrize("most_streams", [1, 1024])
def test_a_server_that_stands_still_is_charged_for_every_call_due_meanwhile(tmp_path: Path, most_streams: int) -> None:
    def stalls_once(server: NativeGrpcFront, call_id: int, before: int) -> None:
        if before == 50:
            time.sleep(0.2)
        server.respond(call_id, OK)

    with (
        front(tmp_path / "grpc.sock", stalls_once, most_streams=most_streams) as target,
        Paced(target, requests(1), connections=2) as load,
    ):
        latencies = load.run(1_000, 0.3)
    # Of the 300 calls 200 are due while it sleeps, and two at most are in flight where it takes one on a connection.
    assert latencies.max_us >= 200_000
    assert latencies.p99_us >= 190_000
    assert latencies.p50_us >= 40_000


def test_calls_that_the_load_itself_sends_late_are_told(tmp_path: Path) -> None:
    calls = Eventful(requests(300), at=PRIMING + 50, happens=lambda: time.sleep(0.1))
    with front(tmp_path / "grpc.sock") as target, Paced(target, calls, connections=1) as load:
        latencies = load.run(1_000, 0.2)
    assert latencies.late_share >= 0.45
    assert latencies.max_us >= 100_000


def test_an_answer_counts_for_its_own_call_in_whatever_order_it_comes(tmp_path: Path) -> None:
    held: list[int] = []

    def first_one_last(server: NativeGrpcFront, call_id: int, before: int) -> None:
        if before == PRIMING:
            held.append(call_id)
            return
        server.respond(call_id, OK)
        if before == PRIMING + 99:
            server.respond(held[0], OK)

    with (
        front(tmp_path / "grpc.sock", first_one_last) as target,
        Paced(target, requests(1), connections=1) as load,
    ):
        latencies = load.run(500, 0.2)
    assert latencies.calls == 100
    assert latencies.max_us >= 150_000


def test_more_than_a_connection_takes_at_once_is_sent_when_it_does(tmp_path: Path) -> None:
    seen: Seen = []
    messages = [wire.rate_limit_request(f"{number:012000}", []) for number in range(PRIMING + 500)]
    with (
        front(tmp_path / "grpc.sock", seen=seen) as target,
        Paced(target, [wire.data(message) for message in messages], connections=1) as load,
    ):
        assert load.run(100_000, 0.005).calls == 500
    assert Counter(message for _, message in seen) == Counter(messages)


def test_an_answer_that_comes_in_pieces_counts_once(tmp_path: Path) -> None:
    class Dribbling(socket.socket):
        def recv(self, size: int, flags: int = 0) -> bytes:
            return super().recv(min(size, 7), flags)

    class InPieces(Target):
        def connect(self) -> socket.socket:
            plain = Dribbling(socket.AF_UNIX, socket.SOCK_STREAM)
            plain.connect(self.address)
            return plain

    with front(tmp_path / "grpc.sock") as target, Paced(InPieces(target.address), requests(1), connections=1) as load:
        assert load.run(1_000, 0.05).calls == 50


def test_a_call_that_fails_gives_no_figures(tmp_path: Path) -> None:
    def fails_later(server: NativeGrpcFront, call_id: int, before: int) -> None:
        if before < 50:
            server.respond(call_id, OK)
        else:
            server.fail(call_id, 14, "no")

    with (
        front(tmp_path / "grpc.sock", fails_later) as target,
        Paced(target, requests(1)) as load,
        pytest.raises(LoadError, match=r"a call failed: .*grpc-status: 14, grpc-message: no"),
    ):
        load.run(1_000, 0.2)


def test_answers_that_are_not_ok_give_figures_only_where_they_may_be(tmp_path: Path) -> None:
    def refuses_one(server: NativeGrpcFront, call_id: int, before: int) -> None:
        server.respond(call_id, OVER_LIMIT if before in (20, 80) else OK)

    with front(tmp_path / "grpc.sock", refuses_one) as target:
        with (
            Paced(target, requests(1), connections=1) as load,
            pytest.raises(LoadError, match="1 of 52 calls were not answered OK"),
        ):
            load.run(1_000, 0.05)
        with Paced(target, requests(1), connections=1, some_are_refused=True) as load:
            assert load.run(1_000, 0.05).calls == 50


def test_a_server_that_answers_no_more_gives_no_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def falls_silent(server: NativeGrpcFront, call_id: int, before: int) -> None:
        if before < 50:
            server.respond(call_id, OK)

    monkeypatch.setattr("bench.pace.STALL_S", 0.1)
    with (
        front(tmp_path / "grpc.sock", falls_silent) as target,
        Paced(target, requests(1), connections=1) as load,
        pytest.raises(LoadError, match=r"no answer for 0.1 s with \d+ calls in flight"),
    ):
        load.run(1_000, 0.1)


def test_a_pause_between_calls_is_no_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.pace.STALL_S", 0.1)
    with front(tmp_path / "grpc.sock") as target, Paced(target, requests(1), connections=1) as load:
        assert load.run(4, 0.75).calls == 3


@pytest.mark.parametrize(
    ("way", "said"),
    [
        (socket.SHUT_RD, r"the server closed a connection with \d+ calls in flight"),
        (socket.SHUT_WR, r"a connection broke with \d+ calls in flight: .*Broken pipe"),
    ],
)
def test_a_connection_that_ends_gives_no_figures(tmp_path: Path, way: int, said: str) -> None:
    sockets: list[socket.socket] = []

    class Kept(Target):
        def connect(self) -> socket.socket:
            sockets.append(super().connect())
            return sockets[-1]

    # Before the only call: what ends the load is the end of this call's way out, or of its answer's way back.
    calls = Eventful(requests(300), at=PRIMING, happens=lambda: sockets[0].shutdown(way))
    with (
        front(tmp_path / "grpc.sock") as target,
        Paced(Kept(target.address), calls, connections=1) as load,
        pytest.raises(LoadError, match=said),
    ):
        load.run(1_000, 0.001)


def test_a_percentile_is_a_value_that_so_many_do_not_exceed() -> None:
    thousand = range(1, 1001)
    assert [percentile(thousand, per_mille) for per_mille in (500, 990, 999)] == [500, 990, 999]
    assert [percentile([1, 2, 3], per_mille) for per_mille in (500, 990, 999)] == [2, 3, 3]
    assert percentile([7], 500) == 7
