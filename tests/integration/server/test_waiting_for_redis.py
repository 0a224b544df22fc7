"""Starting without Redis: waiting with a time limit, or serving without it until it is available."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path

import grpc
import pytest

from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.core.model import Code
from tests.support.grpc_client import ask, rate_limit_request
from tests.support.servers import RedisServer
from tests.support.service_process import StartingService

pytestmark = pytest.mark.slow


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_ports_open_only_when_redis_responds(rules: Path) -> None:
    redis = RedisServer()
    variables = {"REDIS_STARTUP_INITIAL_INTERVAL": "100ms", "REDIS_STARTUP_MAX_INTERVAL": "300ms"}
    with StartingService({"RLS_RULES": rules, "REDIS_URL": redis.address, **variables}) as service:
        service.wait_for_log("waiting_for_redis", times=4)
        assert f"cannot connect to Redis at redis://{redis.address}" in service.log()
        assert not any(map(listens, (service.grpc_port, service.http_port, service.debug_port)))

        with redis:
            back_s = time.monotonic()
            service.wait_until_serving()
            print(f"serves {time.monotonic() - back_s:.2f} s after Redis")
            answer = ask(service.grpc_address, rate_limit_request("roomy", {"all": "hits"}))
            assert int(answer.overall_code) == Code.OK
            assert listens(service.debug_port)


def test_retry_intervals_grow_to_the_maximum(rules: Path) -> None:
    variables = {"REDIS_STARTUP_INITIAL_INTERVAL": "50ms", "REDIS_STARTUP_MAX_INTERVAL": "200ms"}
    with StartingService({"RLS_RULES": rules, "REDIS_URL": "127.0.0.1:1", **variables}) as service:
        service.wait_for_log("waiting_for_redis", times=5)
        waits_s = [float(wait) for wait in re.findall(r"next_attempt_s=([\d.]+)", service.log())]
    assert waits_s[:5] == [0.05, 0.1, 0.2, 0.2, 0.2]


@pytest.mark.parametrize("workers", [1, 2])
def test_giving_up_logs_an_error_and_exits_with_1(rules: Path, workers: int) -> None:
    variables = {"REDIS_STARTUP_INITIAL_INTERVAL": "30s", "REDIS_STARTUP_MAX_ELAPSED_TIME": "1s"}
    with StartingService(
        {"RLS_RULES": rules, "REDIS_URL": "127.0.0.1:1", "RLS_WORKERS": workers, **variables},
    ) as service:
        # The interval of 30 s is cut short by the maximum elapsed time.
        assert service.ended(10) == (ExitCode.UNREACHABLE if workers == 1 else ExitCode.BAD)
        assert "timed out waiting for Redis connection to redis://127.0.0.1:1 after 1s: cannot connect" in service.log()
        assert "Traceback" not in service.log()


def test_silent_redis_is_retried_like_an_absent_one(rules: Path) -> None:
    with RedisServer() as redis:
        redis.pause()
        variables = {"REDIS_TIMEOUT": "200ms", "REDIS_STARTUP_INITIAL_INTERVAL": "100ms"}
        with StartingService({"RLS_RULES": rules, "REDIS_URL": redis.address, **variables}) as service:
            service.wait_for_log("waiting_for_redis", times=2)
            redis.resume()
            service.wait_until_serving()


FAILING = """\
domain: absent
descriptors:
  - {key: lax, on_store_failure: allow, rate_limit: {unit: year, requests_per_unit: 1000}}
  - {key: strict, on_store_failure: deny, rate_limit: {unit: year, requests_per_unit: 1000}}
  - {key: plain, rate_limit: {unit: year, requests_per_unit: 1000}}
"""


def outcome(service: StartingService, key: str) -> tuple[int, int] | grpc.StatusCode:
    """Return the code and the remaining hits, or the gRPC status."""
    try:
        answer = ask(service.grpc_address, rate_limit_request("absent", {key: "v"}))
    except grpc.RpcError as error:
        return error.code()
    return int(answer.overall_code), answer.statuses[0].limit_remaining


@pytest.mark.parametrize("looks", ["false", "true"])
def test_without_waiting_on_store_failure_decides_until_connected(tmp_path: Path, looks: str) -> None:
    path = tmp_path / "absent.yaml"
    path.write_text(FAILING)
    redis = RedisServer()
    variables = {
        "RLS_RULES": path,
        "REDIS_URL": redis.address,
        "RLS_WAIT_FOR_REDIS": "false",
        "RLS_FAILURE_MODE": "error",
        "REDIS_HEALTH_CHECK_ACTIVE_CONNECTION": looks,
    }
    with StartingService(variables) as service:
        service.wait_until(lambda: listens(service.grpc_port) and listens(service.http_port), "listens")
        assert outcome(service, "lax") == (Code.OK, 0)
        assert outcome(service, "strict") == (Code.OVER_LIMIT, 0)
        assert outcome(service, "plain") is grpc.StatusCode.UNAVAILABLE
        assert service.healthcheck().status == (500 if looks == "true" else 200)
        assert [service.health(), service.health("")] == ["NOT_SERVING" if looks == "true" else "SERVING", "SERVING"]
        assert service.log().count("store_fallback_started") == 1

        with redis:
            service.wait_until(lambda: outcome(service, "plain") == (Code.OK, 999), "counts in Redis")
            assert outcome(service, "strict") == (Code.OK, 999)
            assert service.healthcheck().status == 200
            time.sleep(1.1)  # after this pause the window is over
            assert outcome(service, "lax") == (Code.OK, 999)
            service.wait_for_log("store_fallback_ended")
        assert service.stat("ratelimit.fallback.decisions.allow") == 1
