"""The servers of a run: one per scenario, started on its first measurement, with its rules."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from bench import callers, certificate, cpu, wire, workload
from bench.connection import Target
from bench.scenarios import ClientRoute, RequestKind, Scenario, Server
from bench.servers import LOOPBACK, Servers, Started, StartedEnvoy
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

    pid: int | None  # None for Envoy alone
    target: Target
    start: Start
    collector: str | None = None  # URL of the collector of its traces
    envoy: StartedEnvoy | None = None


@dataclass(frozen=True, slots=True)
class RunningRedis:
    pid: int
    address: str  # host:port


class Fleet:
    """Servers of all scenarios. `max_keys` limits the number of callers of every scenario."""

    def __init__(self, directory: Path, max_keys: int, peer: Path | None) -> None:
        self._directory = directory
        self._most_keys = max_keys
        self._peer = peer
        self._certificate = certificate.make(directory)
        self._servers = Servers(directory, SERVICE_CORE, LOAD_CORE)
        self._redis: RunningRedis | None = None
        self._running: dict[Scenario, Running] = {}

    def __contains__(self, scenario: Scenario) -> bool:
        return scenario in self._running

    @property
    def starts(self) -> dict[Scenario, Start]:
        return {scenario: running.start for scenario, running in self._running.items()}

    def close(self) -> None:
        self._servers.close()

    def log(self, scenario: Scenario) -> str:
        return self._servers.log(scenario.name)

    def redis(self, scenario: Scenario) -> RunningRedis | None:
        """Return the Redis of the run, if the scenario's server uses it."""
        if scenario.uses_redis and self._redis is None:
            self._redis = RunningRedis(*self._servers.redis())
        return self._redis if scenario.uses_redis else None

    def keys(self, scenario: Scenario) -> int:
        return min(scenario.keys, self._most_keys)

    def running(self, scenario: Scenario) -> Running:
        """Return the server of a scenario. Each has its own process, so that no state is shared."""
        if scenario not in self._running:
            self._running[scenario] = self._start(scenario)
        return self._running[scenario]

    def _start(self, scenario: Scenario) -> Running:
        if scenario.server is Server.ENVOY:
            alone = self._servers.envoy(scenario.name, None)
            return Running(None, Target(alone.address, None, wire.HTTP), _start(alone), envoy=alone)
        metrics = f"{LOOPBACK}:{free_port()}"
        collector = self._collector(scenario, metrics) if scenario.telemetry else None
        started = self._start_server(scenario, telemetry(metrics, collector) if collector else {})
        if scenario.way is ClientRoute.ENVOY:
            assert isinstance(started.address, tuple)
            before = self._servers.envoy(f"{scenario.name}-front", started.address[1])
            return Running(started.pid, Target(before.address, None, wire.HTTP), _start(started), collector, before)
        has_tls, shows_it = scenario.way in (ClientRoute.TLS, ClientRoute.MTLS), scenario.way is ClientRoute.MTLS
        method = wire.CHECK if scenario.asked is RequestKind.CHECKS else wire.SHOULD_RATE_LIMIT
        target = Target(started.address, self._certificate.client(shows_it=shows_it) if has_tls else None, method)
        return Running(started.pid, target, _start(started), collector)

    def _start_server(self, scenario: Scenario, telemetry: dict[str, str]) -> Started:
        redis = self.redis(scenario)
        address = redis.address if redis else None
        if scenario.echoes:
            tls = self._certificate if scenario.way is ClientRoute.TLS else None
            return self._servers.echo(scenario.name, scenario.server.removeprefix("echo-"), tls)
        if scenario.server is Server.PEER:
            assert self._peer is not None
            assert address is not None
            return self._servers.peer(scenario.name, self._peer, self._rules(scenario), address)
        variables = self._variables(scenario) | telemetry
        return self._servers.service(scenario.name, self._rules(scenario), address, variables)

    def _collector(self, scenario: Scenario, metrics: str) -> str:
        return self._servers.collector(f"{scenario.name}-collector", f"http://{metrics}/metrics")

    def _rules(self, scenario: Scenario) -> Path:
        """Return the directory of the scenario's rules.

        It is separate, since envoyproxy/ratelimit must be able to read its own.
        """
        if scenario.asked is RequestKind.DESCRIPTORS:
            root = self._directory / f"rules {scenario.rules.name}"
            workload.write_rules(root, scenario.rules)
        else:
            root = self._directory / f"rules of callers, {scenario.records}"
            callers.write_rules(root, of_database=scenario.records)
        return root

    def _variables(self, scenario: Scenario) -> dict[str, str]:
        """Return the variables of the scenario, in addition to those of every rate limiter."""
        result: dict[str, str] = {}
        if scenario.workers > 1:
            result["RLS_WORKERS"] = str(scenario.workers)
        if scenario.way is ClientRoute.UNIX:
            result["GRPC_UDS"] = str(self._directory / "grpc.sock")
        if scenario.way in (ClientRoute.TLS, ClientRoute.MTLS):
            result["GRPC_SERVER_USE_TLS"] = "true"
            result["GRPC_SERVER_TLS_CERT"] = str(self._certificate.certificate)
            result["GRPC_SERVER_TLS_KEY"] = str(self._certificate.key)
        if scenario.way is ClientRoute.MTLS:
            result["GRPC_CLIENT_TLS_CACERT"] = str(self._certificate.certificate)
        if scenario.records:
            result["RLS_DATABASE_URL"] = f"sqlite:///{self._database(scenario)}"
            result["RLS_KEY_SECRET"] = callers.KEY_SECRET
            result["RLS_ADMIN_PORT"] = str(free_port())
        return result

    def _database(self, scenario: Scenario) -> Path:
        """Return a copy of a database with that many callers; filling it takes 15 s and is done once."""
        known = self.keys(scenario)
        filled = self._directory / f"{known}-callers.db"
        if not filled.exists():
            callers.fill_now(f"sqlite:///{filled}", known)
        own = self._directory / f"{scenario.name}.db"
        shutil.copy(filled, own)
        return own


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
