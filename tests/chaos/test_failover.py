"""The master of a Sentinel deployment is replaced, dies or hangs under load; with `local`, no caller sees an error.

Every admitted hit is accounted for. More than the limit can pass only through hits that the old master accepted and the
new one never saw, and through those that `local` admits meanwhile, at most its share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ratelimit_rls.core.model import Code
from tests.support.admission_audit import audit_admissions
from tests.support.grpc_client import rate_limit_request
from tests.support.open_loop_clients import OpenLoopClients
from tests.support.redis_servers import RedisSentinels, wait_until
from tests.support.servers import RedisServer, redis_binaries
from tests.support.service_process import ServiceProcess

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]

LIMIT = 5000
REPLICAS = 20
SHARE = -(-LIMIT // REPLICAS)
"""Hits that `local` admits in this process, which is the only one."""

PER_SECOND = 300
DEADLINE_S = 3.0
MARGIN = "2600ms"
"""Margin before the deadline. It is large because the machine may be busy, and the scheduler is not under test."""

BACK_WITHIN_S = 1.5
"""A second, plus half a second for a busy machine."""

RULES = f"""
domain: edge
descriptors:
  - key: all
    charge: admitted
    on_store_failure: local
    rate_limit: {{unit: year, requests_per_unit: {LIMIT}}}
"""

HIT = bytes(rate_limit_request("edge", {"all": "hits"}))
KEY = "rl:{edge/all=hits}:fixed_window:31536000"


def replace(sentinels: RedisSentinels) -> None:
    """Trigger an orderly failover: the old master is healthy, and acts as master for some seconds more."""
    wait_until(
        lambda: bool(sentinels.sentinels[0].cli("SENTINEL", "FAILOVER", sentinels.name)), "a replica is fit for it"
    )


def kill(sentinels: RedisSentinels) -> None:
    """Kill the master; its replica has neither the function nor the script, as if replication had not brought them."""
    for replica in sentinels.servers:
        if replica is not sentinels.master:
            replica.forget_scripts()
    sentinels.kill_master()


def hang(sentinels: RedisSentinels) -> None:
    sentinels.master.pause()


@pytest.fixture
def sentinels(request: pytest.FixtureRequest) -> Iterator[RedisSentinels]:
    with RedisSentinels(redis_binaries().get(request.param)) as servers:
        yield servers


@pytest.mark.parametrize(
    ("befall", "sentinels"),
    [(replace, "redis-6.2"), (kill, "valkey-9"), (hang, "redis-6.2")],
    ids=["replaced", "killed", "hung"],
    indirect=["sentinels"],
)
def test_every_hit_is_accounted_for_during_a_sentinel_failover(
    befall: Callable[[RedisSentinels], None], sentinels: RedisSentinels, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES)
    variables = {
        "RLS_RULES": rules,
        "REDIS_TYPE": "SENTINEL",
        "REDIS_URL": sentinels.url,
        "RLS_REPLICAS": REPLICAS,
        "RLS_DEADLINE_MARGIN": MARGIN,
    }
    with (
        ServiceProcess(variables) as service,
        OpenLoopClients(service.grpc_address, [HIT], per_second=PER_SECOND, timeout_s=DEADLINE_S) as load,
    ):
        time.sleep(1.0)
        old = sentinels.master
        before_s = time.monotonic()
        befall(sentinels)
        wait_until(lambda: sentinels.master is not old, "another master is elected")
        elected_s = time.monotonic()
        new = sentinels.master
        wait_until(lambda: new.script_runs() > 1, "the service counts on the new master")
        back_s = time.monotonic()
        if old.running:
            old.resume()
        time.sleep(1.0)
        assert LIMIT - counted(new) >= SHARE, "it has taken too long to tell hits of the store from those of `local`"
        load.use_up()

        without_store = service.stat("ratelimit.fallback.decisions.local")
        by_local = min(without_store, SHARE)
        admitted, twice, unheard = audit_admissions(load.calls, LIMIT, SHARE)
        print(
            f"another master after {elected_s - before_s:.1f} s, counted on {back_s - elected_s:.2f} s later; "
            f"{len(load.calls)} calls, the longest {load.longest_s:.2f} s, {without_store} answered without the store\n"
            f"limit {LIMIT}: {admitted} admitted, {admitted - by_local} of them by Redis's word and {by_local} by "
            f"local's; {twice} taken by the old master and unknown to the new, {unheard} counted but unheard"
        )
        assert set(load.outcomes) == {Code.OK, Code.OVER_LIMIT}, "some calls failed, or were not answered in time"
        assert back_s - elected_s < BACK_WITHIN_S
        assert counted(new) == LIMIT
        assert admitted <= LIMIT + twice + SHARE
        assert admitted == LIMIT + twice - unheard + by_local
        assert service.healthcheck().status == 200
        assert service.log().count("address=main,") <= 3, service.log()  # lost, connect failed, restored


def counted(server: RedisServer) -> int:
    return int(server.cli("GET", KEY) or 0) >> 16
