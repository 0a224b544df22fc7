"""Each folder of envoy/ does what its README says, with a real Envoy and a real upstream."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import Authority
from tests.support.grpc_client import Http, Reply, get
from tests.support.sandboxes import NAMES, PortTaken, Sandbox, issue, tls
from tests.support.servers import SANDBOXES, EnvoyServer, RedisServer, Service, Upstream
from tests.support.windows import with_yearly_limits

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("name", NAMES)
def test_verify_step_passes(name: str, upstream: Upstream) -> None:
    with Sandbox(name, upstream=upstream, reword=with_yearly_limits) as sandbox:
        step = sandbox.verify()
    print(step.stdout)
    assert step.returncode == 0, step.stdout
    assert "  ok  " in step.stdout


def test_every_sandbox_is_complete_and_listed() -> None:
    page = (SANDBOXES / "README.md").read_text()
    folders = {path.parent.name for path in SANDBOXES.glob("*/envoy.yaml")}
    assert folders == set(NAMES) == set(re.findall(r"^\| \[([a-z-]+)\]\(\1/\)", page, re.MULTILINE))
    for folder in folders:
        present = {path.name for path in (SANDBOXES / folder).iterdir()}
        assert present >= {"README.md", "envoy.yaml", "rules.yaml", "verify.sh"}, folder
        assert os.access(SANDBOXES / folder / "verify.sh", os.X_OK), folder
        assert f"make sandbox NAME={folder}" in (SANDBOXES / folder / "README.md").read_text()


@pytest.mark.parametrize("fixed", [10000, 9901])
def test_sandbox_with_a_port_in_use_does_not_start(fixed: int, upstream: Upstream) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortTaken, match=f"^port {port} is taken"):
            Sandbox("shadow", upstream=upstream, where={fixed: port}).__enter__()


def in_group(group: int) -> int:
    """Return the number of running processes in a group."""
    found = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group, *_ = stat.read_text().rpartition(")")[2].split()
            found += state != "Z" and int(its_group) == group
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_all_processes_of_a_sandbox(number: signal.Signals) -> None:
    command = [sys.executable, str(SANDBOXES / "run.py"), "rls-http"]
    runner = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while in_group(runner.pid) < 3:  # itself, the service and Envoy
            assert runner.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        runner.send_signal(number)
        assert runner.wait(20) == 130
        deadline = time.monotonic() + 10
        while in_group(runner.pid):  # a `sleep` of verify.sh may remain for a while; servers would stay
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(runner.pid, signal.SIGKILL)
        runner.wait()


def envoy(sandbox: str, upstream: Upstream, where: Mapping[Any, int | str], **values: Any) -> EnvoyServer:
    return EnvoyServer(SANDBOXES / sandbox / "envoy.yaml", {8000: upstream.port, **where}, values)


def replies(url: str, path: str, times: int) -> list[Reply]:
    with Http(url) as client:
        return [client.get(path, x_user="ann") for _ in range(times)]


def statuses(url: str, path: str, times: int) -> list[int]:
    return [reply.status for reply in replies(url, path, times)]


def test_requests_over_the_limit_are_denied_with_headers(upstream: Upstream, rules: Path) -> None:
    environment = {"RLS_RULES": rules, "LIMIT_RESPONSE_HEADERS_ENABLED": "true"}
    with Service(environment) as service, envoy("rls-http", upstream, {8081: service.grpc_port}) as proxy:
        before = upstream.requests
        answers = replies(proxy.url, "/limited", 6)

        assert [reply.status for reply in answers] == [200] * 5 + [429]
        assert upstream.requests == before + 5
        assert [reply.headers["x-ratelimit-remaining"] for reply in answers] == ["4", "3", "2", "1", "0", "0"]
        assert [reply.headers["ratelimit-remaining"] for reply in answers] == ["4", "3", "2", "1", "0", "0"]
        denial = answers[-1].headers
        assert denial["x-envoy-ratelimited"] == "true"
        assert denial["x-ratelimit-limit"].split(",")[0] == denial["ratelimit-limit"] == "5"
        assert "5;w=31536000" in denial["x-ratelimit-limit"]
        assert 0 < int(denial["ratelimit-reset"]) <= 31_536_000
        assert abs(int(denial["x-ratelimit-reset"]) - int(denial["ratelimit-reset"])) <= 1
        assert get(proxy.url, "/elsewhere").status == 200


@pytest.mark.parametrize(("deny", "while_down"), [(False, 200), (True, 500)], ids=["pass", "deny"])
def test_envoy_decides_while_the_service_is_down(upstream: Upstream, rules: Path, deny: bool, while_down: int) -> None:
    service = Service({"RLS_RULES": rules})
    where = {8081: service.grpc_port}
    with service, envoy("rls-http", upstream, where, failure_mode_deny=deny) as proxy:
        assert statuses(proxy.url, "/limited", 6) == [200] * 5 + [429]

        service.kill()
        assert statuses(proxy.url, "/limited", 3) == [while_down] * 3

        service.start()
        # The embedded store is part of the process, so its counters start again.
        proxy.wait_until(lambda: "x-ratelimit-limit" in get(proxy.url, "/limited").headers, "limits again")
        assert 429 in statuses(proxy.url, "/limited", 6)


def test_sigterm_with_envoy_connected_exits_cleanly(upstream: Upstream, rules: Path) -> None:
    environment = {"RLS_RULES": rules, "RLS_DRAIN_DELAY": "100ms"}
    with Service(environment) as service, envoy("rls-http", upstream, {8081: service.grpc_port}) as proxy:
        assert statuses(proxy.url, "/limited", 6) == [200] * 5 + [429]

        assert service.stop() == 0

        assert "Traceback" not in service.log()


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    return issue(tmp_path / "certs")


def mtls_addresses(certificates: Path, service: Service) -> dict[Any, int | str]:
    files = ("ca.pem", "envoy.pem", "envoy.key")
    return {8081: service.grpc_port, **{f"certs/{file}": str(certificates / file) for file in files}}


def test_mutual_tls_rejects_missing_and_foreign_certificates(
    upstream: Upstream, rules: Path, certificates: Path, tmp_path: Path
) -> None:
    pem, key = Authority(tmp_path / "stranger").issue("envoy.internal")
    # Without a list of names, so that only the CA decides.
    environment = {"RLS_RULES": rules, **tls(certificates), "GRPC_CLIENT_TLS_SAN": None}
    with Service(environment) as service:
        where = mtls_addresses(certificates, service)
        strangers = {**where, "certs/envoy.pem": str(pem), "certs/envoy.key": str(key)}
        with envoy("rls-mtls", upstream, where, failure_mode_deny=True, tls_certificates=[]) as proxy:
            assert statuses(proxy.url, "/limited", 2) == [500, 500]
        with envoy("rls-mtls", upstream, strangers, failure_mode_deny=True) as proxy:
            assert statuses(proxy.url, "/limited", 2) == [500, 500]
        with envoy("rls-mtls", upstream, where, failure_mode_deny=True) as proxy:
            assert statuses(proxy.url, "/limited", 2) == [200, 200]


def test_mutual_tls_rejects_a_name_that_is_not_listed(upstream: Upstream, rules: Path, certificates: Path) -> None:
    service = Service({"RLS_RULES": rules, **tls(certificates)})
    servers_own = {f"certs/envoy{end}": str(certificates / f"ratelimit{end}") for end in (".pem", ".key")}
    where = {**mtls_addresses(certificates, service), **servers_own}
    with service, envoy("rls-mtls", upstream, where, failure_mode_deny=True) as proxy:
        assert statuses(proxy.url, "/limited", 2) == [500, 500]


def test_limits_are_stored_in_redis(upstream: Upstream, rules: Path, redis_server: RedisServer) -> None:
    environment = {"RLS_RULES": rules, "REDIS_URL": redis_server.address, "REDIS_SOCKET_TYPE": "tcp"}
    first, second = Service(environment), Service(environment)
    with first, envoy("rls-http", upstream, {8081: first.grpc_port}, failure_mode_deny=True) as proxy:
        assert statuses(proxy.url, "/limited", 3) == [200] * 3
    with second, envoy("rls-http", upstream, {8081: second.grpc_port}, failure_mode_deny=True) as proxy:
        assert statuses(proxy.url, "/limited", 3) == [200, 200, 429]
    assert redis_server.cli("DBSIZE") > 0
