"""Invalid input: the process reports the error, stays within its memory, answers the next call, and logs no input.

Uses real processes, and their memory as reported by the kernel.
"""

from __future__ import annotations

import json
import random
import socket
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path

import grpc
import pytest

from bench import wire
from bench.connection import Target
from bench.cpu import resident_bytes
from bench.load import Load
from ratelimit_rls.core.model import Code
from ratelimit_rls.protos.messages import SHOULD_RATE_LIMIT, RateLimitRequest, RateLimitResponse
from tests.support.service_process import HIT, UNRESTRICTIVE_RULES, ServiceProcess

pytestmark = pytest.mark.slow

INVALID = grpc.StatusCode.INVALID_ARGUMENT
MIB = 2**20
MARK = "find-me"
"""Part of everything these clients send; it must not appear in the log."""

RULES = UNRESTRICTIVE_RULES.replace(
    "}}]", "}}, {key: told, detailed_metric: true, rate_limit: {unit: year, requests_per_unit: 9}}]"
)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """One process for all tests, so that damage by one affects the next."""
    rules = tmp_path_factory.mktemp("rules") / "roomy.yaml"
    rules.write_text(RULES)
    with ServiceProcess({"RLS_RULES": rules}) as running:
        yield running
        assert MARK not in running.log()
        assert "Traceback" not in running.log()


@contextmanager
def unharmed(service: ServiceProcess, max_growth_mib: int) -> Iterator[None]:
    """Check that the process still responds, and has not grown by more than this."""
    before = resident_bytes(service.pid)
    yield
    grown = (resident_bytes(service.pid) - before) / MIB
    print(f"{before / MIB:.0f} MiB {grown:+.1f} MiB")
    assert grown < max_growth_mib
    (outcome,) = send_all(service, [HIT])
    assert outcome == Code.OK


def send_all(service: ServiceProcess, messages: Iterable[bytes]) -> Counter[int | tuple[grpc.StatusCode, str]]:
    """Count the responses: an overall code, or a status and its details."""
    outcomes: Counter[int | tuple[grpc.StatusCode, str]] = Counter()
    with grpc.insecure_channel(service.grpc_address, [("grpc.max_send_message_length", -1)]) as channel:
        method: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(SHOULD_RATE_LIMIT)
        for message in messages:
            try:
                outcomes[RateLimitResponse.FromString(method(message, timeout=30)).overall_code] += 1
            except grpc.RpcError as error:
                outcomes[error.code(), error.details() or ""] += 1
    return outcomes


def message(
    value: str, *, key: str = "all", domain: str = "roomy", limit: int = 0, unit: int = 1, hits: int | None = None
) -> bytes:
    request = RateLimitRequest(domain=domain)
    descriptor = request.descriptors.add()
    descriptor.entries.add(key=key, value=value)
    if limit:
        descriptor.limit.requests_per_unit, descriptor.limit.unit = limit, unit
    if hits is not None:
        descriptor.hits_addend.value = hits
    return bytes(request.SerializeToString())


def descriptors(count: int) -> bytes:
    request = RateLimitRequest(domain="roomy")
    for number in range(count):
        request.descriptors.add().entries.add(key="all", value=f"{MARK}{number}")
    return bytes(request.SerializeToString())


def test_random_bytes_are_answered_or_rejected(service: ServiceProcess) -> None:
    chance = random.Random(7)
    mutated = [bytearray(HIT + MARK.encode()) for _ in range(500)]
    for text in mutated:
        text[chance.randrange(len(text))] = chance.randrange(256)
    with unharmed(service, 16):
        outcomes = send_all(service, [chance.randbytes(chance.randrange(200)) for _ in range(1500)])
        outcomes += send_all(service, map(bytes, mutated))

    rejections = [outcome for outcome in outcomes if isinstance(outcome, tuple)]
    assert {code for code, _ in rejections} == {INVALID}
    assert all("cannot be decoded as" in words or "must not be empty" in words for _, words in rejections), rejections
    assert outcomes.total() == 2000


