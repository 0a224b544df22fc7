"""The clients by themselves: what they send, and what they tell when nobody answers."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest

from ratelimit_rls.client import Answer, AsyncRateLimiterClient, OnError, RateLimiterClient, RateLimiterError, Tls
from ratelimit_rls.client.answers import Instead
from ratelimit_rls.client.calls import QUOTA, check_request, request_of
from ratelimit_rls.client.channel import credentials, options
from tests.process import free_port


@pytest.fixture
def nobody() -> str:
    """Where nobody listens."""
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def silent() -> Iterator[str]:
    """Where connections are taken and nothing is said."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_check_says_who_what_and_when() -> None:
    request = check_request("ann", "api_key", "/a", 0, "edge")
    assert (request.identifier, request.dimension, request.endpoint, request.domain) == ("ann", 3, "/a", "edge")
    assert (request.HasField("cost"), request.cost) == (True, 0)
    assert request.timestamp > 1_700_000_000


def test_half_characters_are_written_out() -> None:
    assert check_request("a\ud800", "user", "/\udfff", 1, "").identifier == "a\\ud800"
    assert request_of(QUOTA, "ä", "user", "/\udfff", "").endpoint == "/\\udfff"


@pytest.mark.parametrize("cost", [-1, 2**32])
def test_a_cost_that_cannot_be_is_the_caller_s_mistake(cost: int) -> None:
    with pytest.raises(ValueError, match="from 0"):
        check_request("ann", "user", "", cost, "")


def test_what_cannot_be_chosen_is_refused_with_the_choice(nobody: str) -> None:
    with pytest.raises(ValueError, match="'user', 'ip', 'api_key'"):
        check_request("ann", "org", "", 1, "")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'allow', 'deny' or 'raise'"):
        RateLimiterClient(nobody, on_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give both"):
        AsyncRateLimiterClient(nobody, tls=Tls(certificate=b"x"))


@pytest.mark.parametrize(
    ("on_error", "told"),
    [
        ("allow", Answer(True)),
        ("deny", Answer(False, retry_after=1, reason="no_answer", http_status=503)),
    ],
)
async def test_without_an_answer_a_check_tells_what_was_chosen_and_logs_it_once(
    on_error: OnError, told: Answer, nobody: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), RateLimiterClient(nobody, on_error=on_error) as client:
        answers = [client.check("ann") for _ in range(3)]
    async with AsyncRateLimiterClient(nobody, on_error=on_error) as other:
        answers.append(await other.check("ann"))
    for answer in answers:
        assert isinstance(answer.error, RateLimiterError)
        assert answer.error.code is grpc.StatusCode.UNAVAILABLE
        assert (
            Answer(answer.allowed, reason=answer.reason, retry_after=answer.retry_after, http_status=answer.http_status)
            == told
        )
    assert len([record for record in caplog.records if record.name.startswith("ratelimit_rls")]) == 2


@pytest.mark.parametrize("on_error", ["allow", "deny"])
def test_whoever_is_not_understood_does_not_pass(on_error: OnError) -> None:
    error = RateLimiterError(grpc.StatusCode.INVALID_ARGUMENT, "the identifier is an API key")
    answer = Instead(on_error).of(error)
    assert (answer.allowed, answer.http_status, answer.reason) == (False, 400, "not_understood")


def test_no_message_is_too_large_to_be_answered() -> None:
    request = check_request("u" * 10_000_000, "user", "/" * 10_000_000, 1, "")
    assert len(request.SerializeToString()) < 10_000


async def test_errors_are_raised_unless_something_else_was_chosen(nobody: str) -> None:
    with RateLimiterClient(nobody) as client, pytest.raises(RateLimiterError, match="UNAVAILABLE"):
        client.check("ann")
    async with AsyncRateLimiterClient(nobody, on_error="allow", token="rla_secret") as other:
        with pytest.raises(RateLimiterError, match="UNAVAILABLE"):
            await other.remaining("ann")
        with pytest.raises(RateLimiterError) as refusal:
            await other.reset("ann")
    assert "rla_secret" not in repr(refusal.value)


async def test_nobody_waits_longer_than_was_said(silent: str) -> None:
    with RateLimiterClient(silent, timeout_s=0.01) as client, pytest.raises(RateLimiterError, match="DEADLINE"):
        client.check("ann")
    async with AsyncRateLimiterClient(silent, on_error="allow") as other:
        answer = await other.check("ann", timeout_s=0.01)
    assert answer.error is not None
    assert answer.error.code is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_key_is_not_shown_and_a_name_may_differ_from_the_host() -> None:
    tls = Tls(server_name="limiter", certificate=b"cert", key=b"very secret")
    assert "very secret" not in repr(tls)
    assert ("grpc.ssl_target_name_override", "limiter") in options(tls)
    assert isinstance(credentials(Tls()), grpc.ChannelCredentials)


@pytest.mark.slow
def test_importing_it_brings_nothing_of_the_service_but_its_messages() -> None:
    program = "import sys, ratelimit_rls.client.asgi; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    ours = [name for name in loaded if name.startswith("ratelimit_rls.") and ".client" not in name]
    assert ours == ["ratelimit_rls.transport", "ratelimit_rls.transport.grpc", "ratelimit_rls.transport.grpc.messages"]
    assert not {"redis", "pydantic", "starlette", "lupa", "structlog", "sqlalchemy"} & set(loaded)
