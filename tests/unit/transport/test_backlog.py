"""Backlog: fair order between connections, and bounded memory."""

from __future__ import annotations

from typing import Any

import pytest

from ratelimit_rls.protos.messages import RateLimitRequest
from ratelimit_rls.transport.grpc.backlog import (
    CALL_BYTES,
    MAX_BACKLOG_BYTES,
    MAX_CONNECTION_BYTES,
    MAX_ITERATION_WEIGHT,
    MAX_LIGHT_CALLS,
    PAUSE_BYTES,
    Backlog,
    fits_iteration,
    weight,
)

METHOD, OTHER = "ShouldRateLimit", "Check"
HEAD: Any = None
HEAVY = b"\x12\0" * 250
"""A message with this many descriptors."""


class Connection:
    decided_weight = 0
    queued_bytes = 0
    is_backlogged = False

    def pause_for_backlog(self) -> None:
        assert not self.is_backlogged
        self.is_backlogged = True

    def resume_from_backlog(self) -> None:
        assert self.is_backlogged
        self.is_backlogged = False


def calls(connection: Any, count: int, message: bytes = b"") -> list[Any]:
    return [(connection, 2 * number + 1, message, 0.0, HEAD) for number in range(count)]


@pytest.fixture
def backlog() -> Backlog[str]:
    return Backlog()


def test_iteration_is_limited_and_keeps_order(backlog: Backlog[str]) -> None:
    assert backlog.add(METHOD, calls(Connection(), 5000)) == []
    taken = [*backlog.take(MAX_ITERATION_WEIGHT)[METHOD], *backlog.take(MAX_ITERATION_WEIGHT)[METHOD]]
    assert len(taken) == 2 * MAX_ITERATION_WEIGHT
    assert [call[1] for call in taken] == [2 * number + 1 for number in range(len(taken))]
    assert backlog.count == 5000 - len(taken)


def test_quiet_connection_does_not_wait_for_busy_ones(backlog: Backlog[str]) -> None:
    busy, calm = Connection(), Connection()
    backlog.add(METHOD, calls(busy, 200, HEAVY))
    backlog.take(MAX_ITERATION_WEIGHT)
    backlog.add(METHOD, calls(calm, 3))
    assert [call[0] for call in backlog.take(MAX_ITERATION_WEIGHT)[METHOD]][:4] == [calm, calm, calm, busy]


def test_calls_of_another_method_do_not_wait(backlog: Backlog[str]) -> None:
    backlog.add(METHOD, calls(Connection(), 200, HEAVY))
    backlog.take(MAX_ITERATION_WEIGHT)
    backlog.add(OTHER, calls(Connection(), 20, bytes(1500)))
    assert len(backlog.take(MAX_ITERATION_WEIGHT)[OTHER]) == 20


def test_connections_have_equal_shares(backlog: Backlog[str]) -> None:
    heavy, light = Connection(), Connection()
    backlog.add(METHOD, calls(heavy, 200, HEAVY))
    backlog.add(METHOD, calls(light, 10_000))
    shares = {heavy: 0, light: 0}
    for _ in range(4):
        for call in backlog.take(MAX_ITERATION_WEIGHT)[METHOD]:
            shares[call[0]] += weight(call[2])  # type: ignore[index]
    assert abs(shares[heavy] - shares[light]) <= 2 * weight(HEAVY)


def test_idle_time_earns_no_credit(backlog: Backlog[str]) -> None:
    idle, busy = Connection(), Connection()
    backlog.add(METHOD, calls(busy, 10_000))
    for _ in range(2):
        backlog.take(MAX_ITERATION_WEIGHT)
    backlog.add(METHOD, calls(idle, 10_000))
    taken = backlog.take(MAX_ITERATION_WEIGHT)[METHOD]
    assert sum(call[0] is idle for call in taken) <= MAX_ITERATION_WEIGHT // 2 + 1


def test_message_heavier_than_an_iteration_is_taken_alone(backlog: Backlog[str]) -> None:
    backlog.add(METHOD, calls(Connection(), 2, b"\x12\0" * 2 * MAX_ITERATION_WEIGHT))
    assert len(backlog.take(MAX_ITERATION_WEIGHT)[METHOD]) == 1
    assert len(backlog.take(0)[METHOD]) == 1
    assert backlog.take(MAX_ITERATION_WEIGHT) == {}
    assert backlog.count == 0


LARGE = bytes(2**20 - CALL_BYTES)


def test_connection_can_fill_its_own_share_only(backlog: Backlog[str]) -> None:
    greedy = Connection()
    rejected = backlog.add(METHOD, calls(greedy, 6, LARGE))
    assert [call[1] for call in rejected] == [9, 11]
    assert backlog.add(METHOD, calls(Connection(), 4, LARGE)) == []
    while backlog.count:
        backlog.take(MAX_ITERATION_WEIGHT)
    assert greedy.queued_bytes == 0
    assert backlog.add(METHOD, calls(greedy, 4, LARGE)) == []