REJECTED = {
    "10,000 descriptors": (descriptors(10_000), INVALID, "at most 256 descriptors are allowed in one message"),
    "100,000 letters": (message(MARK + "x" * 100_000), INVALID, "at most 65536 are allowed (RLS_MAX_ENTRY_BYTES)"),
    "not UTF-8": (
        message(MARK + "-here").replace(b"here", b"\xff\xfe\xfd\xfc"),
        INVALID,
        "has a string that is not UTF-8",
    ),
    "an unknown unit": (message(MARK, limit=5, unit=99), INVALID, "descriptor 0: the limit's unit is unknown; use SEC"),
    "2^64 - 1 hits": (message(MARK, hits=2**64 - 1), INVALID, "hits_addend 18446744073709551615 is too large; at most"),
    "cut short": (message(MARK + "-here")[:-3], INVALID, "truncated"),
    "nothing": (b"", INVALID, "rate limit domain must not be empty"),
}


@pytest.mark.parametrize(("bad", "code", "words"), REJECTED.values(), ids=REJECTED.keys())
def test_invalid_message_is_rejected_with_a_reason(
    bad: bytes, code: grpc.StatusCode, words: str, service: ServiceProcess
) -> None:
    with unharmed(service, 24):
        (outcome,) = send_all(service, [bad])
    assert isinstance(outcome, tuple)
    assert outcome[0] is code
    assert words in outcome[1]


@pytest.mark.parametrize("where", ["domain", "override", "value", "metric"])
def test_megabytes_of_text_are_answered_and_not_cached(where: str, service: ServiceProcess) -> None:
    texts = (f"{MARK}{number}" + "x" * 60_000 for number in range(1000))
    make = {
        "value": lambda text: message(text),
        "domain": lambda text: message("x", domain=text),
        "override": lambda text: message(text, limit=5),
        "metric": lambda text: message(text, key="told"),
    }[where]
    with unharmed(service, 48):
        assert send_all(service, map(make, texts)) == {Code.OK: 1000}
    assert len(service.debug("/stats").body) < MIB


def test_message_of_50_mb_is_rejected_and_its_memory_freed(service: ServiceProcess) -> None:
    bad = message(MARK + "x" * 50_000_000)
    with unharmed(service, 128):
        outcomes = send_all(service, [bad] * 5)
    ((code, words),) = [outcome for outcome in outcomes if isinstance(outcome, tuple)]
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "524288" in words


def post(service: ServiceProcess, body: bytes | str) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", service.http_port, timeout=30)
    try:
        connection.request("POST", "/json", body)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except (BrokenPipeError, ConnectionResetError):  # rejected before everything was sent
        answer = connection.response_class(connection.sock, method="POST")
        answer.begin()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


NEGATIVE_HITS = {"domain": "roomy", "descriptors": [{"entries": [{"key": "all", "value": MARK}]}], "hitsAddend": -1}
BAD_JSON = {
    "negative hits": (json.dumps(NEGATIVE_HITS), 400, "hitsAddend"),
    "deep nesting": ('{"domain":' + "[" * 60_000, 400, "more than 1000 values"),
    "nesting": ('{"domain":' + "[" * 900, 400, "not a RateLimitRequest in JSON"),
    "not UTF-8": (b"\xff" * 1000, 400, "not a RateLimitRequest in JSON"),
    "not JSON": (MARK, 400, "not a RateLimitRequest in JSON"),
    "50 MB": (b'{"domain": "' + b"x" * 50_000_000, 413, "at most 65536 bytes are allowed"),
}


@pytest.mark.parametrize(("body", "status", "words"), BAD_JSON.values(), ids=BAD_JSON.keys())
def test_invalid_json_is_rejected_with_a_reason(
    body: bytes | str, status: int, words: str, service: ServiceProcess
) -> None:
    with unharmed(service, 32):
        reply = post(service, body)
    assert reply[0] == status
    assert words in reply[1]
    assert len(reply[1]) < 1000


def test_wrong_protocol_does_not_affect_others(service: ServiceProcess) -> None:
    garbage = {
        "HTTP/1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "noise": random.Random(7).randbytes(10_000),
        "HTTP/2 and then noise": wire.PREFACE + random.Random(8).randbytes(10_000),
    }
    with unharmed(service, 16):
        for port in (service.grpc_port, service.http_port, service.debug_port):
            for text in garbage.values():
                with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
                    client.sendall(text + MARK.encode())
        with grpc.insecure_channel(f"127.0.0.1:{service.http_port}") as channel, pytest.raises(grpc.RpcError) as error:
            channel.unary_unary(SHOULD_RATE_LIMIT)(HIT, timeout=5)  # type: ignore[arg-type]
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert service.healthcheck().status == 200


