"""The benchmark measures real Redis servers: memory of every kind of key, CPU, instructions, and a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from redis import Redis
from redis.cluster import RedisCluster

from bench.capacity import CASES, MEMORY, CapacityMeasurement, MemoryCase, measure_memory
from bench.connection import LoadError
from bench.redis_instructions import COMMANDS, FIXED_WINDOW, InstructionCounter, available
from bench.servers import CLUSTER_NODE_TIMEOUT_MS, Servers, redis_version

pytestmark = pytest.mark.slow


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    result = Servers(tmp_path, 0, 0)
    try:
        yield result
    finally:
        result.close()


@pytest.mark.parametrize("case", MEMORY, ids=lambda case: case.kind)
def test_memory_is_that_of_the_keys_of_the_case(case: MemoryCase, servers: Servers) -> None:
    # A penalty ends a millisecond after its violation, so a pass over the callers has to take longer.
    few = case if case.passes > 1 else replace(case, callers=100)
    measured = measure_memory(few, servers.redis())
    assert measured.keys == few.callers * few.endpoints * few.keys_each
    assert 80 <= measured.usage_bytes <= 400
    assert measured.grown_bytes > 0


def test_memory_of_missing_keys_is_an_error(servers: Servers) -> None:
    with pytest.raises(LoadError, match="5 keys instead of 10"):
        measure_memory(replace(MEMORY[0], callers=1, keys_each=2), servers.redis())


def test_redis_cpu_of_a_call_is_lower_in_a_larger_batch(servers: Servers) -> None:
    measurement = CapacityMeasurement(servers.redis())
    one, *_, most = [case for case in CASES if case.limits == 1]
    alone_us, shared_us = measurement.redis_us(one, 0.3), measurement.redis_us(most, 0.3)
    assert 0 < shared_us < alone_us


def test_cluster_has_masters_for_all_slots(servers: Servers) -> None:
    started = servers.redis_cluster(3)
    assert len({*started.pids}) == len(started.addresses) == 3
    host, _, port = started.addresses[0].partition(":")
    with RedisCluster(host, int(port)) as client:
        assert {f"{node.host}:{node.port}" for node in client.get_primaries()} == {*started.addresses}
    with Redis.from_url(f"redis://{started.addresses[0]}") as client:
        assert client.config_get("cluster-node-timeout") == {"cluster-node-timeout": str(CLUSTER_NODE_TIMEOUT_MS)}


def test_version_of_the_measured_redis_is_known() -> None:
    assert any(character.isdigit() for character in redis_version())


@pytest.mark.timeout(600)
@pytest.mark.skipif(not available(), reason="valgrind is not installed")
def test_instructions_of_commands_and_of_the_script_are_counted(tmp_path: Path) -> None:
    counted = dict(InstructionCounter(tmp_path, None).count([*COMMANDS, FIXED_WINDOW]))
    one, two = (counted[case].instructions for case in COMMANDS)
    assert 5_000 < one < two < 3 * one
    assert counted[FIXED_WINDOW].calls_per_run == pytest.approx(1.0)
