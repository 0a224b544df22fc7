"""docs/answers.md shows what is really told."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ratelimit_rls.core.model import Reading
from ratelimit_rls.core.style import BodyFormat, Deny, Family
from ratelimit_rls.transport.answers import AnswerOptions, Answers, Told
from tests.unit.transport.decisions import DAY_LIMIT, MINUTE_LIMIT, TO_DAY_US, TO_MINUTE_US, Met, decided, rule

PAGE = (Path(__file__).parents[3] / "docs" / "answers.md").read_text()
EXAMPLES = re.findall(r"```http\n(HTTP/1.1 200 .*?)\n\n(HTTP/1.1 429 .*?)\n```", PAGE, re.DOTALL)
BODIES = [json.loads(body) for body in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)]

PASSING = Reading(847, 0, TO_MINUTE_US), Reading(95_234, 0, TO_DAY_US)
REFUSED = Reading(0, TO_MINUTE_US, TO_MINUTE_US), Reading(98_766, 0, TO_DAY_US)


def told(readings: tuple[Reading, ...], headers: tuple[Family, ...] = (), deny: Deny | None = None) -> Told:
    said = rule(MINUTE_LIMIT, DAY_LIMIT, path="edge.tenant", headers=headers, deny=deny)
    return Answers(AnswerOptions()).tell(decided(Met(said, readings)), "550e8400-e29b-41d4-a716-446655440000")


@pytest.mark.parametrize(
    ("families", "example"),
    list(
        zip(
            [
                (Family.REFERENCE,),
                (Family.LEGACY_EPOCH,),
                (Family.WINDOWS,),
                (Family.IETF,),
                (Family.RETRY_AFTER, Family.RULE),
            ],
            EXAMPLES,
            strict=True,
        )
    ),
)
def test_headers_are_as_the_page_shows_them(families: tuple[Family, ...], example: tuple[str, str]) -> None:
    for readings, shown in zip((PASSING, REFUSED), example, strict=True):
        assert [f"{name}: {value}" for name, value in told(readings, families).headers] == shown.splitlines()[1:]


@pytest.mark.parametrize("body_format", [BodyFormat.JSON, BodyFormat.PROBLEM])
def test_bodies_are_as_the_page_shows_them(body_format: BodyFormat) -> None:
    assert json.loads(told(REFUSED, deny=Deny(body_format)).body) in BODIES
