"""The servers of a run: one for each scenario, started when it is first measured, with the rules it asks for."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from bench import callers, certificate, cpu, wire, workload
from bench.connection import Target
from bench.scenarios import Asked, Scenario, Server, Way
from bench.servers import LOOPBACK, Servers, Started, StartedEnvoy, free_port

SERVICE_CORE, LOAD_CORE = 0, 1

TRACED_SHARE = 0.01
EXPORT_EVERY_MS = 500
"""So that every measurement has what it costs to send traces, too. The default is 5 s, and fewer, larger exports."""


@dataclass(frozen=True, slots=True)
class Start:
    """Of a server: how long from exec until it took a connection, and what it holds before the first call."""

    took_s: float
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers."""

    pid: int | None  # none where an Envoy is alone
    target: Target
    start: Start
    collector: str | None = None  # the URL of who takes its traces
    envoy: StartedEnvoy | None = None


@dataclass(frozen=True, slots=True)
class RunningRedis:
    pid: int
    address: str  # host:port


class Fleet:
    """`most_keys`: of callers, however many a scenario would have."""

    def __init__(self, directory: Path, most_keys: int, peer: Path | None) -> None:
        self._directory = directory
        self._most_keys = most_keys
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
        """The one Redis of the run, if the scenario's server asks it."""
        if scenario.uses_redis and self._redis is None:
            self._redis = RunningRedis(*self._servers.redis())
        return self._redis if scenario.uses_redis else None

    def keys(self, scenario: Scenario) -> int:
        return min(scenario.keys, self._most_keys)

    def running(self, scenario: Scenario) -> Running:
        """The scenario's server: one process for each, so that no scenario works with what another left behind."""
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
        if scenario.way is Way.ENVOY:
            assert isinstance(started.address, tuple)
            before = self._servers.envoy(f"{scenario.name}-front", started.address[1])
            return Running(started.pid, Target(before.address, None, wire.HTTP), _start(started), collector, before)
        has_tls, shows_it = scenario.way in (Way.TLS, Way.MTLS), scenario.way is Way.MTLS
        method = wire.CHECK if scenario.asked is Asked.CHECKS else wire.SHOULD_RATE_LIMIT
        target = Target(started.address, self._certificate.client(shows_it=shows_it) if has_tls else None, method)
        return Running(started.pid, target, _start(started), collector)

    def _start_server(self, scenario: Scenario, telemetry: dict[str, str]) -> Started:
        redis = self.redis(scenario)
        address = redis.address if redis else None
        if scenario.echoes:
            tls = self._certificate if scenario.way is Way.TLS else None
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
        """Where the scenario's rules are, apart from all others: the reference must be able to read its own."""
        if scenario.asked is Asked.DESCRIPTORS:
            root = self._directory / f"rules {scenario.rules.name}"
            workload.write_rules(root, scenario.rules)
        else:
            root = self._directory / f"rules of callers, {scenario.records}"
            callers.write_rules(root, of_database=scenario.records)
        return root

    def _variables(self, scenario: Scenario) -> dict[str, str]:
        """What the scenario asks of the service, beside what every rate limiter is told."""
        told: dict[str, str] = {}
        if scenario.workers > 1:
            told["RLS_WORKERS"] = str(scenario.workers)
        if scenario.way is Way.UNIX:
            told["GRPC_UDS"] = str(self._directory / "grpc.sock")
        if scenario.way in (Way.TLS, Way.MTLS):
            told["GRPC_SERVER_USE_TLS"] = "true"
            told["GRPC_SERVER_TLS_CERT"] = str(self._certificate.certificate)
            told["GRPC_SERVER_TLS_KEY"] = str(self._certificate.key)
        if scenario.way is Way.MTLS:
            told["GRPC_CLIENT_TLS_CACERT"] = str(self._certificate.certificate)
        if scenario.records:
            told["RLS_DATABASE_URL"] = f"sqlite:///{self._database(scenario)}"
            told["RLS_KEY_SECRET"] = callers.KEY_SECRET
            told["RLS_ADMIN_PORT"] = str(free_port())
        return told

    def _database(self, scenario: Scenario) -> Path:
        """Its own, as a copy of one that was filled once for as many callers: that takes a quarter of a minute."""
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
    """Variables of a service that serves metrics at this address and sends traces of some calls to this URL."""
    return {
        "USE_PROMETHEUS": "true",
        "PROMETHEUS_ADDR": metrics,
        "TRACING_ENABLED": "true",
        "TRACING_SAMPLING_RATE": str(TRACED_SHARE),
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector,
        "OTEL_BSP_SCHEDULE_DELAY": str(EXPORT_EVERY_MS),
    }
