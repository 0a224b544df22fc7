"""The load generator sends valid messages and counts only OK responses."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hpack import Decoder, Encoder
from pygrpc_native import EVENT_CALL, NativeGrpcFront

from bench import wire, workload
from bench.blocks import HeaderBlockReader
from bench.connection import LoadError, Target
from bench.load import Load
from ratelimit_rls.protos.messages import RateLimitRequest, RateLimitResponse

OK = RateLimitResponse(overall_code=RateLimitResponse.OK).SerializeToString()
OVER_LIMIT = RateLimitResponse(overall_code=RateLimitResponse.OVER_LIMIT).SerializeToString()


@contextmanager
def front(path: Path, answer: bytes, observed: list[bytes], fails_after: int = 10**9) -> Iterator[Target]:
    """A real gRPC server that records its requests."""
    server = NativeGrpcFront(f"unix:{path}", [(wire.METHOD, False)], io_threads=1, call_details=True)
    server.start()

    def dispatch() -> None:
        while (events := server.recv_batch_details(64)) is not None:
            for kind, call_id, _, message, _, details in events:
                if kind != EVENT_CALL or message is None or details is None:
                    continue
                assert details[2] is not None and 4 < details[2] <= 5  # noqa: PT018
                observed.append(message)
                if len(observed) > fails_after:
                    server.fail(call_id, 14, "no")
                else:
                    server.respond(call_id, answer)

    thread = threading.Thread(target=dispatch)
    thread.start()
    try:
        yield Target(str(path))
    finally:
        server.close()
        thread.join()


def test_handwritten_request_is_valid_protobuf() -> None:
    read = RateLimitRequest.FromString(workload.request(4321, 5))
    assert read.domain == workload.DOMAIN
    assert [[(entry.key, entry.value) for entry in one.entries] for one in read.descriptors] == [
        [("tenant", "tenant-21"), (key, f"{key}-004321")] for key in workload.LIMITED_BY
    ]


def test_later_header_blocks_decode_to_the_same_headers() -> None:
    decoder = Decoder()
    first, later = wire.header_blocks("https", "ratelimit", "20m")
    headers = [(str(name), str(value)) for name, value in decoder.decode(first)]
    assert ("grpc-timeout", "20m") in headers
    assert (":path", wire.METHOD) in headers
    assert [(str(name), str(value)) for name, value in decoder.decode(later)] == headers
    assert [(str(name), str(value)) for name, value in decoder.decode(later)] == headers


@pytest.mark.parametrize("huffman", [True, False])
def test_trailers_are_ok_only_with_grpc_status_0(huffman: bool) -> None:
    encoder, blocks = Encoder(), HeaderBlockReader()
    initial = [(":status", "200"), ("content-type", "application/grpc")]
    for status in ("0", "14", "0", "0", "14"):
        assert not blocks.read(encoder.encode(initial, huffman=huffman))
        assert blocks.read(encoder.encode([("grpc-status", status)], huffman=huffman)) == (status == "0")
    assert blocks.known_ok == {encoder.encode([("grpc-status", "0")], huffman=huffman)}
    assert encoder.encode([("grpc-status", "14")], huffman=huffman) in blocks.known


def test_cached_blocks_are_dropped_when_the_table_changes() -> None:
    encoder, blocks = Encoder(), HeaderBlockReader()
    for _ in range(2):
        blocks.read(encoder.encode([("grpc-status", "0")]))
    assert blocks.known_ok
    blocks.read(encoder.encode([("grpc-message", "another entry moves the first one")]))
    assert not blocks.known_ok


def test_every_request_is_sent_and_answered_once(tmp_path: Path) -> None:
    observed: list[bytes] = []
    calls = workload.requests(2, 500)
    with (
        front(tmp_path / "grpc.sock", OK, observed) as target,
        Load(target, calls, in_flight=16, connections=2) as load,
    ):
        tally = load.run(0, at_least_calls=2_000)
        answered = load.drain()
        assert load.samples == [OK] * 4
    assert tally.calls >= 2_000
    assert answered == len(observed)
    times = Counter(observed)
    assert set(times) == {workload.request(number, 2) for number in range(500)}
    assert max(times.values()) - min(times.values()) <= 1


def test_every_target_gets_its_share_and_latencies_are_measured(tmp_path: Path) -> None:
    seen: list[list[bytes]] = [[], []]
    calls = workload.requests(1, 100)
    with (
        front(tmp_path / "one.sock", OK, seen[0]) as one,
        front(tmp_path / "other.sock", OK, seen[1]) as other,
        Load((one, other), calls, in_flight=4, connections=4, timed=True) as load,
    ):
        first = load.run(0, at_least_calls=100)
        tally = load.run(0, at_least_calls=1_000)
        load.drain()
    assert all(seen)
    assert first.latencies is not None
    assert tally.latencies is not None
    assert tally.latencies.calls == tally.calls
    assert 0 < tally.latencies.p50_us <= tally.latencies.p95_us <= tally.latencies.max_us


def test_latencies_are_measured_only_if_requested(tmp_path: Path) -> None:
    with front(tmp_path / "grpc.sock", OK, []) as target, Load(target, workload.requests(1, 1)) as load:
        assert load.run(0, at_least_calls=100).latencies is None
        load.drain()


def test_no_figures_if_responses_are_not_ok(tmp_path: Path) -> None:
    with front(tmp_path / "grpc.sock", OVER_LIMIT, []) as target, Load(target, workload.requests(1, 1)) as load:
        load.run(0, at_least_calls=100)
        with pytest.raises(LoadError, match="were not answered OK"):
            load.drain()


def test_no_figures_if_a_call_fails(tmp_path: Path) -> None:
    with (
        front(tmp_path / "grpc.sock", OK, [], fails_after=50) as target,
        Load(target, workload.requests(1, 1), in_flight=8, connections=1) as load,
        pytest.raises(LoadError, match=r"a call failed: .*grpc-status: 14, grpc-message: no"),
    ):
        load.run(0, at_least_calls=1_000)


@pytest.mark.slow
def test_quick_run_prints_scenarios_and_targets() -> None:
    run = subprocess.run([sys.executable, "-m", "bench", "--quick"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    for line in ("echo-native ", "embedded-2 ", "redis-2 ", "redis, 2 descriptors ÷ bare echo: "):
        assert line in run.stdout
    *_, last = run.stdout.splitlines()
    picture = Path(last.removeprefix("A picture: "))
    assert "redis-2: service " in picture.read_text()
    assert picture.with_suffix(".json").exists()
