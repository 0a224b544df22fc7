"""One of several workers is killed under load: the others continue to serve, and it is replaced."""

from __future__ import annotations

import os
import time
from pathlib import Path
from signal import SIGKILL

import grpc
import pytest

from ratelimit_rls.core.model import Code
from ratelimit_rls.server.workers import MIN_LIFETIME_S
from tests.support.closed_loop_clients import ClosedLoopClients
from tests.support.servers import RedisServer
from tests.support.service_process import HIT, UNRESTRICTIVE_RULES, ServiceProcess, alive, connections

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]

CLIENTS = 8
RECONNECTED_S = 3.0
"""A client that reaches the dying listener is reset, and gRPC then waits about a second before it connects again."""


def test_a_killed_worker_is_replaced_and_affects_only_its_connections(tmp_path: Path, any_redis: RedisServer) -> None:
    rules = tmp_path / "roomy.yaml"
    rules.write_text(UNRESTRICTIVE_RULES)
    with ServiceProcess({"RLS_RULES": rules, "REDIS_URL": any_redis.address, "RLS_WORKERS": 2}) as service:
        service.wait_for_log("msg=serving", times=2)
        killed, other = service.workers()
        time.sleep(MIN_LIFETIME_S)
        with ClosedLoopClients(service.grpc_address, HIT, clients=CLIENTS) as load:
            connected = connections(killed, service.grpc_port)
            killed_s = time.monotonic()
            os.kill(killed, SIGKILL)
            service.wait_for_log("worker_died")
            service.wait_for_log("msg=serving", times=3)
            time.sleep(max(0.0, killed_s + RECONNECTED_S - time.monotonic()))
            load.wait_for_more(500)

        lost = [call for call in load.calls if call.outcome != Code.OK]
        last_s = max((call.ended_s - killed_s for call in lost), default=0.0)
        print(f"{len({call.client for call in lost})} of {connected} clients lost calls, for {last_s:.2f} s at most")
        assert {call.outcome for call in lost} <= {grpc.StatusCode.UNAVAILABLE}
        assert len({call.client for call in lost}) <= connected
        assert last_s < RECONNECTED_S
        workers = service.workers()
        assert len(workers) == 2
        assert other in workers
        service.stop()
        assert not any(map(alive, workers))
