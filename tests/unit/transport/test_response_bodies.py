"""Bodies of denied calls in each format."""

from __future__ import annotations

import json
from typing import Any

import http_sf
import pytest

from ratelimit_rls.api.responses import ResponseBuilder, ResponseOptions, ResponseParts
from ratelimit_rls.core.model import Algorithm, Limit, Penalty, Reading, Rule, Unit
from ratelimit_rls.core.response_policy import BodyFormat, DenyResponse, HeaderFamily
from ratelimit_rls.core.template import Placeholder, Template
from tests.unit.transport.decisions import DAY_LIMIT, SECOND, TO_DAY_US, TO_MINUTE_US, Matched, decided, rule

BUCKET = Limit(1000, Unit.MINUTE, Algorithm.TOKEN_BUCKET, burst=1500)
DENIED = Reading(0, TO_MINUTE_US, TO_MINUTE_US), Reading(98_766, 0, TO_DAY_US)
PASSING = Reading(1, 0, TO_MINUTE_US), Reading(98_766, 0, TO_DAY_US)
JSON, PROBLEM = DenyResponse(BodyFormat.JSON), DenyResponse(BodyFormat.PROBLEM)
COOLDOWN = Reading(2, 90 * SECOND, 3600 * SECOND)
PENALTY = Penalty(3600 * SECOND, 1, (2, 4))


def build(matched_rule: Rule, *readings: Reading, request_id: str = "") -> ResponseParts:
    return ResponseBuilder(ResponseOptions()).build(decided(Matched(matched_rule, readings)), request_id)


def text(body: str, content_type: str = "") -> DenyResponse:
    return DenyResponse(BodyFormat.TEXT, Template.parse(body), content_type)


def test_json_body_has_the_documented_shape() -> None:
    response = build(rule(BUCKET, DAY_LIMIT, deny=JSON), *DENIED, request_id="550e8400-e29b")
    assert json.loads(response.body) == {
        "error": {
            "code": 429,
            "message": "Rate limit exceeded: minute limit reached",
            "details": {
                "limit_type": "minute",
                "minute_used": 1500,
                "day_used": 1234,
                "reset_at": "2026-01-25T14:32:00Z",
                "retry_after": 45,
            },
        },
        "timestamp": "2026-01-25T14:31:15Z",
        "request_id": "550e8400-e29b",
    }
    assert (response.headers, response.status) == ((("Content-Type", "application/json"),), 429)


def test_json_body_with_other_windows_and_no_request_id() -> None:
    five = Limit(10, Unit.MINUTE, unit_multiplier=5)
    body = json.loads(build(rule(five, deny=JSON), DENIED[0]).body)
    assert body["error"]["message"] == "Rate limit exceeded: 5-minute limit reached"
    assert (body["error"]["details"]["limit_type"], body["error"]["details"]["5_minutes_used"]) == ("5_minutes", 10)
    assert "request_id" not in body


@pytest.mark.parametrize("request_id", ['"},{"', "\r\n\x00", "\ud800", "x" * 10_000])
def test_request_id_is_escaped_and_truncated(request_id: str) -> None:
    response = build(rule(deny=JSON), DENIED[0], request_id=request_id)
    assert json.loads(response.body)["request_id"] == request_id[:128]


def test_problem_json_names_policies_as_the_headers_do() -> None:
    odd = Limit(1000, Unit.MINUTE, name='per "user"\\')
    response = build(rule(odd, DAY_LIMIT, deny=PROBLEM, headers=[HeaderFamily.IETF]), *DENIED)
    headers = dict(response.headers)
    assert json.loads(response.body) == {
        "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
        "title": "Quota Exceeded",
        "status": 429,
        "detail": "Rate limit exceeded: minute limit reached. Retry in 45 seconds.",
        "violated-policies": ['per "user"\\'],
    }
    assert headers["Content-Type"] == "application/problem+json"
    assert http_sf.parse(headers["RateLimit"].encode(), tltype="list") == [('per "user"\\', {"r": 0, "t": 45})]


