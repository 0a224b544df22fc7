"""Hot keys of a running server: in the log, /stats and `top` (piped, on a terminal, and while unreachable)."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.protos.messages import SHOULD_RATE_LIMIT
from tests.support.grpc_client import rate_limit_request
from tests.support.ports import free_port
from tests.support.servers import RedisServer
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

RULES = """\
domain: edge
descriptors:
  - {key: user, rate_limit: {unit: hour, requests_per_unit: 10}}
  - {key: tenant, rate_limit: {unit: hour, requests_per_unit: 1000000}}
"""
TOP = [sys.executable, "-m", "ratelimit_rls", "top", "--interval", "100ms"]


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.yaml"
    path.write_text(RULES)
    return path


def hit(service: ServiceProcess, times: int) -> None:
    """Send calls, four of five for tenant=acme, on connections that reach both workers."""
    hot, cold = (bytes(rate_limit_request("edge", one)) for one in ({"tenant": "acme"}, {"user": "mallory"}))
    with ExitStack() as stack:
        own_pool = [("grpc.use_local_subchannel_pool", 1)]
        for _ in range(12):
            channel = stack.enter_context(grpc.insecure_channel(service.grpc_address, own_pool))
            ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(SHOULD_RATE_LIMIT)
            waiting = [ask.future(cold if n % 5 == 0 else hot, timeout=5) for n in range(times // 12)]
            for one in waiting:
                one.result()


def _hot_keys(service: ServiceProcess) -> Any:
    return json.loads(service.debug("/hot?limit=3").body)


def test_hot_reports_all_workers_and_log_names_the_hottest(rules: Path, any_redis: RedisServer) -> None:
    settings = {"RLS_RULES": rules, "REDIS_URL": any_redis.address, "RLS_WORKERS": 2, "RLS_HOT_KEY_RATE": 20}
    with ServiceProcess({**settings, "RLS_HOT_KEY_VALUES": "true"}) as service:
        service.wait_for_log("msg=serving", times=2)
        hit(service, 2400)
        # `seconds` is that of the older worker: it must be long beside the time between their starts.
        service.wait_until(lambda: _hot_keys(service)["seconds"] > 5, "have counted for long enough", 30)
        for _ in range(4):  # from any worker
            reported = _hot_keys(service)
            calls = reported["calls_per_second"] * reported["seconds"]
            assert calls == pytest.approx(2400, rel=0.2)
            assert [row["descriptor"] for row in reported["hottest"]] == ["tenant=acme", "user=mallory"]
            assert reported["hottest"][0]["share"] == pytest.approx(0.8, abs=0.01)
            assert [row["descriptor"] for row in reported["denied"]] == ["user=mallory"]
        assert service.stat("ratelimit.hot_keys.max_rate") > 20
        service.wait_until(lambda: _hit_and_look(service), "warns", 30)
        line = next(line for line in service.log().splitlines() if "msg=hot_key" in line)
        assert "rl:{edge/tenant=acme}:fixed_window:3600" in line
        assert f"{rules}:4:5" in line

        once = subprocess.run([*TOP, "--server", f"127.0.0.1:{service.debug_port}", "--once"], capture_output=True)
        assert once.returncode == 0
        assert "edge  tenant=acme" in once.stdout.decode()


def test_values_are_masked_equally_by_all_workers_unless_enabled(rules: Path, any_redis: RedisServer) -> None:
    with ServiceProcess({"RLS_RULES": rules, "REDIS_URL": any_redis.address, "RLS_WORKERS": 2}) as service:
        service.wait_for_log("msg=serving", times=2)
        hit(service, 1200)
        observed = [service.debug("/hot").body for _ in range(8)]  # from any worker
        assert not any("acme" in text or "mallory" in text for text in observed)
        hottest = {json.loads(text)["hottest"][0]["descriptor"] for text in observed}
        assert len(hottest) == 1
        assert hottest.pop().startswith("tenant=#")


def _hit_and_look(service: ServiceProcess) -> bool:
    hit(service, 600)
    return "msg=hot_key" in service.log()


@contextmanager
def on_a_terminal(command: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    terminal_end, child_end = pty.openpty()
    with subprocess.Popen(
        command, stdin=child_end, stdout=child_end, stderr=child_end, start_new_session=True
    ) as process:
        os.close(child_end)
        try:
            yield process, terminal_end
        finally:
            process.kill()
            os.close(terminal_end)


def read_until(terminal: int, words: str, timeout_s: float = 20.0) -> str:
    observed, ends = "", time.monotonic() + timeout_s
    while words not in observed:
        assert time.monotonic() < ends, observed
        observed += os.read(terminal, 65536).decode()
    return observed


def test_top_retries_unreachable_server_and_ends_with_ctrl_c(rules: Path) -> None:
    port = free_port()
    with on_a_terminal([*TOP, "--server", f"127.0.0.1:{port}"]) as (process, terminal):
        assert "Connection refused" in read_until(terminal, "retrying")
        with ServiceProcess({"RLS_RULES": rules, "RLS_HOT_KEY_VALUES": "true", "DEBUG_PORT": port}) as service:
            hit(service, 120)
            read_until(terminal, "tenant=acme")
            assert "\x1b[J" in read_until(terminal, "MOST LIMITED")  # redrawn in place
        assert "Connection refused" in read_until(terminal, "retrying")
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == ExitCode.DONE


def test_piped_top_prints_every_refresh(rules: Path) -> None:
    with ServiceProcess({"RLS_RULES": rules, "RLS_HOT_KEY_VALUES": "true"}) as service:
        hit(service, 120)
        command = [*TOP, "--server", f"127.0.0.1:{service.debug_port}", "--format", "json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            views = [json.loads(process.stdout.readline()) for _ in range(3)]
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=10)
        assert (process.returncode, err) == (ExitCode.DONE, b"")
        assert {view["hottest"][0]["descriptor"] for view in views} == {"tenant=acme"}
