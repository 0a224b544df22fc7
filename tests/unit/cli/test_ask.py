"""`ask`: one real call to a real server, in the clear, over TLS and over a Unix socket."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.rules.snapshot import Rules
from ratelimit_rls.service import RateLimiter
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.transport.answers import AnswerOptions
from ratelimit_rls.transport.grpc.certificates import TlsFiles
from ratelimit_rls.transport.grpc.messages import SHOULD_RATE_LIMIT
from ratelimit_rls.transport.grpc.rls import RlsDoor
from ratelimit_rls.transport.grpc.server import GrpcOptions, GrpcServer
from ratelimit_rls.transport.grpc.waiting import WaitingRoom
from ratelimit_rls.transport.health import Health
from tests.certificates import Authority

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Ended, Run

    Ask = Callable[..., Coroutine[None, None, Ended]]

# A bucket of a day: nothing comes back during a test, and no midnight matters.
RULES = b"""
domain: edge
descriptors:
  - {key: user, rate_limit: {unit: day, requests_per_unit: 2, algorithm: token_bucket}}
  - {key: path, rate_limit: {unlimited: true}}
"""


class Server:
    """Our own service on any address."""

    def __init__(self, directory: Path) -> None:
        rules, metrics = Rules(), Metrics()
        compiled = compile_documents({"rules.yaml": RULES})
        rules.swap(compiled.tree, digest=compiled.digest, files=1, loaded_at=datetime.now(UTC))
        limiter = RateLimiter(rules, EmbeddedStore(), metrics, Policy())
        self._room = WaitingRoom(10, 0.003)
        self._door = RlsDoor(limiter, metrics, AnswerOptions(headers_enabled=True), room=self._room)
        self._directory = directory
        self.running: list[GrpcServer] = []

    async def listen(self, target: str = "127.0.0.1:0", tls: TlsFiles | None = None) -> str:
        options = GrpcOptions(target, transport="grpcio", tls=tls, runtime_dir=str(self._directory))
        server = GrpcServer(options, {SHOULD_RATE_LIMIT: self._door}, self._room, Health(), Metrics())
        await server.start()
        self.running.append(server)
        return f"localhost:{server.port}" if server.port else target


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    server = Server(tmp_path)
    yield server
    for running in server.running:
        await running.close()


@pytest.fixture
def ask(run: Run) -> Ask:
    """`ask` beside the server: it blocks, so it gets a thread of its own."""

    async def ask(*arguments: str | Path) -> Ended:
        return await asyncio.to_thread(run, "ask", "--domain", "edge", *arguments)

    return ask


async def test_an_answer_tells_codes_limits_what_is_left_and_headers(server: Server, ask: Ask) -> None:
    ended = await ask(
        "--server", await server.listen(), "--descriptor", "user=alice", "--descriptor", "path=/,user=bob"
    )
    assert ended.code == ExitCode.DONE
    code, alice, bob, *headers = ended.out.splitlines()
    assert code == "OK"
    assert alice.startswith("  user=alice        OK  2/day, 1 left, resets in ")
    assert bob == "  path=/, user=bob  OK  no limit"
    assert headers[:2] == ["  RateLimit-Limit: 2", "  RateLimit-Remaining: 1"]


async def test_json_is_one_line_per_answer(server: Server, ask: Ask) -> None:
    ended = await ask("--server", await server.listen(), "--descriptor", "user=a", "--times", "3", "--format", "json")
    answers = [json.loads(line) for line in ended.out.splitlines()]
    assert [answer["code"] for answer in answers] == ["OK", "OK", "OVER_LIMIT"]
    (status,) = answers[0]["statuses"]
    reset_s = status.pop("reset_s")
    assert 0 < reset_s <= 86_400
    limit = {"name": "", "requests_per_unit": 2, "unit": "DAY"}
    assert status == {"descriptor": [["user", "a"]], "code": "OK", "limit": limit, "remaining": 1}
    assert answers[0]["headers"][0] == ["RateLimit-Limit", "2"]


async def test_over_limit_fails_only_when_asked_to(server: Server, ask: Ask) -> None:
    address = await server.listen()
    ended = await ask("--server", address, "--descriptor", "user=a", "--times", "3")
    assert ended.code == ExitCode.DONE
    assert ended.out.splitlines()[-1] == "2 OK, 1 OVER_LIMIT"
    assert (await ask("--server", address, "--descriptor", "user=a", "--fail-over-limit")).code == ExitCode.BAD


async def test_no_limit_fails_only_when_asked_to(server: Server, ask: Ask) -> None:
    address = await server.listen()
    unlimited = ("--server", address, "--descriptor", "user=a", "--descriptor", "path=/")
    assert (await ask(*unlimited)).code == ExitCode.DONE
    assert (await ask(*unlimited, "--fail-no-limit")).code == ExitCode.BAD
    assert (await ask("--server", address, "--descriptor", "user=b", "--fail-no-limit")).code == ExitCode.DONE


async def test_hits_may_be_many_none_or_given_back(server: Server, ask: Ask) -> None:
    address = await server.listen()

    async def left(*arguments: str) -> int:
        ended = await ask("--server", address, "--entry", "user=a,b", "--format", "json", *arguments)
        return json.loads(ended.out)["statuses"][0]["remaining"]

    assert [await left("--hits", "0"), await left("--hits", "2"), await left("--hits", "2", "--refund")] == [2, 0, 2]


async def test_a_unix_socket_is_a_server_too(server: Server, ask: Ask, tmp_path: Path) -> None:
    address = await server.listen(f"unix:{tmp_path / 'rls.sock'}")
    assert (await ask("--server", address, "--descriptor", "user=a")).code == ExitCode.DONE


async def test_mutual_tls_is_spoken_with_the_files_given(server: Server, ask: Ask, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    (cert, key), (my_cert, my_key) = authority.issue("localhost"), authority.issue("me")
    address = await server.listen(tls=TlsFiles(str(cert), str(key), str(authority.ca_path)))
    trust = ("--server", address, "--descriptor", "user=a", "--cacert", authority.ca_path)
    assert (await ask(*trust, "--cert", my_cert, "--key", my_key)).code == ExitCode.DONE
    assert (await ask(*trust)).code == ExitCode.UNREACHABLE


async def test_a_server_that_does_not_like_the_question_is_quoted(server: Server, run: Run) -> None:
    address = await server.listen()
    ended = await asyncio.to_thread(run, "ask", "--server", address, "--domain", "", "--descriptor", "user=a")
    assert ended.code == ExitCode.BAD
    assert ended.err == f"Error: {address} answered INVALID_ARGUMENT: rate limit domain must not be empty\n"


def test_nobody_there_is_told_in_a_sentence(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and not listening: the port stays refused for as long as we hold it
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = run("ask", "--server", address, "--domain", "edge", "--descriptor", "user=a")
    assert (ended.code, ended.out) == (ExitCode.UNREACHABLE, "")
    assert ended.err.startswith(f"Error: {address} is unavailable: ")


def test_silence_is_told_in_a_sentence(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        ended = run("ask", "--server", address, "--domain", "edge", "--descriptor", "user=a", "--timeout", "0.2")
    assert ended.code == ExitCode.UNREACHABLE
    assert ended.err == f"Error: {address} did not answer within 0.2 s\n"


@pytest.mark.parametrize("given", ["--cert", "--key"])
def test_a_certificate_without_its_key_is_wrong_usage(run: Run, tmp_path: Path, given: str) -> None:
    (tmp_path / "file").touch()
    ended = run("ask", "--domain", "edge", "--descriptor", "user=a", given, tmp_path / "file")
    assert ended.code == ExitCode.USAGE
    assert "--cert and --key belong together" in ended.err
