"""One of several workers is killed under load: the others serve on, and another takes its place."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from signal import SIGKILL

import grpc
import pytest

from ratelimit_rls.core.model import Code
from ratelimit_rls.server.workers import SHORTEST_LIFE_S
from tests.launched import HIT, ROOMY, Watched, alive
from tests.servers import RedisServer
from tests.steady import Steady

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]

CLIENTS = 8


def workers(service: Watched) -> list[int]:
    return [int(pid) for pid in re.findall(r"msg=serving .*worker=(\d+)", service.log()) if alive(int(pid))]


def test_a_killed_worker_costs_one_call_a_connection_at_most_and_is_replaced(
    tmp_path: Path, any_redis: RedisServer
) -> None:
    rules = tmp_path / "roomy.yaml"
    rules.write_text(ROOMY)
    with Watched({"RLS_RULES": rules, "REDIS_URL": any_redis.address, "RLS_WORKERS": 2}) as service:
        service.wait_for_log("msg=serving", times=2)
        old = workers(service)
        time.sleep(SHORTEST_LIFE_S)
        with Steady(service.grpc_address, HIT, clients=CLIENTS) as load:
            os.kill(old[0], SIGKILL)
            service.wait_for_log("a worker died and is replaced")
            service.wait_for_log("msg=serving", times=3)
            load.wait_for_more(500)
        new = workers(service)

        lost = [call for call in load.calls if call.outcome != Code.OK]
        print(f"{len(lost)} of {len(load.calls)} calls lost")
        assert {call.outcome for call in lost} <= {grpc.StatusCode.UNAVAILABLE}
        assert len(lost) <= CLIENTS
        assert len(new) == 2
        assert old[1] in new
        service.stop()
        assert not any(map(alive, new))
