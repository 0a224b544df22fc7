"""Requests as users send them: the edge, new requests, and new combinations of known descriptors."""

from __future__ import annotations

from collections import Counter
from itertools import count, islice
from pathlib import Path
from random import Random

import pytest

from bench import edge, workload
from bench.connection import FRAME_HEADER_BYTES, GRPC_PREFIX_BYTES
from bench.instructions import TRAFFIC
from bench.measure import PrebuiltCalls
from bench.scenarios import COLD, EDGE, LONE, PACED, TRACED, embedded, of_peer
from ratelimit_rls.core.model import Descriptor, Entry, Plan, Request
from ratelimit_rls.core.plan import Planner, Policy
from ratelimit_rls.protos.messages import RateLimitRequest
from ratelimit_rls.rules.compile import compile_documents

CALLS = 5_000
Entries = tuple[tuple[str, str], ...]


def read(frame: bytes) -> tuple[str, tuple[Entries, ...]]:
    """Return the domain and the descriptors of a DATA frame."""
    message = RateLimitRequest.FromString(frame[FRAME_HEADER_BYTES + GRPC_PREFIX_BYTES :])
    descriptors = tuple(tuple((entry.key, entry.value) for entry in one.entries) for one in message.descriptors)
    return message.domain, descriptors


def plans(root: Path, frames: list[bytes]) -> list[Plan]:
    rules = {path.name: path.read_bytes() for path in root.rglob("*.yaml")}
    planner = Planner(compile_documents(rules).tree, Policy())
    requests = [
        Request(domain, tuple(Descriptor(tuple(Entry(*entry) for entry in one)) for one in descriptors))
        for domain, descriptors in map(read, frames)
    ]
    return [planner.plan(request) for request in requests]


@pytest.mark.parametrize("of_database", [False, True])
def test_every_descriptor_of_the_edge_has_a_limit(tmp_path: Path, of_database: bool) -> None:
    edge.write_rules(tmp_path, of_database=of_database)
    for plan in plans(tmp_path, [*islice(edge.calls(1), CALLS)]):
        assert len(plan.keys) == edge.DESCRIPTORS


def test_requests_of_the_edge_are_hardly_ever_repeated_and_have_many_lengths() -> None:
    frames = [*islice(edge.calls(1), CALLS)]
    assert len({*frames}) > 0.99 * CALLS
    assert len({len(frame) for frame in frames}) > 50
    paths = [dict(descriptors[1])["path"] for _, descriptors in map(read, frames)]
    assert 0.3 < sum(path.startswith("/v1/") for path in paths) / CALLS < 0.7
    assert frames == [*islice(edge.calls(1), CALLS)]
    assert frames != [*islice(edge.calls(2), CALLS)]


def test_a_fifth_of_the_users_make_three_quarters_of_the_calls() -> None:
    random = Random(1)
    ranks = Counter(edge.drawn_rank(random.random(), edge.USERS) for _ in range(100_000))
    active = sum(calls for rank, calls in ranks.items() if rank < edge.USERS // 5)
    assert active / 100_000 == pytest.approx(0.75, abs=0.01)
    assert sum(calls == 1 for calls in ranks.values()) > len(ranks) / 2
    assert edge.drawn_rank(0.0, edge.USERS) == 0
    assert edge.drawn_rank(1.0, edge.USERS) == edge.USERS - 1


@pytest.mark.parametrize("descriptors", [2, 5])
def test_cold_requests_have_new_values_of_many_lengths(tmp_path: Path, descriptors: int) -> None:
    workload.write_rules(tmp_path)
    frames = [*islice(workload.cold(count(10**9), descriptors), CALLS)]
    values = [dict(one)[workload.LIMITED_BY[0]] for _, (one, *_) in map(read, frames)]
    assert len({*values}) == CALLS
    assert len({len(value) for value in values}) > 20
    assert {len(plan.keys) for plan in plans(tmp_path, frames)} == {descriptors}


def test_mixed_requests_combine_known_descriptors(tmp_path: Path) -> None:
    workload.write_rules(tmp_path)
    frames = [*islice(workload.mixed(1, 5), CALLS)]
    requests = [descriptors for _, descriptors in map(read, frames)]
    assert len({*requests}) == CALLS
    for index in range(5):
        assert len({request[index] for request in requests}) == workload.MIXED_VALUES
    assert {len(plan.keys) for plan in plans(tmp_path, frames)} == {5}


@pytest.mark.parametrize("name", TRAFFIC)
def test_traffic_of_pairs_and_instructions_has_a_limit_for_every_descriptor(tmp_path: Path, name: str) -> None:
    TRAFFIC[name].write_rules(tmp_path)
    frames = [*islice(TRAFFIC[name].calls(), 100)]
    descriptors = [len(one) for _, one in map(read, frames)]
    assert [len(plan.keys) for plan in plans(tmp_path, frames)] == descriptors
    assert min(descriptors) >= 2


def test_varied_texts_are_unique() -> None:
    assert len({workload.varied_text(number) for number in range(100_000)}) == 100_000


def test_prebuilt_calls_are_sent_in_order_before_others() -> None:
    calls = PrebuiltCalls(bytes([number]) for number in range(10))
    calls.build(3)
    calls.build(2)  # there are three already
    assert [*calls] == [bytes([number]) for number in range(10)]


def test_timed_scenarios_share_the_processes_of_their_traffic() -> None:
    assert LONE.deployment == PACED.deployment == EDGE.deployment == EDGE
    assert len({one.deployment for one in (EDGE, TRACED, embedded(EDGE), of_peer(EDGE), *COLD)}) == 6