def test_idle_connections_use_little_memory_and_do_not_block_others(service: ServiceProcess) -> None:
    silent = 400
    with unharmed(service, 96), ExitStack() as stack:
        for number in range(silent):
            port = (service.grpc_port, service.http_port, service.debug_port)[number % 3]
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        assert send_all(service, [HIT]) == {Code.OK: 1}
        assert service.healthcheck().status == 200


def flood(service: ServiceProcess, messages: list[bytes]) -> None:
    """Send every message once, many at a time; each must be answered OK."""
    target = Target(("127.0.0.1", service.grpc_port))
    with Load(target, list(map(wire.data, messages)), in_flight=64, connections=4) as load:
        load.run(0, at_least_calls=len(messages))
        load.drain()


FILLED_BY = 80_000
"""Names after which the caches of the test below are full: resident memory levels off at 40,000 to 80,000."""

MAX_GROWTH_OF_FULL_MIB = 16
"""A process with full caches grew by up to 4.6 MiB in twenty runs; a leak of 210 bytes for each name is 16 MiB."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("what", "max_growth_mib"), [("domains", 32), ("values of overrides", 72)])
def test_any_number_of_names_keeps_metrics_and_memory_bounded(what: str, max_growth_mib: int, tmp_path: Path) -> None:
    make = {
        "domains": lambda number: message("x", domain=f"{MARK}{number}"),
        "values of overrides": lambda number: message(f"{MARK}{number}", limit=10**9),
    }[what]
    rules = tmp_path / "roomy.yaml"
    rules.write_text(RULES)
    # Small caches are full soon.
    small = {"RLS_PLAN_CACHE_BYTES": 8 * MIB, "RLS_EMBEDDED_MEMORY_BYTES": 8 * MIB}
    with ServiceProcess({"RLS_RULES": rules, **small}) as service:
        messages = [make(number) for number in range(2 * FILLED_BY)]
        with unharmed(service, max_growth_mib):
            flood(service, messages[:FILLED_BY])
        with unharmed(service, MAX_GROWTH_OF_FULL_MIB):
            flood(service, messages[FILLED_BY:])
        assert service.debug("/stats").body.count("\n") < 8 * 10_001
        assert MARK not in service.log()


def test_hundreds_of_limits_per_request_are_not_cached(tmp_path: Path) -> None:
    def request(number: int) -> bytes:
        made = RateLimitRequest(domain="roomy")
        for other in range(250):
            made.MergeFromString(message(f"{number}-{other}", limit=10**9))
        made.domain = "roomy"
        return bytes(made.SerializeToString())

    rules = tmp_path / "roomy.yaml"
    rules.write_text(RULES)
    small = {"RLS_PLAN_CACHE_BYTES": 32 * MIB, "RLS_EMBEDDED_MEMORY_BYTES": 16 * MIB}
    with ServiceProcess({"RLS_RULES": rules, **small}) as service, unharmed(service, 96):
        assert send_all(service, map(request, range(1200))) == {Code.OK: 1200}


BAD_RULES = {
    "50 MB": ("# " + "x" * 50_000_000, "larger than 16 MiB"),
    "anchors in anchors": (
        "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 30)),
        "excessive aliasing",
    ),
    "deep nesting": ("[" * 500_000, "levels deep"),
}


def test_malicious_rules_are_rejected_under_load(tmp_path: Path) -> None:
    rules = tmp_path / "roomy.yaml"
    rules.write_text(RULES)
    written = tmp_path / "written"  # a file that is being written might be read while it is empty
    with ServiceProcess({"RLS_RULES": rules}) as service:
        for failures, (text, words) in enumerate(BAD_RULES.values(), 1):
            with unharmed(service, 128):
                written.write_text(text)
                written.rename(rules)
                service.wait_until(
                    lambda failures=failures: service.stat("ratelimit.service.config_load_error") == failures,  # type: ignore[misc]
                    "rejects the rules",
                )
            assert words in service.debug("/rlconfig").headers["x-ratelimit-rules-last-error"]
        written.write_text(RULES + "# mended\n")
        written.rename(rules)
        service.wait_until(lambda: service.stat("ratelimit.service.config_load_success") == 2, "takes good rules")