def test_connection_with_much_waiting_is_not_read_until_half_is_decided(backlog: Backlog[str]) -> None:
    busy, calm = Connection(), Connection()
    message = bytes(1024 - CALL_BYTES)
    backlog.add(METHOD, [*calls(busy, PAUSE_BYTES // 1024, message), *calls(calm, 1)])
    assert not busy.is_backlogged
    backlog.add(METHOD, calls(busy, 1, message))
    assert busy.is_backlogged
    assert not calm.is_backlogged
    while busy.is_backlogged:
        assert busy.queued_bytes > PAUSE_BYTES // 2
        backlog.take(1)
    assert busy.queued_bytes == PAUSE_BYTES // 2


def test_full_backlog_shrinks_the_share_of_the_connections_with_the_most(backlog: Backlog[str]) -> None:
    greedy = [Connection() for _ in range(MAX_BACKLOG_BYTES // MAX_CONNECTION_BYTES)]
    for one in greedy:
        assert backlog.add(METHOD, calls(one, 4, LARGE)) == []
    calm = Connection()
    rejected = backlog.add(METHOD, calls(calm, 10, bytes(1000)))
    assert {call[0] for call in rejected} == set(greedy)
    assert {call[1] for call in rejected} == {7}, "the last one of each"
    assert calm.queued_bytes == 10 * (1000 + CALL_BYTES)
    assert not any(one.queued_bytes > 3 * 2**20 for one in greedy)
    left = [call for _ in range(100) for taken in backlog.take(MAX_ITERATION_WEIGHT).values() for call in taken]
    assert len(left) == 4 * 3 + 10
    assert backlog.count == 0
    assert not any(one.queued_bytes for one in [*greedy, calm])


def test_memory_is_bounded_whatever_the_number_of_connections(backlog: Backlog[str]) -> None:
    connections = [Connection() for _ in range(300)]
    for one in connections:
        backlog.add(METHOD, calls(one, 200, bytes(1700)))
    kept = [one.queued_bytes for one in connections]
    assert sum(kept) <= MAX_BACKLOG_BYTES
    assert min(kept) >= MAX_BACKLOG_BYTES // 2 // len(connections)


def test_connection_does_not_pay_for_calls_that_were_rejected(backlog: Backlog[str]) -> None:
    greedy = [Connection() for _ in range(MAX_BACKLOG_BYTES // MAX_CONNECTION_BYTES)]
    for one in greedy:
        backlog.add(METHOD, calls(one, 4, LARGE))
    assert backlog.add(METHOD, calls(Connection(), 1))
    assert {one.decided_weight for one in greedy} == {3 * weight(LARGE)}


def test_connection_is_read_again_once_its_calls_were_rejected(backlog: Backlog[str]) -> None:
    rival, others = Connection(), [Connection() for _ in range(100)]
    backlog.add(METHOD, calls(rival, 1, bytes(PAUSE_BYTES)))
    assert rival.is_backlogged
    for one in others:
        backlog.add(METHOD, calls(one, 1, bytes(PAUSE_BYTES // 3)))
    assert not rival.queued_bytes
    assert not rival.is_backlogged


def test_few_small_calls_always_fit() -> None:
    ordinary = RateLimitRequest(domain="d", descriptors=[{"entries": [{"key": "k", "value": "v"}]}]).SerializeToString()
    assert fits_iteration([ordinary] * MAX_LIGHT_CALLS, 0)
    assert not fits_iteration([ordinary] * (MAX_LIGHT_CALLS + 1), 0)


@pytest.mark.parametrize("message", [b"", b"\x12\0" * 100, b"\x12\x04\x0a\x02\x12\0" * 5, bytes(5000)])
def test_calls_fit_up_to_the_total_weight(message: bytes) -> None:
    most = MAX_ITERATION_WEIGHT // weight(message)
    assert fits_iteration([message] * most, MAX_ITERATION_WEIGHT)
    assert not fits_iteration([message] * (most + 1), MAX_ITERATION_WEIGHT)


@pytest.mark.parametrize(
    ("descriptors", "entries", "least", "most"), [(1, 1, 1, 3), (2, 1, 2, 4), (5, 2, 5, 15), (256, 0, 256, 600)]
)
def test_weight_is_about_the_number_of_descriptors(descriptors: int, entries: int, least: int, most: int) -> None:
    descriptor = {"entries": [{"key": "generic_key", "value": "a value"}] * entries}
    message = RateLimitRequest(domain="domain", descriptors=[descriptor] * descriptors).SerializeToString()
    assert least <= weight(message) <= most


def test_large_messages_are_weighed_by_size() -> None:
    assert weight(bytes(2**20)) >= MAX_ITERATION_WEIGHT


@pytest.mark.parametrize("descriptor_tag", [b"\x12", b"\x92\x00", b"\x92\x80\x00"])
def test_tags_with_more_bytes_than_needed_weigh_the_same(descriptor_tag: bytes) -> None:
    assert weight(b"\x0a\x01d" + (descriptor_tag + b"\0") * 256) >= 256


def test_entries_weigh_as_descriptors_do() -> None:
    assert weight(b"\x0a\x01d\x12\x80\x10" + b"\x0a\0" * 1024) >= 1024
