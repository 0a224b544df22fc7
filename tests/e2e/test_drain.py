"""Stopping under load behind a real Envoy that refuses what it cannot ask about: no request that it accepted fails.

docs/drain.md is the recipe; these are its two halves. A lost call shows as 500 (`failure_mode_deny: true`), a lost
connection as an answer that never came.
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

from tests.launched import Watched
from tests.servers import SANDBOXES, EnvoyServer, Upstream

pytestmark = pytest.mark.e2e

RULES = "domain: edge\ndescriptors: [{key: user, rate_limit: {unit: year, requests_per_unit: 4000000000}}]\n"

# A machine that is busy with other tests must not be mistaken for a service that does not answer.
PATIENT = {"failure_mode_deny": True, "timeout": "10s", "connect_timeout": "10s"}


class Sent(NamedTuple):
    """One request: its path, which no other has, and the status of its answer, or why there was none."""

    path: str
    outcome: int | str


# Nobody is asked twice: what a replica loses is seen.
ONCE = {**PATIENT, "grpc_service": {"envoy_grpc": {"cluster_name": "ratelimit"}}}

REFUSED = "refused"  # nobody listened any more


class Clients:
    """Threads that send one request after the other, on a connection for as long as Envoy lets it live."""

    PAUSE_S = 0.002  # the load is theirs, not the machine's

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
        """Send nothing more, and wait for what is under way."""
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
        """Every failure of an HTTP client to its name; http.client connects again after a `connection: close`."""
        try:
            if connection.sock is None:
                connection.connect()
        except ConnectionRefusedError:
            return REFUSED
        try:
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


def test_a_replica_that_is_told_to_stop_costs_no_request(upstream: Upstream, rules: Path) -> None:
    with Watched({"RLS_RULES": rules, "RLS_DRAIN_DELAY": "3s"}) as leaving, Watched({"RLS_RULES": rules}) as staying:
        where = {8000: upstream.port, 8081: leaving.grpc_port, 8083: staying.grpc_port}
        with (
            EnvoyServer(SANDBOXES / "redis-cluster" / "envoy.yaml", where, ONCE) as proxy,
            Clients(proxy.port) as clients,
        ):
            clients.wait_for(lambda: all(map(asked, (leaving, staying))), "both are asked")

            leaving.signal(signal.SIGTERM)
            assert leaving.ended(30) == 0

            clients.wait_for_more(100)
            clients.stop()
            assert proxy.stat("cluster.ratelimit.membership_healthy") == 1
    assert set(clients.outcomes) == {200}, clients.outcomes
    assert "Traceback" not in leaving.log()


def test_a_replica_that_dies_costs_no_request_where_envoy_asks_another(upstream: Upstream, rules: Path) -> None:
    with Watched({"RLS_RULES": rules}) as dying, Watched({"RLS_RULES": rules}) as staying:
        where = {8000: upstream.port, 8081: dying.grpc_port, 8083: staying.grpc_port}
        with (
            EnvoyServer(SANDBOXES / "redis-cluster" / "envoy.yaml", where, PATIENT) as proxy,
            Clients(proxy.port) as clients,
        ):
            clients.wait_for(lambda: all(map(asked, (dying, staying))), "both are asked")
            dying.kill()
            clients.wait_for_more(100)
            clients.stop()
            assert proxy.stat("cluster.ratelimit.upstream_rq_retry_success") > 0
    assert set(clients.outcomes) == {200}, clients.outcomes


def asked(service: Watched) -> bool:
    return service.stat("ratelimit.service.rate_limit.edge.user.total_hits") > 20


class Sidecar(EnvoyServer):
    """Envoy with the service on a Unix socket, as in one pod, and a line in its log for each request it has read."""

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
        """To the admin page."""
        with urlopen(Request(f"http://127.0.0.1:{self.admin_port}{path}", method="POST")) as answer:
            assert answer.status == 200

    def ended(self) -> int:
        assert self._child is not None
        return self._child.wait(20)

    def read(self) -> list[Sent]:
        """Every request whose headers have reached Envoy, and what it answered."""
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


def test_a_pod_that_is_deleted_answers_every_request_its_envoy_has_read(
    upstream: Upstream, rules: Path, tmp_path: Path
) -> None:
    unix_socket = tmp_path / "rls.sock"
    variables = {"RLS_RULES": rules, "GRPC_UDS": unix_socket, "RLS_DRAIN_DELAY": "5s"}
    with (
        Watched(variables) as service,
        Sidecar(tmp_path, upstream, unix_socket) as proxy,
        Clients(proxy.port) as clients,
    ):
        clients.wait_for_more(100)

        # Kubernetes tells all containers of a pod at once: those without a preStop hook by SIGTERM, Envoy by its hook.
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
    # The rest was refused, or had been taken by the kernel for a listener that Envoy closed without looking again.
    assert {sent.outcome for sent in clients.sent} - {200} <= {REFUSED, "ConnectionResetError"}
