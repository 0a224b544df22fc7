"""Multiple workers on one port: connections, merged /stats, and stopping together."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM
from urllib.request import urlopen

import grpc
import pytest

from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.core.model import Code
from ratelimit_rls.protos.messages import SHOULD_RATE_LIMIT
from tests.support.grpc_client import ask, rate_limit_request
from tests.support.servers import RedisServer
from tests.support.service_process import HIT, ServiceProcess, StartingService, connections

REQUEST = rate_limit_request("roomy", {"all": "hits"})
TOTAL = "ratelimit_server.ShouldRateLimit.total_requests"


@pytest.fixture
def two(rules: Path, any_redis: RedisServer) -> Iterator[ServiceProcess]:
    with ServiceProcess({"RLS_RULES": rules, "REDIS_URL": any_redis.address, "RLS_WORKERS": 2}) as service:
        service.wait_for_log("msg=serving", times=2)
        yield service


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"RLS_WORKERS": 2}, "RLS_WORKERS=2 needs REDIS_URL"),
        ({"RLS_WORKERS": 2, "REDIS_URL": "127.0.0.1:1", "GRPC_UDS": "/tmp/x.sock"}, "GRPC_UDS cannot be shared"),
    ],
)
def test_settings_incompatible_with_workers_are_rejected(
    variables: dict[str, object], sentence: str, rules: Path
) -> None:
    with StartingService({"RLS_RULES": rules, **variables}) as service:
        assert service.ended() == ExitCode.BAD
        assert sentence in service.log()
        assert "Traceback" not in service.log()


@pytest.mark.slow
def test_connections_are_distributed_and_stats_are_summed(two: ServiceProcess) -> None:
    with ExitStack() as stack:
        own_pool = [("grpc.use_local_subchannel_pool", 1)]
        channels = [stack.enter_context(grpc.insecure_channel(two.grpc_address, own_pool)) for _ in range(24)]
        for channel in channels:
            channel.unary_unary(SHOULD_RATE_LIMIT)(HIT, timeout=5)  # type: ignore[arg-type]
        connected = [connections(pid, two.grpc_port) for pid in two.workers()]

    assert len(connected) == 2
    assert sum(connected) == len(channels)
    assert min(connected) > 0
    assert {two.stat(TOTAL) for _ in range(10)} == {len(channels)}


@pytest.mark.slow
def test_port_0_selects_one_port_for_all_workers(rules: Path, any_redis: RedisServer) -> None:
    variables = {"GRPC_PORT": 0, "PORT": 0, "DEBUG_PORT": 0, "REDIS_URL": any_redis.address, "RLS_WORKERS": 2}
    with StartingService({"RLS_RULES": rules, **variables}) as service:
        service.wait_for_log("msg=serving", times=2)
        (address,) = set(re.findall(r"grpc=(\S+)", service.log()))
        assert {len(set(re.findall(rf"{port}=(\S+)", service.log()))) for port in ("http", "debug")} == {1}
        assert int(ask(address, REQUEST).overall_code) == Code.OK


@pytest.mark.slow
def test_port_0_selects_one_admin_port_for_all_workers(rules: Path, any_redis: RedisServer, tmp_path: Path) -> None:
    database = {"RLS_DATABASE_URL": f"sqlite:///{tmp_path / 'records.db'}", "RLS_ADMIN_PORT": 0}
    variables = {"RLS_RULES": rules, "REDIS_URL": any_redis.address, "RLS_WORKERS": 2, **database}
    with ServiceProcess(variables) as service:
        service.wait_for_log("msg=serving", times=2)
        (address,) = set(re.findall(r"admin=(\S+)", service.log()))
        with urlopen(f"http://{address}/healthz", timeout=5) as response:
            assert response.status == 200


@pytest.mark.slow
@pytest.mark.parametrize("port", ["PORT", "DEBUG_PORT", "RLS_ADMIN_PORT"])
def test_port_in_use_is_one_error(port: str, rules: Path, any_redis: RedisServer, tmp_path: Path) -> None:
    database = {"RLS_DATABASE_URL": f"sqlite:///{tmp_path / 'records.db'}", "RLS_ADMIN_PORT": 0}
    variables = {"GRPC_PORT": 0, "PORT": 0, "DEBUG_PORT": 0, "REDIS_URL": any_redis.address, "RLS_WORKERS": 2}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        own = {port: taken.getsockname()[1], "HOST": "127.0.0.1", "DEBUG_HOST": "127.0.0.1"}
        with StartingService({"RLS_RULES": rules, **variables, **database, **own}) as service:
            assert service.ended() == ExitCode.BAD
            assert service.log().count("cannot listen on 127.0.0.1:") == 1


@pytest.mark.slow
def test_worker_that_cannot_start_stops_all_with_its_error(rules: Path, any_redis: RedisServer) -> None:
    tls = {"GRPC_SERVER_USE_TLS": "true", "GRPC_SERVER_TLS_CERT": "/nowhere.pem", "GRPC_SERVER_TLS_KEY": "/nowhere.key"}
    with StartingService({"RLS_RULES": rules, "REDIS_URL": any_redis.address, "RLS_WORKERS": 2, **tls}) as service:
        assert service.ended() == 1
        assert "GRPC_SERVER_TLS_CERT=/nowhere.pem, GRPC_SERVER_TLS_KEY=/nowhere.key: No such file" in service.log()
        assert "worker_exited_early" in service.log()
        assert "Traceback" not in service.log()


@pytest.mark.slow
def test_sigterm_stops_all_workers_gracefully(two: ServiceProcess) -> None:
    family = two.family()
    assert len(two.workers()) == 2
    two.signal(SIGTERM)
    assert two.ended() == 0
    two.wait_until_exited(family)


@pytest.mark.slow
def test_ctrl_c_reaches_each_worker_once_only(two: ServiceProcess) -> None:
    # A terminal signals all foreground processes; the supervisor is last here, so that two signals are not merged.
    foreground = [pid for pid in two.family() if os.getpgid(pid) == os.getpgid(two.pid)]
    for pid in reversed(foreground):
        os.kill(pid, SIGINT)
        time.sleep(0.05)
    assert two.ended() == 0


@pytest.mark.slow
def test_workers_stop_gracefully_when_the_supervisor_is_killed(two: ServiceProcess) -> None:
    family = two.family()
    two.kill()
    two.wait_until_exited(family)
    assert two.log().count("msg=stopping") == 2


@pytest.mark.slow
def test_signals_stop_workers_that_are_starting(rules: Path, any_redis: RedisServer) -> None:
    with StartingService({"RLS_RULES": rules, "REDIS_URL": any_redis.address, "RLS_WORKERS": 2}) as service:
        service.wait_until(lambda: len(service.family()) > 3, "has started its workers")
        service.signal(SIGHUP)
        service.wait_for_log("msg=serving", times=2)

    with StartingService({"RLS_RULES": rules, "REDIS_URL": any_redis.address, "RLS_WORKERS": 4}) as service:
        service.wait_until(lambda: len(service.family()) > 2, "has started a worker")
        family = service.family()
        service.signal(SIGTERM)
        assert service.ended() == 0
        service.wait_until_exited(family)
        assert "Traceback" not in service.log()
