"""`ask`: real calls to a real server, over plaintext, TLS and a Unix socket."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ratelimit_rls.api.responses import ResponseOptions
from ratelimit_rls.api.rls.codec import RlsCodec
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.pipeline.limiter import RateLimiter
from ratelimit_rls.pipeline.throttle_queue import ThrottleQueue
from ratelimit_rls.protos.messages import SHOULD_RATE_LIMIT
from ratelimit_rls.rules.active_rules import ActiveRules
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.telemetry.abuse import AbuseLog
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.tls.certificates import TlsFiles
from ratelimit_rls.transport.grpc.options import GrpcOptions
from ratelimit_rls.transport.grpc.server import GrpcServer
from ratelimit_rls.transport.health import Health
from tests.support.certificates import Authority
from tests.support.pipelines import new_pipeline

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Ended, Run

    Ask = Callable[..., Coroutine[None, None, Ended]]

# A bucket with a window of a day: nothing is restored during a test, and midnight does not matter.
RULES = b"""
domain: edge
descriptors:
  - {key: user, rate_limit: {unit: day, requests_per_unit: 2, algorithm: token_bucket}}
  - {key: path, rate_limit: {unlimited: true}}
"""


class Server:
    """The service, listening on a given address."""

    def __init__(self, directory: Path) -> None:
        rules, metrics = ActiveRules(), Metrics()
        compiled = compile_documents({"rules.yaml": RULES})
        rules.swap(compiled.tree, digest=compiled.digest, files=1, loaded_at=datetime.now(UTC))
        limiter = RateLimiter(rules, EmbeddedStore(), metrics, Policy())
        self._throttle_queue = ThrottleQueue(10, 0.003)
        codec = RlsCodec(limiter, ResponseOptions(headers_enabled=True))
        self._pipeline = new_pipeline(codec, metrics, self._throttle_queue)
        self._directory = directory
        self.running: list[GrpcServer] = []

    async def listen(self, target: str = "127.0.0.1:0", tls: TlsFiles | None = None) -> str:
        options = GrpcOptions(target, tls=tls, runtime_dir=str(self._directory))
        server = GrpcServer(options, {SHOULD_RATE_LIMIT: self._pipeline}, self._throttle_queue, Health(), AbuseLog())
        await server.start()
        self.running.append(server)
        return f"localhost:{server.port}" if server.port else target


@pytest.fixture
async def server(short_path: Path) -> AsyncIterator[Server]:
    server = Server(short_path)
    yield server
    for running in server.running:
        await running.close()


@pytest.fixture
def ask(run: Run) -> Ask:
    """`ask` in a thread, since it blocks while the server runs in the event loop."""

    async def ask(*arguments: str | Path) -> Ended:
        return await asyncio.to_thread(run, "ask", "--domain", "edge", *arguments)

    return ask


async def test_ask_prints_codes_limits_remaining_hits_and_headers(server: Server, ask: Ask) -> None:
    ended = await ask(
        "--server", await server.listen(), "--descriptor", "user=alice", "--descriptor", "path=/,user=bob"
    )
    assert ended.code == ExitCode.DONE
    code, alice, bob, *headers = ended.out.splitlines()
    assert code == "OK"
    assert alice.startswith("  user=alice        OK  2/day, 1 left, resets in ")
    assert bob == "  path=/, user=bob  OK  no limit"
    assert headers[:2] == ["  RateLimit-Limit: 2", "  RateLimit-Remaining: 1"]


async def test_json_format_prints_one_line_per_response(server: Server, ask: Ask) -> None:
    ended = await ask("--server", await server.listen(), "--descriptor", "user=a", "--times", "3", "--format", "json")
    answers = [json.loads(line) for line in ended.out.splitlines()]
    assert [answer["code"] for answer in answers] == ["OK", "OK", "OVER_LIMIT"]
    (status,) = answers[0]["statuses"]
    reset_s = status.pop("reset_s")
    assert 0 < reset_s <= 86_400
    limit = {"name": "", "requests_per_unit": 2, "unit": "DAY"}
    assert status == {"descriptor": [["user", "a"]], "code": "OK", "limit": limit, "remaining": 1}
    assert answers[0]["headers"][0] == ["RateLimit-Limit", "2"]


async def test_over_limit_exits_with_1_only_with_fail_over_limit(server: Server, ask: Ask) -> None:
    address = await server.listen()
    ended = await ask("--server", address, "--descriptor", "user=a", "--times", "3")
    assert ended.code == ExitCode.DONE
    assert ended.out.splitlines()[-1] == "2 OK, 1 OVER_LIMIT"
    assert (await ask("--server", address, "--descriptor", "user=a", "--fail-over-limit")).code == ExitCode.BAD


async def test_missing_limit_exits_with_1_only_with_fail_no_limit(server: Server, ask: Ask) -> None:
    address = await server.listen()
    unlimited = ("--server", address, "--descriptor", "user=a", "--descriptor", "path=/")
    assert (await ask(*unlimited)).code == ExitCode.DONE
    assert (await ask(*unlimited, "--fail-no-limit")).code == ExitCode.BAD
    assert (await ask("--server", address, "--descriptor", "user=b", "--fail-no-limit")).code == ExitCode.DONE


async def test_hits_option_spends_many_none_or_refunds(server: Server, ask: Ask) -> None:
    address = await server.listen()

    async def left(*arguments: str) -> int:
        ended = await ask("--server", address, "--entry", "user=a,b", "--format", "json", *arguments)
        return json.loads(ended.out)["statuses"][0]["remaining"]

    assert [await left("--hits", "0"), await left("--hits", "2"), await left("--hits", "2", "--refund")] == [2, 0, 2]


async def test_ask_connects_to_a_unix_socket(server: Server, ask: Ask, tmp_path: Path) -> None:
    address = await server.listen(f"unix:{tmp_path / 'rls.sock'}")
    assert (await ask("--server", address, "--descriptor", "user=a")).code == ExitCode.DONE


async def test_ask_uses_mutual_tls_with_given_files(server: Server, ask: Ask, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    (cert, key), (my_cert, my_key) = authority.issue("localhost"), authority.issue("me")
    address = await server.listen(tls=TlsFiles(str(cert), str(key), str(authority.ca_path)))
    trust = ("--server", address, "--descriptor", "user=a", "--cacert", authority.ca_path)
    assert (await ask(*trust, "--cert", my_cert, "--key", my_key)).code == ExitCode.DONE
    assert (await ask(*trust)).code == ExitCode.UNREACHABLE


async def test_error_status_of_the_server_is_printed(server: Server, run: Run) -> None:
    address = await server.listen()
    ended = await asyncio.to_thread(run, "ask", "--server", address, "--domain", "", "--descriptor", "user=a")
    assert ended.code == ExitCode.BAD
    assert ended.err == f"Error: {address} responded with INVALID_ARGUMENT: rate limit domain must not be empty\n"


def test_unreachable_server_is_reported(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # not listening: connections to the port are refused while it is bound
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = run("ask", "--server", address, "--domain", "edge", "--descriptor", "user=a")
    assert (ended.code, ended.out) == (ExitCode.UNREACHABLE, "")
    assert ended.err.startswith(f"Error: {address} is unavailable: ")


def test_timeout_is_reported(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        ended = run("ask", "--server", address, "--domain", "edge", "--descriptor", "user=a", "--timeout", "0.2")
    assert ended.code == ExitCode.UNREACHABLE
    assert ended.err == f"Error: {address} did not respond within 0.2 s\n"


@pytest.mark.parametrize("given", ["--cert", "--key"])
def test_cert_without_key_is_a_usage_error(run: Run, tmp_path: Path, given: str) -> None:
    (tmp_path / "file").touch()
    ended = run("ask", "--domain", "edge", "--descriptor", "user=a", given, tmp_path / "file")
    assert ended.code == ExitCode.USAGE
    assert "--cert and --key must be given together" in ended.err
