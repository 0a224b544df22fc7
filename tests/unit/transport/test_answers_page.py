"""The examples in docs/answers.md match the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ratelimit_rls.api.responses import ResponseBuilder, ResponseOptions, ResponseParts
from ratelimit_rls.core.model import Reading
from ratelimit_rls.core.response_policy import BodyFormat, DenyResponse, HeaderFamily
from tests.unit.transport.decisions import DAY_LIMIT, MINUTE_LIMIT, TO_DAY_US, TO_MINUTE_US, Matched, decided, rule

PAGE = (Path(__file__).parents[3] / "docs" / "answers.md").read_text()
EXAMPLES = re.findall(r"```http\n(HTTP/1.1 200 .*?)\n\n(HTTP/1.1 429 .*?)\n```", PAGE, re.DOTALL)
BODIES = [json.loads(body) for body in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)]

PASSING = Reading(847, 0, TO_MINUTE_US), Reading(95_234, 0, TO_DAY_US)
DENIED = Reading(0, TO_MINUTE_US, TO_MINUTE_US), Reading(98_766, 0, TO_DAY_US)


def respond(
    readings: tuple[Reading, ...], headers: tuple[HeaderFamily, ...] = (), deny: DenyResponse | None = None
) -> ResponseParts:
    matched_rule = rule(MINUTE_LIMIT, DAY_LIMIT, path="edge.tenant", headers=headers, deny=deny)
    return ResponseBuilder(ResponseOptions()).build(
        decided(Matched(matched_rule, readings)), "550e8400-e29b-41d4-a716-446655440000"
    )


@pytest.mark.parametrize(
    ("families", "example"),
    list(
        zip(
            [
                (HeaderFamily.REFERENCE,),
                (HeaderFamily.LEGACY_EPOCH,),
                (HeaderFamily.WINDOWS,),
                (HeaderFamily.IETF,),
                (HeaderFamily.RETRY_AFTER, HeaderFamily.RULE),
            ],
            EXAMPLES,
            strict=True,
        )
    ),
)
def test_documented_headers_match_the_code(families: tuple[HeaderFamily, ...], example: tuple[str, str]) -> None:
    for readings, documented in zip((PASSING, DENIED), example, strict=True):
        assert [f"{name}: {value}" for name, value in respond(readings, families).headers] == documented.splitlines()[
            1:
        ]


@pytest.mark.parametrize("body_format", [BodyFormat.JSON, BodyFormat.PROBLEM])
def test_documented_bodies_match_the_code(body_format: BodyFormat) -> None:
    assert json.loads(respond(DENIED, deny=DenyResponse(body_format)).body) in BODIES
