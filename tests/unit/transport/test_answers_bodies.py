"""What a refusal says besides its headers, in each format."""

from __future__ import annotations

import json
from typing import Any

import http_sf
import pytest

from ratelimit_rls.core.model import Algorithm, Limit, Penalty, Reading, Rule, Unit
from ratelimit_rls.core.style import BodyFormat, Deny, Family
from ratelimit_rls.core.template import Hole, Template
from ratelimit_rls.transport.answers import AnswerOptions, Answers, Told
from tests.unit.transport.decisions import DAY_LIMIT, SECOND, TO_DAY_US, TO_MINUTE_US, Met, decided, rule

BUCKET = Limit(1000, Unit.MINUTE, Algorithm.TOKEN_BUCKET, burst=1500)
REFUSED = Reading(0, TO_MINUTE_US, TO_MINUTE_US), Reading(98_766, 0, TO_DAY_US)
PASSING = Reading(1, 0, TO_MINUTE_US), Reading(98_766, 0, TO_DAY_US)
JSON, PROBLEM = Deny(BodyFormat.JSON), Deny(BodyFormat.PROBLEM)
COOLDOWN = Reading(2, 90 * SECOND, 3600 * SECOND)
PENALTY = Penalty(3600 * SECOND, 1, (2, 4))


def tell(said: Rule, *readings: Reading, request_id: str = "") -> Told:
    return Answers(AnswerOptions()).tell(decided(Met(said, readings)), request_id)


def text(body: str, content_type: str = "") -> Deny:
    return Deny(BodyFormat.TEXT, Template.parse(body), content_type)


