"""The servers of a run: one per scenario, started on its first measurement, with its rules."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path

from bench import callers, certificate, cpu, edge, limitador, wire, workload
from bench.connection import Target
from bench.scenarios import ClientRoute, RequestKind, Scenario, Server
from bench.servers import LOOPBACK, Servers, Started, StartedEnvoy, StartedRedis
from tests.support.ports import free_port

SERVICE_CORE, LOAD_CORE = 0, 1

TRACED_SHARE = 0.01
EXPORT_EVERY_MS = 500
"""Export interval of traces: every measurement includes an export.

The default is 5 s, with fewer and larger exports.
"""


@dataclass(frozen=True, slots=True)
class Start:
    """Start of a server: time from exec to the first connection, and memory before the first call."""

    took_s: float
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class Running:
    """A running server."""

    pids: tuple[int, ...]  # of each replica; none for Envoy alone
    targets: tuple[Target, ...]  # of each replica
    start: Start  # of the first replica
    collector: str | None = None  # URL of the collector of its traces
    envoy: StartedEnvoy | None = None


class Fleet:
    """Servers of all scenarios. `max_keys` limits the number of callers of every scenario.

    `peer` and `limitador` are binaries of other rate limiters.
    """

    def __init__(self, directory: Path, max_keys: int, peer: Path | None, limitador: Path | None = None) -> None:
        self._directory = directory
        self._max_keys = max_keys
        self._peer = peer
        self._limitador = limitador
        self._certificate = certificate.make(directory)
        self._servers = Servers(directory, SERVICE_CORE, LOAD_CORE)
        self._redis: dict[int, StartedRedis] = {}  # by number of masters
        self._running: dict[Scenario, Running] = {}

    def __contains__(self, scenario: Scenario) -> bool:
        return scenario.deployment in self._running

    @property
    def starts(self) -> dict[Scenario, Start]:
        return {scenario: running.start for scenario, running in self._running.items()}

    def close(self) -> None:
        self._servers.close()

    def log(self, scenario: Scenario) -> str:
        return "\n".join(self._servers.log(name) for name in _names(scenario.deployment))

    def redis(self, scenario: Scenario) -> StartedRedis | None:
        """Return the Redis, or the cluster, of the run, if the scenario's server uses it."""
        if not scenario.uses_redis:
            return None
        if scenario.masters not in self._redis:
            self._redis[scenario.masters] = (
                self._servers.redis_cluster(scenario.masters) if scenario.masters else self._servers.redis()
            )
        return self._redis[scenario.masters]

    def keys(self, scenario: Scenario) -> int:
        return min(scenario.keys, self._max_keys)

    def running(self, scenario: Scenario) -> Running:
        """Return the server of a scenario. Each deployment has its own processes, so that no state is shared."""
        deployment = scenario.deployment
        if deployment not in self._running:
            self._running[deployment] = self._start(deployment)
        return self._running[deployment]

    def _start(self, scenario: Scenario) -> Running:
        if scenario.server is Server.ENVOY:
            alone = self._servers.envoy(scenario.name, None)
            return Running((), (Target(alone.address, None, wire.HTTP),), _start(alone), envoy=alone)
        metrics = f"{LOOPBACK}:{free_port()}"
        collector = self._collector(scenario, metrics) if scenario.telemetry else None
        more = telemetry(metrics, collector) if collector else {}
        replicas = [self._start_server(name, scenario, more) for name in _names(scenario)]
        started, pids = replicas[0], tuple(one.pid for one in replicas)
        if scenario.route is ClientRoute.ENVOY:
            assert isinstance(started.address, tuple)
            before = self._servers.envoy(f"{scenario.name}-front", started.address[1])
            return Running(pids, (Target(before.address, None, wire.HTTP),), _start(started), collector, before)
        has_tls, shows_it = scenario.route in (ClientRoute.TLS, ClientRoute.MTLS), scenario.route is ClientRoute.MTLS
        method = wire.CHECK if scenario.request_kind is RequestKind.CHECKS else wire.SHOULD_RATE_LIMIT
        tls = self._certificate.client(shows_it=shows_it) if has_tls else None
        targets = tuple(Target(one.address, tls, method, traced=scenario.traced) for one in replicas)
        return Running(pids, targets, _start(started), collector)

    def _start_server(self, name: str, scenario: Scenario, telemetry: dict[str, str]) -> Started:
        redis = self.redis(scenario)
        url = redis.url if redis else None
        kind = {"REDIS_TYPE": "CLUSTER"} if scenario.masters else {}
        if scenario.echoes:
            tls = self._certificate if scenario.route is ClientRoute.TLS else None
            return self._servers.echo(name, scenario.server.removeprefix("echo-"), tls)
        if scenario.server is Server.PEER:
            assert self._peer is not None
            assert url is not None
            return self._servers.peer(name, self._peer, self._rules(scenario), url, kind)
        if scenario.server is Server.LIMITADOR:
            assert self._limitador is not None
            started = self._servers.limitador(name, self._limitador, limitador.write_limits(self._directory))
            limitador.check_counters(started.address, started.http_port, scenario.descriptors)
            return started
        variables = self._variables(scenario) | telemetry | kind
        return self._servers.service(name, self._rules(scenario), url, variables)

    def _collector(self, scenario: Scenario, metrics: str) -> str:
        return self._servers.collector(f"{scenario.name}-collector", f"http://{metrics}/metrics")

    def _rules(self, scenario: Scenario) -> Path:
        """Return the directory of the scenario's rules.

        It is separate, since envoyproxy/ratelimit must be able to read its own.
        """
        if scenario.request_kind in (RequestKind.CALLERS, RequestKind.CHECKS):
            root = self._directory / f"rules of callers, {scenario.records}"
            callers.write_rules(root, of_database=scenario.records)
        elif scenario.request_kind is RequestKind.EDGE:
            root = self._directory / f"rules of the edge, {scenario.records}"
            edge.write_rules(root, of_database=scenario.records)
        else:
            root = self._directory / f"rules {scenario.rules.name}"
            workload.write_rules(root, scenario.rules)
        return root

    def _variables(self, scenario: Scenario) -> dict[str, str]:
        """Return the variables of the scenario, in addition to those of every rate limiter."""
        result: dict[str, str] = {}
        if scenario.workers > 1:
            result["RLS_WORKERS"] = str(scenario.workers)
        if scenario.window_us:
            result["RLS_BATCH_WINDOW"] = f"{scenario.window_us}us"
        if scenario.route is ClientRoute.UNIX:
            result["GRPC_UDS"] = str(self._directory / "grpc.sock")
        if scenario.route in (ClientRoute.TLS, ClientRoute.MTLS):
            result["GRPC_SERVER_USE_TLS"] = "true"
            result["GRPC_SERVER_TLS_CERT"] = str(self._certificate.certificate)
            result["GRPC_SERVER_TLS_KEY"] = str(self._certificate.key)
        if scenario.route is ClientRoute.MTLS:
            result["GRPC_CLIENT_TLS_CACERT"] = str(self._certificate.certificate)
        if scenario.records:
            result["RLS_DATABASE_URL"] = f"sqlite:///{self._database(scenario)}"
            result["RLS_KEY_SECRET"] = callers.KEY_SECRET
            result["RLS_ADMIN_PORT"] = str(free_port())
        return result

    def _database(self, scenario: Scenario) -> Path:
        """Return a copy of a database with that many callers; filling it takes 15 s and is done once."""
        is_edge = scenario.request_kind is RequestKind.EDGE
        known = min(self._max_keys, edge.KNOWN_USERS) if is_edge else self.keys(scenario)
        filled = self._directory / f"{known}-{'users-of-the-edge' if is_edge else 'callers'}.db"
        if not filled.exists() and is_edge:
            asyncio.run(callers.fill_with_users_of_edge(f"sqlite:///{filled}", known))
        elif not filled.exists():
            callers.fill_now(f"sqlite:///{filled}", known)
        own = self._directory / f"{scenario.name}.db"
        shutil.copy(filled, own)
        return own


def _names(scenario: Scenario) -> list[str]:
    """Return a name for each replica of a scenario."""
    others = [f"{scenario.name}-{number}" for number in range(2, scenario.replicas + 1)]
    return [scenario.name, *others]


def _start(started: Started) -> Start:
    return Start(started.took_s, cpu.resident_bytes(started.pid))


def telemetry(metrics: str, collector: str) -> dict[str, str]:
    """Return the variables for serving metrics at this address and exporting sampled traces to this URL."""
    return {
        "USE_PROMETHEUS": "true",
        "PROMETHEUS_ADDR": metrics,
        "TRACING_ENABLED": "true",
        "TRACING_SAMPLING_RATE": str(TRACED_SHARE),
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector,
        "OTEL_BSP_SCHEDULE_DELAY": str(EXPORT_EVERY_MS),
    }
