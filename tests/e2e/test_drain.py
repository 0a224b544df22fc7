"""Stop under load behind a real Envoy with failure_mode_deny: no accepted request fails.

Tests both setups of docs/drain.md. A lost call is a 500 (`failure_mode_deny: true`), a lost connection a missing
response.
"""

from __future__ import annotations

import http.client
import itertools
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.request import Request, urlopen

import pytest
import yaml

from tests.support.servers import SANDBOXES, EnvoyServer, Upstream
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.e2e

RULES = "domain: edge\ndescriptors: [{key: user, rate_limit: {unit: year, requests_per_unit: 4000000000}}]\n"

# A busy machine must not look like an unresponsive service.
PATIENT = {"failure_mode_deny": True, "timeout": "10s", "connect_timeout": "10s"}


class Sent(NamedTuple):
    """One request: its unique path, and the status of its response or the error."""

    path: str
    outcome: int | str


# No retries, so that lost requests are visible.
ONCE = {**PATIENT, "grpc_service": {"envoy_grpc": {"cluster_name": "ratelimit"}}}

REFUSED = "refused"  # connection refused: no listener


class Clients:
    """Threads that send sequential requests, each on one connection as long as Envoy keeps it open."""

    PAUSE_S = 0.002  # keeps the machine from being saturated

    def __init__(self, port: int, threads: int = 4) -> None:
        self._port = port
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(number,)) for number in range(threads)]
        self.sent: list[Sent] = []

    @property
    def outcomes(self) -> Counter[int | str]:
        return Counter(sent.outcome for sent in self.sent)

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not so in {timeout_s} s, with {self.outcomes}"
            time.sleep(0.01)

    def wait_for_more(self, requests: int) -> None:
        enough = len(self.sent) + requests
        self.wait_for(lambda: len(self.sent) >= enough, f"{requests} more requests")

    def stop(self) -> None:
        """Stop sending, and wait for requests in flight."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _client(self, number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)
        for request in itertools.count():
            if self._over.is_set():
                connection.close()
                return
            path = f"/{number}/{request}"
            self.sent.append(Sent(path, self._answer(connection, path)))
            time.sleep(self.PAUSE_S)

    @staticmethod
    def _answer(connection: http.client.HTTPConnection, path: str) -> int | str:
        """Send a request, and name every client error; http.client reconnects after `connection: close`."""
        try:
            if connection.sock is None:
                try:
                    connection.connect()
                except ConnectionRefusedError:
                    return REFUSED
            connection.request("GET", path, headers={"x-user": "somebody"})
            answer = connection.getresponse()
            answer.read()
            return answer.status
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            return type(error).__name__


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.yaml"
    path.write_text(RULES)
    return path


def test_stopping_a_replica_fails_no_request(upstream: Upstream, rules: Path) -> None:
    with (
        ServiceProcess({"RLS_RULES": rules, "RLS_DRAIN_DELAY": "3s"}) as leaving,
        ServiceProcess({"RLS_RULES": rules}) as staying,
    ):
        where = {8000: upstream.port, 8081: leaving.grpc_port, 8083: staying.grpc_port}
        with (
            EnvoyServer(SANDBOXES / "redis-cluster" / "envoy.yaml", where, ONCE) as proxy,
            Clients(proxy.port) as clients,
        ):
            clients.wait_for(lambda: all(map(has_calls, (leaving, staying))), "both receive calls")

            leaving.signal(signal.SIGTERM)
            assert leaving.ended(30) == 0

            clients.wait_for_more(100)
            clients.stop()
            assert proxy.stat("cluster.ratelimit.membership_healthy") == 1
    assert set(clients.outcomes) == {200}, clients.outcomes
    assert "Traceback" not in leaving.log()


def test_killing_a_replica_fails_no_request_with_retries(upstream: Upstream, rules: Path) -> None:
    with ServiceProcess({"RLS_RULES": rules}) as dying, ServiceProcess({"RLS_RULES": rules}) as staying:
        where = {8000: upstream.port, 8081: dying.grpc_port, 8083: staying.grpc_port}
        with (
            EnvoyServer(SANDBOXES / "redis-cluster" / "envoy.yaml", where, PATIENT) as proxy,
            Clients(proxy.port) as clients,
        ):
            clients.wait_for(lambda: all(map(has_calls, (dying, staying))), "both receive calls")
            dying.kill()
            clients.wait_for_more(100)
            clients.stop()
            assert proxy.stat("cluster.ratelimit.upstream_rq_retry_success") > 0
    assert set(clients.outcomes) == {200}, clients.outcomes


def has_calls(service: ServiceProcess) -> bool:
    return service.stat("ratelimit.service.rate_limit.edge.user.total_hits") > 20


class Sidecar(EnvoyServer):
    """Envoy and the service on a Unix socket, as in one pod; Envoy logs each request it has read."""

    def __init__(self, directory: Path, upstream: Upstream, unix_socket: Path) -> None:
        document = yaml.safe_load((SANDBOXES / "rls-unix-socket" / "envoy.yaml").read_text())
        chain = document["static_resources"]["listeners"][0]["filter_chains"][0]
        chain["filters"][0]["typed_config"]["access_log"] = [to_stdout("read %REQ(:PATH)% %RESPONSE_CODE%\n")]
        config = directory / "sidecar.yaml"
        config.write_text(yaml.safe_dump(document))
        where: dict[Any, int | str] = {8000: upstream.port, "/run/ratelimit-rls/rls.sock": str(unix_socket)}
        super().__init__(config, where, PATIENT)

    def command(self) -> Sequence[str | Path]:
        return [*super().command(), "--drain-time-s", "1"]

    def post(self, path: str) -> None:
        """Post to the admin interface."""
        with urlopen(Request(f"http://127.0.0.1:{self.admin_port}{path}", method="POST")) as answer:
            assert answer.status == 200

    def ended(self) -> int:
        assert self._child is not None
        return self._child.wait(20)

    def read(self) -> list[Sent]:
        """Return the status of every request whose headers have reached Envoy."""
        lines = re.findall(r"^read (\S+) (\d+)$", self.log(), re.MULTILINE)
        return [Sent(path, int(status)) for path, status in lines]


def to_stdout(line: str) -> dict[str, Any]:
    return {
        "name": "envoy.access_loggers.stdout",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.access_loggers.stream.v3.StdoutAccessLog",
            "log_format": {"text_format_source": {"inline_string": line}},
        },
    }


def test_deleted_pod_answers_every_request_that_envoy_has_read(upstream: Upstream, rules: Path, tmp_path: Path) -> None:
    unix_socket = tmp_path / "rls.sock"
    variables = {"RLS_RULES": rules, "GRPC_UDS": unix_socket, "RLS_DRAIN_DELAY": "5s"}
    with (
        ServiceProcess(variables) as service,
        Sidecar(tmp_path, upstream, unix_socket) as proxy,
        Clients(proxy.port) as clients,
    ):
        clients.wait_for_more(100)

        # Kubernetes stops all containers of a pod at once: with SIGTERM, or with the preStop hook of Envoy.
        service.signal(signal.SIGTERM)
        proxy.post("/healthcheck/fail")
        proxy.post("/drain_listeners?graceful")
        clients.wait_for(lambda: clients.outcomes[REFUSED] > 0, "Envoy listens no more")
        proxy.wait_until(lambda: proxy.stat(r"http\.ingress\.downstream_cx_active") == 0, "has no connection left")
        proxy.signal(signal.SIGTERM)

        assert proxy.ended() == 0
        assert service.running, "RLS_DRAIN_DELAY is too short for this machine"
        clients.stop()
        assert service.ended(30) == 0
        read = proxy.read()

    answered = [sent for sent in clients.sent if isinstance(sent.outcome, int)]
    assert set(Counter(sent.outcome for sent in read)) == {200}
    assert sorted(answered) == sorted(read)
    # The rest was refused, or accepted by the kernel for a listener that Envoy closed.
    assert {sent.outcome for sent in clients.sent} - {200} <= {REFUSED, "ConnectionResetError"}
