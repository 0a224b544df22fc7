"""How a process ends: what callers are told, which calls are answered, and with which exit code."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM, Signals

import grpc
import pytest

from ratelimit_rls.core.model import Code
from tests.launched import HIT, Launched, Watched
from tests.process import free_port
from tests.servers import RedisServer
from tests.steady import Steady

DELAY_S = 1.0
LONG = {"RLS_DRAIN_DELAY": "60s"}

both_transports = pytest.mark.parametrize("transport", ["native", pytest.param("grpcio", marks=pytest.mark.slow)])


def serving(rules: Path, **variables: object) -> Watched:
    return Watched({"RLS_RULES": rules, **variables})


@pytest.mark.slow
@both_transports
def test_after_sigterm_health_warns_and_every_call_is_answered(transport: str, rules: Path) -> None:
    with (
        serving(rules, RLS_TRANSPORT=transport, RLS_DRAIN_DELAY=f"{DELAY_S}s") as service,
        Steady(service.grpc_address, HIT) as load,
    ):
        assert service.health() == "SERVING"
        told_s = time.monotonic()
        service.signal(SIGTERM)
        service.wait_until(lambda: service.healthcheck().status == 500, "fails its health check")
        assert service.healthcheck().body == "server: stopping"
        assert [service.health(), service.health("")] == ["NOT_SERVING", "NOT_SERVING"]
        load.wait_for_more(50)

        load.stop()  # as callers do that look at health

        assert time.monotonic() - told_s < DELAY_S
        assert service.ended() == 0
        assert set(load.outcomes) == {Code.OK}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "cut_with"),
    [
        ("native", {grpc.StatusCode.UNAVAILABLE}),
        ("grpcio", {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}),
    ],
)
def test_a_client_that_never_looks_at_health_loses_only_calls_begun_after_the_delay(
    transport: str, cut_with: set[grpc.StatusCode], rules: Path, any_redis: RedisServer
) -> None:
    variables = {"RLS_TRANSPORT": transport, "RLS_DRAIN_DELAY": f"{DELAY_S}s", "REDIS_URL": any_redis.address}
    with serving(rules, **variables) as service, Steady(service.grpc_address, HIT) as load:
        told_s = time.monotonic()
        service.signal(SIGTERM)
        assert service.ended() == 0
        load.wait_for_more(10)
        load.stop()

        lost = [call for call in load.calls if call.outcome != Code.OK]
        assert lost
        assert {call.outcome for call in lost} <= cut_with
        assert min(call.begun_s for call in lost) >= told_s + DELAY_S
        print(f"{transport}: served on for {min(call.begun_s for call in lost) - told_s:.2f} s after SIGTERM")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["native", "grpcio"])
def test_a_call_that_waits_for_redis_is_answered_before_the_process_ends(
    transport: str, rules: Path, any_redis: RedisServer
) -> None:
    variables = {"RLS_TRANSPORT": transport, "RLS_STORE_TIMEOUT": "10s", "REDIS_URL": any_redis.address}
    with serving(rules, **variables) as service, Steady(service.grpc_address, HIT, clients=1) as load:
        any_redis.pause()
        time.sleep(0.2)  # by now a call waits
        held = threading.Thread(target=load.stop)
        held.start()
        before = len(load.calls)
        service.signal(SIGTERM)
        time.sleep(0.5)
        assert service.running

        any_redis.resume()
        held.join()

        assert len(load.calls) == before + 1
        assert set(load.outcomes) == {Code.OK}
        assert service.ended() == 0


@pytest.mark.slow
@pytest.mark.parametrize("second", [SIGTERM, SIGINT])
def test_a_second_signal_ends_at_once_even_with_a_call_in_flight(
    second: Signals, rules: Path, any_redis: RedisServer
) -> None:
    variables = {**LONG, "RLS_STORE_TIMEOUT": "60s", "REDIS_URL": any_redis.address}
    with serving(rules, **variables) as service, Steady(service.grpc_address, HIT, clients=1) as load:
        any_redis.pause()
        service.signal(SIGTERM)
        service.wait_for_log("msg=stopping")
        begun_s = time.monotonic()

        service.signal(second)

        assert service.ended() == 1
        assert time.monotonic() - begun_s < 2
        any_redis.resume()
        load.stop()
        assert "Traceback" not in service.log()


@pytest.mark.slow
def test_sigint_leaves_out_the_delay(rules: Path) -> None:
    with serving(rules, **LONG) as service:
        begun_s = time.monotonic()
        service.signal(SIGINT)
        assert service.ended() == 0
        assert time.monotonic() - begun_s < 2
        assert "Traceback" not in service.log()


@pytest.mark.slow
def test_signals_are_heeded_while_redis_is_waited_for(rules: Path) -> None:
    with Launched({"RLS_RULES": rules, "REDIS_URL": f"127.0.0.1:{free_port()}"}) as service:
        service.wait_for_log("waiting for redis")
        service.signal(SIGHUP)
        time.sleep(0.2)
        assert service.running

        service.signal(SIGTERM)

        assert service.ended(2) == 0
        assert "Traceback" not in service.log()
