"""Several processes on one port: who gets connections, what /stats adds up, and that all end together."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM

import grpc
import pytest

from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.core.model import Code
from ratelimit_rls.transport.grpc.messages import SHOULD_RATE_LIMIT
from tests.client import ask, rate_limit_request
from tests.launched import HIT, Launched, Watched, connections
from tests.servers import RedisServer

REQUEST = rate_limit_request("roomy", {"all": "hits"})
TOTAL = "ratelimit_server.ShouldRateLimit.total_requests"


@pytest.fixture
def two(rules: Path, any_redis: RedisServer) -> Iterator[Watched]:
    with Watched({"RLS_RULES": rules, "REDIS_URL": any_redis.address, "RLS_WORKERS": 2}) as service:
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
def test_what_several_workers_cannot_share_is_refused_with_a_sentence(
    variables: dict[str, object], sentence: str, rules: Path
) -> None:
    with Launched({"RLS_RULES": rules, **variables}) as service:
        assert service.ended() == ExitCode.BAD
        assert sentence in service.log()
        assert "Traceback" not in service.log()


@pytest.mark.slow
def test_connections_are_spread_and_stats_is_the_sum(two: Watched) -> None:
    with ExitStack() as stack:
        own_pool = [("grpc.use_local_subchannel_pool", 1)]
        channels = [stack.enter_context(grpc.insecure_channel(two.grpc_address, own_pool)) for _ in range(24)]
        for channel in channels:
            channel.unary_unary(SHOULD_RATE_LIMIT)(HIT, timeout=5)
        held = [connections(pid, two.grpc_port) for pid in two.workers()]

    assert len(held) == 2
    assert sum(held) == len(channels)
    assert min(held) > 0
    assert {two.stat(TOTAL) for _ in range(10)} == {len(channels)}


@pytest.mark.slow
def test_port_0_is_one_port_for_all_workers(rules: Path, any_redis: RedisServer) -> None:
    variables = {"GRPC_PORT": 0, "PORT": 0, "DEBUG_PORT": 0, "REDIS_URL": any_redis.address, "RLS_WORKERS": 2}
    with Launched({"RLS_RULES": rules, **variables}) as service:
        service.wait_for_log("msg=serving", times=2)
        (address,) = set(re.findall(r"grpc=(\S+)", service.log()))
        assert {len(set(re.findall(rf"{port}=(\S+)", service.log()))) for port in ("http", "debug")} == {1}
        assert int(ask(address, REQUEST).overall_code) == Code.OK


@pytest.mark.slow
def test_a_worker_that_cannot_start_ends_them_all_with_its_reason(rules: Path, any_redis: RedisServer) -> None:
    tls = {"GRPC_SERVER_USE_TLS": "true", "GRPC_SERVER_TLS_CERT": "/nowhere.pem", "GRPC_SERVER_TLS_KEY": "/nowhere.key"}
    with Launched({"RLS_RULES": rules, "REDIS_URL": any_redis.address, "RLS_WORKERS": 2, **tls}) as service:
        assert service.ended() == 1
        assert "GRPC_SERVER_TLS_CERT=/nowhere.pem, GRPC_SERVER_TLS_KEY=/nowhere.key: No such file" in service.log()
        assert "a worker did not stay up; stopping" in service.log()
        assert "Traceback" not in service.log()


@pytest.mark.slow
def test_sigterm_ends_all_of_them_in_good_order(two: Watched) -> None:
    family = two.family()
    assert len(two.workers()) == 2
    two.signal(SIGTERM)
    assert two.ended() == 0
    two.wait_until_gone(family)


@pytest.mark.slow
def test_ctrl_c_reaches_each_worker_once(two: Watched) -> None:
    # A terminal signals everybody in the foreground; here the supervisor last, so that two signals do not become one.
    foreground = [pid for pid in two.family() if os.getpgid(pid) == os.getpgid(two.pid)]
    for pid in reversed(foreground):
        os.kill(pid, SIGINT)
        time.sleep(0.05)
    assert two.ended() == 0


@pytest.mark.slow
def test_workers_end_in_good_order_when_their_supervisor_is_killed(two: Watched) -> None:
    family = two.family()
    two.kill()
    two.wait_until_gone(family)
    assert two.log().count("msg=stopping") == 2


@pytest.mark.slow
def test_signals_are_heeded_while_workers_are_being_started(rules: Path, any_redis: RedisServer) -> None:
    with Launched({"RLS_RULES": rules, "REDIS_URL": any_redis.address, "RLS_WORKERS": 2}) as service:
        service.wait_until(lambda: len(service.family()) > 3, "has started its workers")
        service.signal(SIGHUP)
        service.wait_for_log("msg=serving", times=2)

    with Launched({"RLS_RULES": rules, "REDIS_URL": any_redis.address, "RLS_WORKERS": 4}) as service:
        service.wait_until(lambda: len(service.family()) > 2, "has started a worker")
        family = service.family()
        service.signal(SIGTERM)
        assert service.ended() == 0
        service.wait_until_gone(family)
        assert "Traceback" not in service.log()
