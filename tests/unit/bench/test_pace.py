"""The open-loop load sends each call once when it is due, and measures latency from then."""

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
from bench.latency import Latencies, percentile
from bench.pace import PacedLoad
from ratelimit_rls.protos.messages import RateLimitResponse

OK = RateLimitResponse(overall_code=RateLimitResponse.OK).SerializeToString()
OVER_LIMIT = RateLimitResponse(overall_code=RateLimitResponse.OVER_LIMIT).SerializeToString()
PRIMING = 2  # calls on each connection before the first due call

Seen = list[tuple[float, bytes]]
Answer = Callable[[NativeGrpcFront, int, int], None]
"""Reaction to a call: gets the server, the id of the call and the number of earlier calls."""


def request(number: int) -> bytes:
    return wire.rate_limit_request("pace", [[("number", str(number))]])


def requests(count: int) -> list[bytes]:
    return [wire.data(request(number)) for number in range(count)]


class Eventful(list[bytes]):
    """Calls, one of which triggers an action when it is about to be sent."""

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
def front(path: Path, answer: Answer = ok, seen: Seen | None = None, max_streams: int = 1024) -> Iterator[Target]:
    """A real gRPC server that records requests with their times and handles one call at a time."""
    noted = [] if seen is None else seen
    server = NativeGrpcFront(
        f"unix:{path}", [(wire.METHOD, False)], io_threads=1, call_details=True, max_concurrent_streams=max_streams
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


def test_every_call_is_sent_and_answered_once(tmp_path: Path) -> None:
    seen: Seen = []
    calls = requests(2 * PRIMING + 300)
    with front(tmp_path / "grpc.sock", seen=seen) as target, PacedLoad(target, calls, connections=2) as load:
        one, two = load.run(1_000, 0.1), load.run(1_000, 0.2)
    assert (one.calls, two.calls) == (100, 200)
    assert Counter(message for _, message in seen) == Counter(request(number) for number in range(len(calls)))
    for latencies in (one, two):
        assert 0 < latencies.p50_us <= latencies.p95_us <= latencies.p99_us <= latencies.p99_9_us <= latencies.max_us


def test_tally_counts_reads_and_keeps_samples_of_this_run(tmp_path: Path) -> None:
    calls = iter(requests(4 * PRIMING + 400))
    with front(tmp_path / "grpc.sock") as target, PacedLoad(target, calls, connections=2) as load:
        first, second = load.tally(1_000, 0.1), load.tally(1_000, 0.2)
        assert load.answered == 2 * PRIMING + 300
        assert {*load.samples} == {OK}
    assert (first.calls, second.calls) == (100, 200)
    assert second.seconds == pytest.approx(0.2, abs=0.1)
    assert 0 < second.reads <= 200
    assert second.latencies is not None
    assert second.latencies.calls == 200


def test_calls_are_distributed_over_all_targets(tmp_path: Path) -> None:
    seen: tuple[Seen, Seen] = ([], [])
    with (
        front(tmp_path / "one.sock", seen=seen[0]) as one,
        front(tmp_path / "other.sock", seen=seen[1]) as other,
        PacedLoad((one, other), requests(1), connections=2) as load,
    ):
        assert load.run(1_000, 0.1).calls == 100
    assert [len(each) - PRIMING for each in seen] == [50, 50]


def test_calls_are_sent_at_the_requested_rate(tmp_path: Path) -> None:
    seen: Seen = []
    with front(tmp_path / "grpc.sock", seen=seen) as target, PacedLoad(target, requests(1)) as load:
        before = time.perf_counter()
        latencies = load.run(500, 0.3)
    sent = sorted(at for at, _ in seen)[4 * PRIMING :]
    assert len(sent) == 150
    assert all(at >= before + number / 500 for number, at in enumerate(sent)), "a call came before it was due"
    assert 0 < latencies.per_s <= 500


@pytest.mark.parametrize("max_streams", [1, 1024])
def test_stalled_server_is_charged_for_all_due_calls(tmp_path: Path, max_streams: int) -> None:
    def stalls_once(server: NativeGrpcFront, call_id: int, before: int) -> None:
        if before == 50:
            time.sleep(0.2)
        server.respond(call_id, OK)

    with (
        front(tmp_path / "grpc.sock", stalls_once, max_streams=max_streams) as target,
        PacedLoad(target, requests(1), connections=2) as load,
    ):
        latencies = load.run(1_000, 0.3)
    # 200 of the 300 calls are due while it sleeps; with one stream per connection at most two are in flight.
    assert latencies.max_us >= 200_000
    assert latencies.p99_us >= 190_000
    assert latencies.p50_us >= 40_000


def test_calls_sent_late_by_the_load_are_reported(tmp_path: Path) -> None:
    calls = Eventful(requests(300), at=PRIMING + 50, happens=lambda: time.sleep(0.1))
    with front(tmp_path / "grpc.sock") as target, PacedLoad(target, calls, connections=1) as load:
        latencies = load.run(1_000, 0.2)
    assert latencies.late_share >= 0.45
    assert latencies.max_us >= 100_000


def test_out_of_order_responses_are_matched_to_their_calls(tmp_path: Path) -> None:
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
        PacedLoad(target, requests(1), connections=1) as load,
    ):
        latencies = load.run(500, 0.2)
    assert latencies.calls == 100
    assert latencies.max_us >= 150_000


