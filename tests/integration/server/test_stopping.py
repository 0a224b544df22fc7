"""Stopping a process: health, answered calls and exit codes."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM, Signals

import grpc
import pytest

from ratelimit_rls.core.model import Code
from tests.support.closed_loop_clients import ClosedLoopClients
from tests.support.ports import free_port
from tests.support.servers import RedisServer
from tests.support.service_process import HIT, ServiceProcess, StartingService

DELAY_S = 1.0
LONG = {"RLS_DRAIN_DELAY": "60s"}


def serving(rules: Path, **variables: object) -> ServiceProcess:
    return ServiceProcess({"RLS_RULES": rules, **variables})


@pytest.mark.slow
def test_sigterm_sets_not_serving_and_every_call_is_answered(rules: Path) -> None:
    with (
        serving(rules, RLS_DRAIN_DELAY=f"{DELAY_S}s") as service,
        ClosedLoopClients(service.grpc_address, HIT) as load,
    ):
        assert service.health() == "SERVING"
        service.signal(SIGTERM)
        service.wait_until(lambda: service.healthcheck().status == 500, "fails its health check")
        assert service.healthcheck().body == "server: stopping"
        assert [service.health(), service.health("")] == ["NOT_SERVING", "NOT_SERVING"]
        load.wait_for_more(50)

        load.stop()  # as clients with health checks do

        assert service.running  # the delay was not over
        assert service.ended() == 0
        assert set(load.outcomes) == {Code.OK}


@pytest.mark.slow
def test_client_ignoring_health_loses_only_calls_after_the_delay(rules: Path, any_redis: RedisServer) -> None:
    variables = {"RLS_DRAIN_DELAY": f"{DELAY_S}s", "REDIS_URL": any_redis.address}
    with serving(rules, **variables) as service, ClosedLoopClients(service.grpc_address, HIT) as load:
        signalled_s = time.monotonic()
        service.signal(SIGTERM)
        assert service.ended() == 0
        load.wait_for_more(10)
        load.stop()

        lost = [call for call in load.calls if call.outcome != Code.OK]
        assert lost
        assert {call.outcome for call in lost} == {grpc.StatusCode.UNAVAILABLE}
        assert min(call.begun_s for call in lost) >= signalled_s + DELAY_S
        print(f"served on for {min(call.begun_s for call in lost) - signalled_s:.2f} s after SIGTERM")


@pytest.mark.slow
def test_call_waiting_for_redis_is_answered_before_exit(rules: Path, any_redis: RedisServer) -> None:
    variables = {"RLS_STORE_TIMEOUT": "10s", "REDIS_URL": any_redis.address}
    with serving(rules, **variables) as service, ClosedLoopClients(service.grpc_address, HIT, clients=1) as load:
        any_redis.pause()
        time.sleep(0.2)  # a call is waiting by now
        stopping = threading.Thread(target=load.stop)
        stopping.start()
        before = len(load.calls)
        service.signal(SIGTERM)
        time.sleep(0.5)
        assert service.running

        any_redis.resume()
        stopping.join()

        assert len(load.calls) == before + 1
        assert set(load.outcomes) == {Code.OK}
        assert service.ended() == 0


@pytest.mark.slow
@pytest.mark.parametrize("second", [SIGTERM, SIGINT])
def test_second_signal_stops_at_once_with_a_call_in_flight(
    second: Signals, rules: Path, any_redis: RedisServer
) -> None:
    variables = {**LONG, "RLS_STORE_TIMEOUT": "60s", "REDIS_URL": any_redis.address}
    with serving(rules, **variables) as service, ClosedLoopClients(service.grpc_address, HIT, clients=1) as load:
        any_redis.pause()
        service.signal(SIGTERM)
        service.wait_for_log("msg=stopping")

        service.signal(second)

        assert service.ended() == 1  # it waits for less than the drain delay and the store's timeout
        any_redis.resume()
        load.stop()
        assert "Traceback" not in service.log()


@pytest.mark.slow
def test_sigint_skips_the_drain_delay(rules: Path) -> None:
    with serving(rules, **LONG) as service:
        service.signal(SIGINT)
        assert service.ended() == 0  # it waits for less than the drain delay
        assert "Traceback" not in service.log()


@pytest.mark.slow
def test_signals_stop_the_wait_for_redis(rules: Path) -> None:
    with StartingService({"RLS_RULES": rules, "REDIS_URL": f"127.0.0.1:{free_port()}"}) as service:
        service.wait_for_log("waiting_for_redis")
        service.signal(SIGHUP)
        time.sleep(0.2)
        assert service.running

        service.signal(SIGTERM)

        assert service.ended() == 0
        assert "Traceback" not in service.log()
