"""Responses of Health/Check, by service name and by the health of components."""

from __future__ import annotations

import pytest
from grpc_health.v1 import health_pb2

from ratelimit_rls.h2.status import RpcError, StatusCode
from ratelimit_rls.telemetry.abuse import Abuse
from ratelimit_rls.transport.grpc.health_check import MAX_CHECK_BYTES, HealthCheck
from ratelimit_rls.transport.health import Health

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def request(service: str) -> bytes:
    return bytes(health_pb2.HealthCheckRequest(service=service).SerializeToString())


def test_livez_reports_the_status_of_health() -> None:
    health = Health(["redis"])
    check = HealthCheck(health)

    def reported() -> tuple[int, int]:
        answers = [check.respond(request(name)) for name in ("", "ratelimit")]
        alive, serving = [
            health_pb2.HealthCheckResponse.FromString(answer).status for answer in answers if isinstance(answer, bytes)
        ]
        return alive, serving

    assert reported() == (NOT_SERVING, NOT_SERVING)
    health.listening()
    assert reported() == (SERVING, NOT_SERVING)
    health.set("redis", True)
    assert reported() == (SERVING, SERVING)
    health.stopping()
    assert reported() == (NOT_SERVING, NOT_SERVING)


@pytest.mark.parametrize(
    ("message", "code", "abuse"),
    [
        (request("envoy"), StatusCode.NOT_FOUND, None),
        (b"\xff\xff", StatusCode.INVALID_ARGUMENT, None),
        (b"\x0a\x01\xff", StatusCode.INVALID_ARGUMENT, None),  # not UTF-8
        (request("x" * MAX_CHECK_BYTES), StatusCode.RESOURCE_EXHAUSTED, Abuse.MESSAGE_TOO_LARGE),
    ],
)
def test_what_has_no_answer(message: bytes, code: StatusCode, abuse: Abuse | None) -> None:
    answer = HealthCheck(Health()).respond(message)
    assert isinstance(answer, RpcError)
    assert (answer.code, answer.reason) == (code, abuse)


def test_fields_of_a_later_version_are_skipped() -> None:
    assert isinstance(HealthCheck(Health()).respond(request("ratelimit") + b"\x10\x01"), bytes)