def test_cooldown_has_its_own_problem_type() -> None:
    body = json.loads(build(rule(BUCKET, DAY_LIMIT, deny=PROBLEM, penalty=PENALTY), *DENIED, COOLDOWN).body)
    assert body["type"] == "https://iana.org/assignments/http-problem-types#abnormal-usage-detected"
    assert body["title"] == "Abnormal Usage Detected"
    assert body["detail"] == "Rate limit exceeded: too many violations. Retry in 90 seconds."
    assert body["violated-policies"] == ["edge.user:minute", "edge.user:day"]
    below = json.loads(build(rule(BUCKET, DAY_LIMIT, deny=PROBLEM, penalty=PENALTY), *DENIED, Reading(1, 0, 1)).body)
    assert below["title"] == "Quota Exceeded"


@pytest.mark.parametrize("deny", [JSON, PROBLEM, text("no")], ids=["json", "problem+json", "text"])
def test_allowed_call_has_no_body(deny: DenyResponse) -> None:
    assert build(rule(deny=deny), PASSING[0]) == ((), b"", 200)


@pytest.mark.parametrize("deny", [JSON, PROBLEM])
def test_body_has_the_status_of_the_rule(deny: DenyResponse) -> None:
    response = build(rule(deny=DenyResponse(deny.format, status=503)), DENIED[0])
    body: dict[str, Any] = json.loads(response.body)
    assert (response.status, body.get("status", body.get("error", {}).get("code"))) == (503, 503)


def test_denial_without_a_format_has_no_body() -> None:
    assert build(rule(deny=DenyResponse(status=503)), DENIED[0]) == ((), b"", 503)


def test_template_supports_all_placeholders() -> None:
    holes = "|".join(f"${{{hole.value}}}" for hole in Placeholder)
    five = Limit(10, Unit.MINUTE, unit_multiplier=5)
    later = rule(Limit(1, Unit.SECOND), path="edge.path"), [Reading(0, 400_000, 400_000)]
    matched_rule = rule(five, deny=text(f"{holes} grün"))
    response = ResponseBuilder(ResponseOptions()).build(decided(Matched(*later), Matched(matched_rule, DENIED[:1])))
    assert response.body.decode() == (
        "edge|edge.user|5 minutes|10|5 minutes|45|45|2026-01-25T14:32:00Z|2026-01-25T14:31:15Z grün"
    )
    assert response.headers == (("Content-Type", "text/plain; charset=utf-8"),)


def test_retry_after_is_per_call_and_reset_per_limit() -> None:
    first = Matched(rule(path="edge.path"), [Reading(0, 60 * SECOND, 60 * SECOND)])
    matched_rule = rule(deny=text("${retry_after} ${reset_after}"))
    response = ResponseBuilder(ResponseOptions()).build(
        decided(first, Matched(matched_rule, [Reading(0, 5 * SECOND, 60 * SECOND)]))
    )
    assert response.body == b"60 5"


@pytest.mark.parametrize("content_type", ["application/json", "application/vnd.acme+JSON; charset=utf-8"])
def test_json_template_values_are_escaped(content_type: str) -> None:
    deny = text('{"rule": "${rule}", "in": ${retry_after}}', content_type)
    response = build(rule(path='edge.a_"\\\nü', deny=deny), DENIED[0])
    assert json.loads(response.body) == {"rule": 'edge.a_"\\\nü', "in": 45}
    assert response.headers == (("Content-Type", content_type),)


def test_html_template_values_are_escaped() -> None:
    response = build(rule(path="edge.<b>&", deny=text("<p>${rule}</p>", "text/html")), DENIED[0])
    assert response.body == b"<p>edge.&lt;b&gt;&amp;</p>"


def test_content_type_cannot_inject_a_header() -> None:
    response = build(rule(deny=text("x", "text/plain\r\nSet-Cookie: a=b")), DENIED[0])
    assert response.headers == (("Content-Type", "text/plain%0D%0ASet-Cookie: a=b"),)


def test_timestamps_are_capped_at_year_9999() -> None:
    body = json.loads(build(rule(deny=JSON), Reading(-(2**40), 2**62, 2**62)).body)
    assert body["error"]["details"]["reset_at"] == "9999-12-31T23:59:59Z"
