"""Instructions and capacity are reported beside what they are compared with; a fleet shares processes and rules."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from bench import capacity, cpu, redis_instructions
from bench.capacity import KeyMemory
from bench.fleet import Fleet
from bench.redis_instructions import COMMANDS, OURS, TWO_FIXED_WINDOWS, Counted
from bench.scenarios import (
    CLUSTER,
    CLUSTER_BY_DOMAIN,
    CLUSTER_BY_TENANT,
    FLEET,
    REDIS_2,
    TOKEN_BUCKET_AND_DAY,
    Scenario,
    of_peer,
)
from bench.servers import LOOPBACK, Started
from bench.workload import DOMAIN, SUBDIRECTORY, write_rules
from ratelimit_rls.core.model import Algorithm, Descriptor, Entry, Request
from ratelimit_rls.core.plan import Planner, Policy
from ratelimit_rls.rules.compile import compile_documents
from tests.unit.bench.sample_results import ONE


def test_instructions_are_compared_with_the_commands_for_as_many_limits() -> None:
    one, two = COMMANDS
    batch = OURS[-1]
    counted = {
        TWO_FIXED_WINDOWS: Counted(150_000, 1.0),
        batch: Counted(75_000, 8.0),
        one: Counted(13_000, 0.0),
        two: Counted(25_000, 0.0),
    }
    assert redis_instructions.table(counted) == [
        "instructions-2-fixed_window: 150,000 instructions of Redis a call, 6.00 × INCRBY and EXPIRE, "
        "1.0 calls a script run",
        "instructions-2-fixed_window-8-calls: 75,000 instructions of Redis a call, 3.00 × INCRBY and EXPIRE, "
        "8.0 calls a script run",
        "instructions-1-incrby-expire: 13,000 instructions of Redis a call, 1.00 × INCRBY and EXPIRE",
        "instructions-2-incrby-expire: 25,000 instructions of Redis a call, 1.00 × INCRBY and EXPIRE",
    ]


def test_capacity_of_a_core_is_that_of_the_median_round() -> None:
    (case,) = [one for one in capacity.CASES if one.name == "capacity-2-fixed_window-16-in-batch"]
    assert capacity.cpu_table({case: [10.0, 40.0, 20.0]}) == [
        "capacity-2-fixed_window-16-in-batch: 20.0 (10.0..40.0) µs of Redis a call, 50,000 calls/s a core"
    ]


def test_memory_is_compared_with_the_expected_sizes() -> None:
    gcra = next(one for one in capacity.MEMORY if one.kind == "gcra")
    measured = {
        gcra: KeyMemory(50_000, 120, 9_000_000),
        capacity.ORGANISATIONS: KeyMemory(20_000, 101, 1_900_000),
        capacity.PENALTIES: KeyMemory(1_000, 200, 400_000),
    }
    assert capacity.memory_table(measured) == [
        "capacity-memory-gcra: 50,000 keys, MEMORY USAGE 120 bytes each, 180 with its share of the tables"
        " (at most 150: met)",
        "capacity-memory-organisations: 20,000 keys, MEMORY USAGE 101 bytes each, 95 with its share of the tables"
        " (at most 100: MISSED)",
        "capacity-memory-violations: 1,000 keys, MEMORY USAGE 200 bytes each (at most 450: met)",
        "10,000 organisations: 1.9 MB (at most 2 MB: met)",
        "10,000 clients × 5 endpoints, 1,000 with penalties, gcra: 9.2 MB (at most 8 MB: MISSED)",
    ]


def test_batch_size_counts_script_runs_and_not_the_commands_within_them() -> None:
    assert replace(ONE, redis_commands={"fcall": 0.25, "mget": 0.25, "set": 2}).calls_per_command == 4
    assert replace(ONE, redis_commands={"incrby": 2, "expire": 2}).calls_per_command == 0.25
    assert ONE.calls_per_command == 0


def test_cpu_of_each_redis_is_subtracted_separately() -> None:
    before = cpu.CpuSample(0, 3, 0, 0, 0, 0, (), (1, 2))
    after = cpu.CpuSample(0, 10, 0, 0, 0, 0, (), (6, 4))
    assert (after - before).redis_each_s == (5, 2)


def test_scenarios_of_a_fleet_share_processes_and_others_do_not() -> None:
    assert len({one.deployment for one in FLEET}) == len({one.descriptors for one in FLEET})
    assert len({one.deployment for one in (*CLUSTER, *CLUSTER_BY_DOMAIN, REDIS_2)}) == 7


def test_every_process_of_a_fleet_is_started_and_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def start_server(_fleet: Fleet, name: str, _scenario: Scenario, _more: dict[str, str]) -> Started:
        names.append(name)
        return Started(os.getpid(), (LOOPBACK, len(names)), 0.1)

    monkeypatch.setattr(Fleet, "_start_server", start_server)
    fleet = Fleet(tmp_path, max_keys=30, peer=None)
    running = [fleet.running(one) for one in FLEET[:2]]  # the same, with different numbers of calls in flight
    assert running[0] is running[1]
    assert names == ["redis-1-fleet", *(f"redis-1-fleet-{number}" for number in range(2, 9))]
    assert [target.address for target in running[0].targets] == [(LOOPBACK, number) for number in range(1, 9)]
    assert len(running[0].pids) == 8


def planned(rules: Scenario, tmp_path: Path) -> tuple[bytes, ...]:
    write_rules(tmp_path, rules.rules)
    text = (tmp_path / SUBDIRECTORY / "config" / "bench.yaml").read_bytes()
    planner = Planner(compile_documents({"bench.yaml": text}).tree, Policy())
    entries = (Entry("tenant", "tenant-01"), Entry("user", "user-000001"))
    return planner.plan(Request(DOMAIN, (Descriptor(entries),), 1)).keys


def test_token_bucket_and_daily_limit_are_two_limits_on_one_descriptor(tmp_path: Path) -> None:
    bucket, day = planned(TOKEN_BUCKET_AND_DAY, tmp_path)
    assert bucket.endswith(b":%s:60" % Algorithm.TOKEN_BUCKET.value.encode())
    assert b":fixed_window:day" in day


def test_domain_or_tenant_of_a_co_located_cluster_is_the_slot(tmp_path: Path) -> None:
    assert planned(CLUSTER[0], tmp_path)[0].startswith(b"rl:{bench/")
    assert planned(CLUSTER_BY_DOMAIN[0], tmp_path)[0].startswith(b"rl:{bench}/")
    assert planned(CLUSTER_BY_TENANT[0], tmp_path)[0].startswith(b"rl:{bench/tenant=tenant-01}/")


def test_peer_has_the_same_rules_and_load() -> None:
    for one in (*FLEET, *CLUSTER):
        assert replace(of_peer(one), server=one.server) == one
