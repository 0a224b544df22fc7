"""A Redis Cluster under load: slots move, a node joins and gets some, a master dies and its replica takes over.

Calls have one descriptor, or three on three nodes. With `local` no caller sees an error, and limits are exceeded only
by hits that a dead master accepted and its replica never saw, and by the share of `local`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest

from ratelimit_rls.core.model import Code
from tests.support.admission_audit import audit_admissions
from tests.support.grpc_client import rate_limit_request
from tests.support.open_loop_clients import OpenLoopClients
from tests.support.redis_servers import RedisCluster, wait_until
from tests.support.servers import RedisServer, redis_binaries
from tests.support.service_process import ServiceProcess

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]

LIMIT = 800
REPLICAS = 40
SHARE = -(-LIMIT // REPLICAS)
"""Hits of a limit that `local` admits in this process, which is the only one."""

PER_SECOND = 300
DEADLINE_S = 3.0
MARGIN = "2600ms"
"""Margin before the deadline. It is large because the machine may be busy, and the scheduler is not under test."""

BACK_WITHIN_S = 1.5
"""A second, plus half a second for a busy machine."""

RULES = f"""
domain: edge
charge: admitted
on_store_failure: POLICY
descriptors:
  - key: tight
    rate_limit: {{unit: year, requests_per_unit: {LIMIT}}}
  - key: wide
    rate_limit: {{unit: year, requests_per_unit: {10 * LIMIT}}}