def test_json_has_the_shape_of_the_users_documents() -> None:
    told = tell(rule(BUCKET, DAY_LIMIT, deny=JSON), *REFUSED, request_id="550e8400-e29b")
    assert json.loads(told.body) == {
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
    assert (told.headers, told.status) == ((("Content-Type", "application/json"),), 429)


def test_json_names_windows_of_any_length_and_does_without_a_request_id() -> None:
    five = Limit(10, Unit.MINUTE, unit_multiplier=5)
    body = json.loads(tell(rule(five, deny=JSON), REFUSED[0]).body)
    assert body["error"]["message"] == "Rate limit exceeded: 5-minute limit reached"
    assert (body["error"]["details"]["limit_type"], body["error"]["details"]["5_minutes_used"]) == ("5_minutes", 10)
    assert "request_id" not in body


@pytest.mark.parametrize("request_id", ['"},{"', "\r\n\x00", "\ud800", "x" * 10_000])
def test_a_request_id_is_escaped_and_bounded(request_id: str) -> None:
    told = tell(rule(deny=JSON), REFUSED[0], request_id=request_id)
    assert json.loads(told.body)["request_id"] == request_id[:128]


def test_problem_json_names_the_violated_policies_as_the_headers_do() -> None:
    odd = Limit(1000, Unit.MINUTE, name='per "user"\\')
    told = tell(rule(odd, DAY_LIMIT, deny=PROBLEM, headers=[Family.IETF]), *REFUSED)
    headers = dict(told.headers)
    assert json.loads(told.body) == {
        "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
        "title": "Quota Exceeded",
        "status": 429,
        "detail": "Rate limit exceeded: minute limit reached. Retry in 45 seconds.",
        "violated-policies": ['per "user"\\'],
    }
    assert headers["Content-Type"] == "application/problem+json"
    assert http_sf.parse(headers["RateLimit"].encode(), tltype="list") == [('per "user"\\', {"r": 0, "t": 45})]


def test_a_cooldown_is_a_problem_of_its_own() -> None:
    body = json.loads(tell(rule(BUCKET, DAY_LIMIT, deny=PROBLEM, penalty=PENALTY), *REFUSED, COOLDOWN).body)
    assert body["type"] == "https://iana.org/assignments/http-problem-types#abnormal-usage-detected"
    assert body["title"] == "Abnormal Usage Detected"
    assert body["detail"] == "Rate limit exceeded: too many violations. Retry in 90 seconds."
    assert body["violated-policies"] == ["edge.user:minute", "edge.user:day"]
    below = json.loads(tell(rule(BUCKET, DAY_LIMIT, deny=PROBLEM, penalty=PENALTY), *REFUSED, Reading(1, 0, 1)).body)
    assert below["title"] == "Quota Exceeded"


@pytest.mark.parametrize("deny", [JSON, PROBLEM, text("no")], ids=["json", "problem+json", "text"])
def test_a_call_that_passes_has_no_body(deny: Deny) -> None:
    assert tell(rule(deny=deny), PASSING[0]) == ((), b"", 200)


@pytest.mark.parametrize("deny", [JSON, PROBLEM])
def test_the_status_is_the_rule_s_in_the_body_too(deny: Deny) -> None:
    told = tell(rule(deny=Deny(deny.format, status=503)), REFUSED[0])
    body: dict[str, Any] = json.loads(told.body)
    assert (told.status, body.get("status", body.get("error", {}).get("code"))) == (503, 503)


def test_a_refusal_without_a_format_has_a_status_and_headers_only() -> None:
    assert tell(rule(deny=Deny(status=503)), REFUSED[0]) == ((), b"", 503)


def test_a_template_can_tell_everything_there_is_to_tell() -> None:
    holes = "|".join(f"${{{hole.value}}}" for hole in Hole)
    five = Limit(10, Unit.MINUTE, unit_multiplier=5)
    later = rule(Limit(1, Unit.SECOND), path="edge.path"), [Reading(0, 400_000, 400_000)]
    said = rule(five, deny=text(f"{holes} grün"))
    told = Answers(AnswerOptions()).tell(decided(Met(*later), Met(said, REFUSED[:1])))
    assert told.body.decode() == (
        "edge|edge.user|5 minutes|10|5 minutes|45|45|2026-01-25T14:32:00Z|2026-01-25T14:31:15Z grün"
    )
    assert told.headers == (("Content-Type", "text/plain; charset=utf-8"),)


def test_retry_after_is_the_call_s_and_reset_is_the_limit_s() -> None:
    first = Met(rule(path="edge.path"), [Reading(0, 60 * SECOND, 60 * SECOND)])
    said = rule(deny=text("${retry_after} ${reset_after}"))
    told = Answers(AnswerOptions()).tell(decided(first, Met(said, [Reading(0, 5 * SECOND, 60 * SECOND)])))
    assert told.body == b"60 5"


@pytest.mark.parametrize("content_type", ["application/json", "application/vnd.acme+JSON; charset=utf-8"])
def test_values_in_a_template_of_json_are_escaped(content_type: str) -> None:
    deny = text('{"rule": "${rule}", "in": ${retry_after}}', content_type)
    told = tell(rule(path='edge.a_"\\\nü', deny=deny), REFUSED[0])
    assert json.loads(told.body) == {"rule": 'edge.a_"\\\nü', "in": 45}
    assert told.headers == (("Content-Type", content_type),)


def test_values_in_a_template_of_html_are_escaped() -> None:
    told = tell(rule(path="edge.<b>&", deny=text("<p>${rule}</p>", "text/html")), REFUSED[0])
    assert told.body == b"<p>edge.&lt;b&gt;&amp;</p>"


def test_a_content_type_cannot_end_its_line() -> None:
    told = tell(rule(deny=text("x", "text/plain\r\nSet-Cookie: a=b")), REFUSED[0])
    assert told.headers == (("Content-Type", "text/plain%0D%0ASet-Cookie: a=b"),)


def test_a_moment_after_the_last_year_is_the_last_moment() -> None:
    body = json.loads(tell(rule(deny=JSON), Reading(-(2**40), 2**62, 2**62)).body)
    assert body["error"]["details"]["reset_at"] == "9999-12-31T23:59:59Z"