def test_calls_beyond_max_streams_are_sent_later(tmp_path: Path) -> None:
    seen: Seen = []
    messages = [wire.rate_limit_request(f"{number:012000}", []) for number in range(PRIMING + 500)]
    with (
        front(tmp_path / "grpc.sock", seen=seen) as target,
        PacedLoad(target, [wire.data(message) for message in messages], connections=1) as load,
    ):
        assert load.run(100_000, 0.005).calls == 500
    assert Counter(message for _, message in seen) == Counter(messages)


def test_fragmented_response_counts_once(tmp_path: Path) -> None:
    class Dribbling(socket.socket):
        def recv(self, size: int, flags: int = 0) -> bytes:
            return super().recv(min(size, 7), flags)

    class InPieces(Target):
        def connect(self) -> socket.socket:
            plain = Dribbling(socket.AF_UNIX, socket.SOCK_STREAM)
            plain.connect(self.address)
            return plain

    with (
        front(tmp_path / "grpc.sock") as target,
        PacedLoad(InPieces(target.address), requests(1), connections=1) as load,
    ):
        assert load.run(1_000, 0.05).calls == 50


def test_no_figures_if_a_call_fails(tmp_path: Path) -> None:
    def fails_later(server: NativeGrpcFront, call_id: int, before: int) -> None:
        if before < 50:
            server.respond(call_id, OK)
        else:
            server.fail(call_id, 14, "no")

    with (
        front(tmp_path / "grpc.sock", fails_later) as target,
        PacedLoad(target, requests(1)) as load,
        pytest.raises(LoadError, match=r"a call failed: .*grpc-status: 14, grpc-message: no"),
    ):
        load.run(1_000, 0.2)


def test_non_ok_responses_are_accepted_only_where_expected(tmp_path: Path) -> None:
    def denies_one(server: NativeGrpcFront, call_id: int, before: int) -> None:
        server.respond(call_id, OVER_LIMIT if before in (20, 80) else OK)

    with front(tmp_path / "grpc.sock", denies_one) as target:
        with (
            PacedLoad(target, requests(1), connections=1) as load,
            pytest.raises(LoadError, match="1 of 52 calls were not answered OK"),
        ):
            load.run(1_000, 0.05)
        with PacedLoad(target, requests(1), connections=1, some_are_denied=True) as load:
            assert load.run(1_000, 0.05).calls == 50


def test_no_figures_if_the_server_stops_responding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def falls_silent(server: NativeGrpcFront, call_id: int, before: int) -> None:
        if before < 50:
            server.respond(call_id, OK)

    monkeypatch.setattr("bench.pace.STALL_S", 0.1)
    with (
        front(tmp_path / "grpc.sock", falls_silent) as target,
        PacedLoad(target, requests(1), connections=1) as load,
        pytest.raises(LoadError, match=r"no answer for 0.1 s with \d+ calls in flight"),
    ):
        load.run(1_000, 0.1)


def test_pause_between_calls_is_not_a_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.pace.STALL_S", 0.1)
    with front(tmp_path / "grpc.sock") as target, PacedLoad(target, requests(1), connections=1) as load:
        assert load.run(4, 0.75).calls == 3


@pytest.mark.parametrize(
    ("way", "said"),
    [
        (socket.SHUT_RD, r"the server closed a connection with \d+ calls in flight"),
        (socket.SHUT_WR, r"a connection broke with \d+ calls in flight: .*Broken pipe"),
    ],
)
def test_no_figures_if_a_connection_is_closed(tmp_path: Path, way: int, said: str) -> None:
    sockets: list[socket.socket] = []

    class Kept(Target):
        def connect(self) -> socket.socket:
            sockets.append(super().connect())
            return sockets[-1]

    # Before the only call: either its request or its response is cut off.
    calls = Eventful(requests(300), at=PRIMING, happens=lambda: sockets[0].shutdown(way))
    with (
        front(tmp_path / "grpc.sock") as target,
        PacedLoad(Kept(target.address), calls, connections=1) as load,
        pytest.raises(LoadError, match=said),
    ):
        load.run(1_000, 0.001)


def test_distribution_of_latencies_has_four_percentiles() -> None:
    result = Latencies.of([number / 1e6 for number in reversed(range(1, 1001))], per_s=5.0)
    assert result.percentiles_us == pytest.approx({"p50": 500, "p95": 950, "p99": 990, "p99.9": 999})
    assert (result.calls, result.max_us) == (1000, pytest.approx(1000))
    assert str(result) == "p50 0.50 ms, p95 0.95, p99 0.99, p99.9 1.00"


def test_percentile_is_an_observed_value() -> None:
    thousand = range(1, 1001)
    assert [percentile(thousand, per_mille) for per_mille in (500, 990, 999)] == [500, 990, 999]
    assert [percentile([1, 2, 3], per_mille) for per_mille in (500, 990, 999)] == [2, 3, 3]
    assert percentile([7], 500) == 7