"""


class CallKind(NamedTuple):
    """A kind of call: one of its descriptors has a tight limit, which denies first."""

    descriptors: tuple[tuple[str, str], ...]

    @property
    def message(self) -> bytes:
        return bytes(rate_limit_request("edge", *({key: value} for key, value in self.descriptors)))

    @property
    def tight(self) -> int:
        return next(number for number, (key, _) in enumerate(self.descriptors) if key == "tight")

    @property
    def slot(self) -> int:
        """Return the cluster slot of the tight descriptor."""
        return _slot(*self.descriptors[self.tight])

    def counted(self, cluster: RedisCluster) -> int:
        key, value = self.descriptors[self.tight]
        return int(cluster.owner(self.slot).cli("GET", f"rl:{{edge/{key}={value}}}:fixed_window:31536000") or 0) >> 16


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[RedisCluster]:
    with RedisCluster(redis_binaries().get(request.param), replicas=1) as cluster:
        yield cluster


def service_on(cluster: RedisCluster, directory: Path, policy: str) -> ServiceProcess:
    rules = directory / "rules.yaml"
    rules.write_text(RULES.replace("POLICY", policy))
    return ServiceProcess(
        {
            "RLS_RULES": rules,
            "REDIS_TYPE": "CLUSTER",
            "REDIS_URL": cluster.url,
            "RLS_REPLICAS": REPLICAS,
            "RLS_DEADLINE_MARGIN": MARGIN,
        }
    )


def calls_for(cluster: RedisCluster) -> list[CallKind]:
    """Return three kinds per master, and three over all of them, each with its tight descriptor on another master."""
    values = map(str, itertools.count())
    masters = [cluster.owner(slot) for slot in (0, 8000, 16000)]

    def on(master: RedisServer, key: str) -> tuple[str, str]:
        return key, next(value for value in values if cluster.owner(_slot(key, value)) is master)

    one_each = [CallKind((on(master, "tight"),)) for master in masters * 3]
    over_all = [
        CallKind(tuple(on(master, "tight" if master is tightest else "wide") for master in masters))
        for tightest in masters
    ]
    return [*one_each, *over_all]


def _slot(key: str, value: str) -> int:
    return RedisCluster.slot_of(f"{{edge/{key}={value}}}")


@pytest.mark.parametrize("cluster", ["redis-6.2"], indirect=True)
def test_resharding_and_failover_fail_no_call_and_exceed_no_limit(cluster: RedisCluster, tmp_path: Path) -> None:
    calls = calls_for(cluster)
    messages = [kind.message for kind in calls]
    with (
        service_on(cluster, tmp_path, "local") as service,
        OpenLoopClients(service.grpc_address, messages, per_second=PER_SECOND, timeout_s=DEADLINE_S) as load,
    ):
        figures = _CallFigures(service, load)
        time.sleep(0.5)
        figures.report("before")
        for kind in (calls[0], calls[4], calls[9], calls[10]):
            owner = cluster.owner(kind.slot)
            move_slowly(cluster, kind.slot, next(node for node in cluster.nodes[:3] if node is not owner))
        assert figures.report("four slots moved") == 0
        guest = cluster.add_node()
        for kind in (calls[1], calls[11]):
            move_slowly(cluster, kind.slot, guest)
        assert figures.report("a node joined and got two") == 0
        assert guest.script_runs() > 0

        victim = cluster.owner(calls[3].slot)
        on_victim = [cluster.owner(kind.slot) is victim for kind in calls]
        down_s = time.monotonic()
        cluster.kill(victim)
        heir = wait_for_heir(cluster, calls[3].slot, victim)
        taken_over_s = time.monotonic()
        wait_until(lambda: heir.script_runs() > 1, "the service counts on the heir")
        back_s = time.monotonic()
        service.wait_for_log("store_fallback_ended")
        figures.report("a master died")
        assert min(LIMIT - kind.counted(cluster) for kind in calls) >= SHARE, "it has taken too long"
        load.use_up()

        outcomes = [
            audit_admissions((call for call in load.calls if call.message == number), LIMIT, SHARE, kind.tight)
            for number, kind in enumerate(calls)
        ]
        print(
            f"a replica took over after {taken_over_s - down_s:.1f} s and was counted on {back_s - taken_over_s:.2f} s "
            f"later; limits of {LIMIT} with a share of {SHARE}, admitted / unknown to the heir / counted but unheard:\n"
            + ", ".join(f"{admitted}/{twice}/{unheard}" for admitted, twice, unheard in outcomes)
        )
        assert set(load.outcomes) == {Code.OK, Code.OVER_LIMIT}, "some calls failed, or were not answered in time"
        assert back_s - taken_over_s < BACK_WITHIN_S
        assert [kind.counted(cluster) for kind in calls] == [LIMIT] * len(calls)
        for (admitted, twice, unheard), had_an_heir in zip(outcomes, on_victim, strict=True):
            assert admitted <= LIMIT + twice + SHARE
            assert admitted >= LIMIT + twice - unheard
            assert twice == 0 or had_an_heir, "a slot that moves takes its hits along"
        assert service.healthcheck().status == 200
        # A few log lines per node and event, however long it takes.
        assert len(service.log().splitlines()) <= 25, service.log()


@pytest.mark.parametrize("cluster", ["valkey-9"], indirect=True)
def test_calls_fail_only_briefly_when_a_cluster_master_dies(cluster: RedisCluster, tmp_path: Path) -> None:
    """The heir has no function: what replication has brought is deleted there."""
    calls = calls_for(cluster)
    messages = [kind.message for kind in calls]
    with (
        service_on(cluster, tmp_path, "error") as service,
        OpenLoopClients(service.grpc_address, messages, per_second=PER_SECOND, timeout_s=DEADLINE_S) as load,
    ):
        time.sleep(0.5)
        victim = cluster.owner(calls[0].slot)
        for replica in cluster.nodes[3:]:
            replica.forget_scripts()
            assert replica.cli("FUNCTION", "LIST") == []
        down_s = time.monotonic()
        cluster.kill(victim)
        wait_for_heir(cluster, calls[0].slot, victim)
        taken_over_s = time.monotonic()
        time.sleep(BACK_WITHIN_S + 1)
        load.stop()

    failed = [call for call in load.calls if call.outcome == grpc.StatusCode.UNAVAILABLE]
    last_s = max(call.begun_s for call in failed)
    meanwhile = [call for call in load.calls if down_s <= call.begun_s <= last_s]
    print(
        f"a replica took over after {1000 * (taken_over_s - down_s):.0f} ms; {len(failed)} of {len(meanwhile)} calls "
        f"failed in {1000 * (last_s - down_s):.0f} ms, {1000 * (last_s - taken_over_s):+.0f} ms beside the takeover"
    )
    assert set(load.outcomes) == {Code.OK, grpc.StatusCode.UNAVAILABLE}
    assert last_s - taken_over_s < BACK_WITHIN_S
    assert all(call.begun_s >= down_s - DEADLINE_S for call in failed)


def move_slowly(cluster: RedisCluster, slot: int, to: RedisServer) -> None:
    """Move a slot slowly, so that calls see every stage: ASK for keys that have moved, and MOVED when all have."""
    cluster.begin_move(slot, to)
    time.sleep(0.05)
    cluster.move_keys(slot, to)
    time.sleep(0.05)
    cluster.finish_move(slot, to)


def wait_for_heir(cluster: RedisCluster, slot: int, victim: RedisServer) -> RedisServer:
    wait_until(lambda: cluster.owner(slot) is not victim, "a replica takes over")
    return cluster.owner(slot)


class _CallFigures:
    """Statistics of the calls since the last report."""

    def __init__(self, service: ServiceProcess, load: OpenLoopClients) -> None:
        self._service = service
        self._load = load
        self._calls = self._without_store = self._late = 0

    def report(self, what: str) -> int:
        """Return how many calls the store has failed; on a busy machine some more may be late."""
        calls = self._load.calls[self._calls :]
        self._calls += len(calls)
        so_far = self._service.stat("ratelimit.fallback.decisions.local")
        without_store, self._without_store = so_far - self._without_store, so_far
        late_so_far = self._service.stat("ratelimit.store.failures.deadline_exceeded")
        late, self._late = late_so_far - self._late, late_so_far
        longest_s = max(call.ended_s - call.begun_s for call in calls)
        print(
            f"{what}: {len(calls)} calls, the longest {longest_s:.2f} s, {without_store} answered without the store, "
            f"{late} of them because it was late"
        )
        return without_store - late
