"""The examples of envoy/, each with the prerequisites of its files and its verify step.

The configuration and rules are those of the folder; only addresses are changed (EnvoyServer in
tests/support/servers.py).
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Self

from tests.support.certificates import Authority
from tests.support.ports import free_port
from tests.support.process import Process
from tests.support.redis_servers import RedisCluster
from tests.support.servers import SANDBOXES, EnvoyServer, Service, Upstream

NAMES = sorted(folder.parent.name for folder in SANDBOXES.glob("*/verify.sh"))

VERIFY_TIMEOUT_S = 60.0

Environment = Mapping[str, object]
Where = Mapping[Any, int | str]


@dataclass(frozen=True, slots=True)
class Prerequisites:
    """Prerequisites of a folder besides an upstream, one service on TCP and Envoy."""

    environment: Environment = field(default_factory=dict)
    where: Where = field(default_factory=dict)
    replicas: Sequence[int] = (8081,)  # their ports in the configuration
    rules: Sequence[str] = ("rules.yaml",)
    variables: Mapping[str, str] = field(default_factory=dict)  # additional variables of verify.sh


def _nothing(_: Path, __: ExitStack) -> Prerequisites:
    return Prerequisites()


def _unix_socket(directory: Path, _: ExitStack) -> Prerequisites:
    path = directory / "rls.sock"
    return Prerequisites({"GRPC_UDS": path}, {"/run/ratelimit-rls/rls.sock": str(path)})


def _certificates(directory: Path, _: ExitStack) -> Prerequisites:
    certificates = issue(directory / "certs")
    files = ("ca.pem", "envoy.pem", "envoy.key")
    return Prerequisites(tls(certificates), {f"certs/{file}": str(certificates / file) for file in files})


def _two_domains(_: Path, __: ExitStack) -> Prerequisites:
    return Prerequisites(rules=("rules.yaml", "exports.yaml"))


def _database(directory: Path, _: ExitStack) -> Prerequisites:
    port, token = free_port(), secrets.token_hex()
    database = {"RLS_DATABASE_URL": f"sqlite:///{directory}/records.db"}
    variables = {"API": f"http://127.0.0.1:{port}", "TOKEN": token}
    return Prerequisites({**database, "RLS_ADMIN_PORT": port, "RLS_ADMIN_TOKEN": token}, variables=variables)


def _cluster(_: Path, stack: ExitStack) -> Prerequisites:
    cluster = stack.enter_context(RedisCluster())
    return Prerequisites({"REDIS_URL": cluster.url}, replicas=(8081, 8083))


PREREQUISITES: Mapping[str, Callable[[Path, ExitStack], Prerequisites]] = {
    "rls-unix-socket": _unix_socket,
    "rls-mtls": _certificates,
    "per-route": _two_domains,
    "api-keys": _database,
    "redis-cluster": _cluster,
}


def issue(directory: Path) -> Path:
    """Create certs/ as described in the README of rls-mtls."""
    authority = Authority(directory)
    for name, file in (("ratelimit.internal", "ratelimit"), ("envoy.internal", "envoy")):
        for issued, suffix in zip(authority.issue(name), (".pem", ".key"), strict=True):
            shutil.move(issued, directory / (file + suffix))
    return directory


def tls(certificates: Path) -> dict[str, object]:
    """Return the TLS settings of the service."""
    return {
        "GRPC_SERVER_USE_TLS": "true",
        "GRPC_SERVER_TLS_CERT": certificates / "ratelimit.pem",
        "GRPC_SERVER_TLS_KEY": certificates / "ratelimit.key",
        "GRPC_CLIENT_TLS_CACERT": certificates / "ca.pem",
        "GRPC_CLIENT_TLS_SAN": "envoy.internal",
    }


class PortTaken(Exception):
    """A port that Envoy needs is in use."""


def check_free(port: int) -> None:
    """Check a port before starting: the admin page of another Envoy would report ready while ours exits."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore old connections
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise PortTaken(f"port {port} is taken: does another sandbox or Envoy run? End it first") from None


def exit_on_sigterm() -> None:
    """Exit on SIGTERM and SIGHUP as on Ctrl-C, so that a closed terminal or `kill` leaves no servers running."""

    def end(_: int, frame: FrameType | None) -> None:
        if _is_being_started(frame):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            return
        raise KeyboardInterrupt

    # Keep a signal ignored if it already is, as with nohup.
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    for number in (*numbers, signal.SIGALRM):
        signal.signal(number, end)


def _is_being_started(frame: FrameType | None) -> bool:
    """Return True if a child process may exist that is not registered yet and would not be stopped."""
    while frame is not None:
        if frame.f_code is Process.start.__code__ and frame.f_locals["self"]._child is None:
            return True
        frame = frame.f_back
    return False


class Sandbox(AbstractContextManager["Sandbox"]):
    """One example folder, running.

    `reword` changes the text of its rules. `where` sets the ports of Envoy (10000 and 9901); raises PortTaken if they
    are in use.
    """

    def __init__(
        self,
        name: str,
        *,
        upstream: Upstream,
        environment: Environment | None = None,
        reword: Callable[[str], str] = str,
        where: Where | None = None,
    ) -> None:
        self.folder = SANDBOXES / name
        self._upstream = upstream
        self._environment = environment or {}
        self._reword = reword
        self._where = where or {}
        self._variables: Mapping[str, str] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for port in (10000, 9901):
            if port in self._where:
                check_free(int(self._where[port]))
        with ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rls-sandbox-")))
            needs = PREREQUISITES.get(self.folder.name, _nothing)(directory, stack)
            self._variables = needs.variables
            rules = [directory / name for name in needs.rules]
            for path in rules:
                path.write_text(self._reword((self.folder / path.name).read_text()))
            environment = {"RLS_RULES": ",".join(map(str, rules)), **needs.environment, **self._environment}
            self.services = [Service(environment) for _ in needs.replicas]
            ports = {port: service.grpc_port for port, service in zip(needs.replicas, self.services, strict=True)}
            where = {8000: self._upstream.port, **ports, **needs.where, **self._where}
            self.envoy = EnvoyServer(self.folder / "envoy.yaml", where)
            for process in (*self.services, self.envoy):
                stack.callback(process.close)
            with ThreadPoolExecutor() as beside:  # starting is mostly waiting
                started = [beside.submit(service.start) for service in self.services]
                self.envoy.start()  # in this thread: it is killed with the thread that started it
                for service in started:
                    service.result()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def addresses(self) -> dict[str, str]:
        """Return the variables with all addresses for verify.sh."""
        return {
            "ENVOY": self.envoy.url,
            "ADMIN": f"http://127.0.0.1:{self.envoy.admin_port}",
            "DEBUG": f"http://127.0.0.1:{self.services[0].debug_port}",
            **self._variables,
        }

    def verify(self) -> subprocess.CompletedProcess[str]:
        """Run the folder's verify.sh and return its exit code and output."""
        return subprocess.run(
            [self.folder / "verify.sh"],
            env={"PATH": os.environ.get("PATH", os.defpath), "PYTHON": sys.executable, **self.addresses},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=VERIFY_TIMEOUT_S,
            check=False,
        )
