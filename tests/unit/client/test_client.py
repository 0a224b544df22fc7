"""The clients without a server: requests they send and results without a response."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest

from ratelimit_rls.client import AsyncRateLimiterClient, CheckResult, OnError, RateLimiterClient, RateLimiterError, Tls
from ratelimit_rls.client.channel import credentials, options
from ratelimit_rls.client.methods import QUOTA, build_check_request, build_request
from ratelimit_rls.client.results import ErrorPolicy
from tests.support.ports import free_port


@pytest.fixture
def unreachable() -> str:
    """An address at which nothing listens."""
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def silent() -> Iterator[str]:
    """An address that accepts connections and never responds."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_check_request_contains_identifier_endpoint_and_time() -> None:
    request = build_check_request("ann", "api_key", "/a", 0, "edge")
    assert (request.identifier, request.dimension, request.endpoint, request.domain) == ("ann", 3, "/a", "edge")
    assert (request.HasField("cost"), request.cost) == (True, 0)
    assert request.timestamp > 1_700_000_000


def test_lone_surrogates_are_escaped() -> None:
    assert build_check_request("a\ud800", "user", "/\udfff", 1, "").identifier == "a\\ud800"
    assert build_request(QUOTA, "ä", "user", "/\udfff", "").endpoint == "/\\udfff"


@pytest.mark.parametrize("cost", [-1, 2**32])
def test_cost_out_of_range_raises_value_error(cost: int) -> None:
    with pytest.raises(ValueError, match="between 0"):
        build_check_request("ann", "user", "", cost, "")


def test_invalid_arguments_raise_value_error_with_choices(unreachable: str) -> None:
    with pytest.raises(ValueError, match="'user', 'ip', 'api_key'"):
        build_check_request("ann", "org", "", 1, "")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'allow', 'deny' or 'raise'"):
        RateLimiterClient(unreachable, on_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be given together"):
        AsyncRateLimiterClient(unreachable, tls=Tls(certificate=b"x"))


@pytest.mark.parametrize(
    ("on_error", "result"),
    [
        ("allow", CheckResult(True)),
        ("deny", CheckResult(False, retry_after=1, reason="no_answer", http_status=503)),
    ],
)
async def test_on_error_decides_without_response_and_logs_once(
    on_error: OnError, result: CheckResult, unreachable: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), RateLimiterClient(unreachable, on_error=on_error) as client:
        answers = [client.check("ann") for _ in range(3)]
    async with AsyncRateLimiterClient(unreachable, on_error=on_error) as other:
        answers.append(await other.check("ann"))
    for answer in answers:
        assert isinstance(answer.error, RateLimiterError)
        assert answer.error.code is grpc.StatusCode.UNAVAILABLE
        assert (
            CheckResult(
                answer.allowed, reason=answer.reason, retry_after=answer.retry_after, http_status=answer.http_status
            )
            == result
        )
    assert len([record for record in caplog.records if record.name.startswith("ratelimit_rls")]) == 2


@pytest.mark.parametrize("on_error", ["allow", "deny"])
def test_invalid_argument_is_denied_even_with_on_error_allow(on_error: OnError) -> None:
    error = RateLimiterError(grpc.StatusCode.INVALID_ARGUMENT, "the identifier is an API key")
    answer = ErrorPolicy(on_error).of(error)
    assert (answer.allowed, answer.http_status, answer.reason) == (False, 400, "not_understood")


def test_long_texts_are_truncated() -> None:
    request = build_check_request("u" * 10_000_000, "user", "/" * 10_000_000, 1, "")
    assert len(request.SerializeToString()) < 10_000


async def test_errors_are_raised_by_default(unreachable: str) -> None:
    with RateLimiterClient(unreachable) as client, pytest.raises(RateLimiterError, match="UNAVAILABLE"):
        client.check("ann")
    async with AsyncRateLimiterClient(unreachable, on_error="allow", token="rla_secret") as other:
        with pytest.raises(RateLimiterError, match="UNAVAILABLE"):
            await other.remaining("ann")
        with pytest.raises(RateLimiterError) as raised:
            await other.reset("ann")
    assert "rla_secret" not in repr(raised.value)


async def test_timeout_limits_the_wait(silent: str) -> None:
    with RateLimiterClient(silent, timeout_s=0.01) as client, pytest.raises(RateLimiterError, match="DEADLINE"):
        client.check("ann")
    async with AsyncRateLimiterClient(silent, on_error="allow") as other:
        answer = await other.check("ann", timeout_s=0.01)
    assert answer.error is not None
    assert answer.error.code is grpc.StatusCode.DEADLINE_EXCEEDED


def test_tls_repr_hides_the_key_and_server_name_is_used() -> None:
    tls = Tls(server_name="limiter", certificate=b"cert", key=b"very secret")
    assert "very secret" not in repr(tls)
    assert ("grpc.ssl_target_name_override", "limiter") in options(tls)
    assert isinstance(credentials(Tls()), grpc.ChannelCredentials)


@pytest.mark.slow
def test_importing_the_client_imports_only_the_messages() -> None:
    program = "import sys, ratelimit_rls.client.asgi; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    imported = [name for name in loaded if name.startswith("ratelimit_rls.") and ".client" not in name]
    assert imported == ["ratelimit_rls.protos", "ratelimit_rls.protos.messages"]
    assert not {"redis", "pydantic", "starlette", "lupa", "structlog", "sqlalchemy"} & set(loaded)
