"""Which descriptor the headers speak of, and what dynamic metadata says."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from google.protobuf import json_format
from google.protobuf.struct_pb2 import Struct

from ratelimit_rls.core.model import (
    Charge,
    Code,
    Decision,
    Descriptor,
    Entry,
    Limit,
    Outline,
    Override,
    Request,
    Rule,
    Slot,
    Status,
    Step,
    Unit,
)
from ratelimit_rls.transport.answers.subject import spoken_of
from ratelimit_rls.transport.metadata import described, merged, struct

LIMIT = Limit(10, Unit.MINUTE)


def decision(*statuses: tuple[Code, int | None, bool], metadata: tuple[dict[str, Any], ...] = ()) -> Decision:
    """Statuses as (code, remaining or None for no limit, is a quota)."""
    steps: list[Step] = []
    told: list[Status] = []
    for index, (code, remaining, quota) in enumerate(statuses):
        rule = Rule("a.b", (LIMIT,), metadata=metadata[index] if metadata else None)
        if remaining is None:
            told.append(Status(code, None, 0, 0, Slot(rule, (), 1)))
            continue
        steps.append(Step(LIMIT, 1, Charge.ALWAYS, False, quota))
        told.append(Status(code, steps[-1], remaining, 0, Slot(rule, (steps[-1],), 1)))
    outline = Outline("a", True, tuple(steps), tuple(status.slot for status in told))
    return Decision(Code.OK, tuple(told), outline)


OK, OVER = Code.OK, Code.OVER_LIMIT


@pytest.mark.parametrize(
    ("statuses", "chosen"),
    [
        ([(OK, None, False)], None),
        ([(OK, None, False), (OK, 5, False)], 1),
        ([(OK, 5, False), (OK, 3, False), (OK, 3, False)], 1),
        ([(OK, 0, False), (OVER, 0, False), (OVER, 0, False), (OK, 0, False)], 2),
        ([(OVER, 0, True), (OK, 3, False)], 0),
        ([(OVER, 0, True), (OVER, 0, False), (OVER, 0, True)], 1),
        ([(OK, 3, False), (OVER, 0, True), (OVER, 0, True)], 1),
    ],
    ids=["no-limit", "only-limit", "first-of-least", "last-refusal", "quota", "refusal-over-quota", "first-quota"],
)
def test_headers_speak_of(statuses: list[tuple[Code, int | None, bool]], chosen: int | None) -> None:
    made = decision(*statuses)
    assert spoken_of(made) is (None if chosen is None else made.statuses[chosen])


def test_a_request_is_described_in_the_reference_s_words() -> None:
    request = Request(
        "edge",
        (
            Descriptor((Entry("a", "b"), Entry("c", "")), Override(10, Unit.MINUTE), hits=0),
            Descriptor((Entry("d", "e"),)),
        ),
        hits=7,
    )
    assert described(request) == {
        "domain": "edge",
        "descriptors": [
            {"entries": ["a=b", "c="], "limit": "requests_per_unit:10 unit:MINUTE", "hitsAddend": 0},
            {"entries": ["d=e"]},
        ],
        "hitsAddend": 7,
    }
    assert "hitsAddend" not in described(Request("edge", request.descriptors))


def test_metadata_of_what_passed_is_merged_and_the_first_word_counts() -> None:
    rules = (
        {"plan": "free", "deep": {"a": 1, "list": [1]}},
        {"refused": True},
        {"plan": "paid", "deep": {"a": 2, "b": {"c": 3}, "list": [2]}, "extra": None},
        {"unlimited": True},
    )
    made = decision((OK, 5, False), (OVER, 0, False), (OK, 0, False), (OK, None, False), metadata=rules)
    assert merged(made) == {"plan": "free", "deep": {"a": 1, "list": [1], "b": {"c": 3}}, "extra": None}
    assert rules[0] == {"plan": "free", "deep": {"a": 1, "list": [1]}}, "the rules themselves stay as they are"


def test_what_json_cannot_say_becomes_text() -> None:
    odd = {"huge": 10**400, "nan": float("nan"), "day": datetime.date(2020, 1, 2), 5: [True, None, {"x": 1}]}
    message = Struct.FromString(struct({"odd": odd}))
    assert json_format.MessageToDict(message)["odd"] == {
        "huge": str(10**400),
        "nan": "nan",
        "day": "2020-01-02",
        "5": [True, None, {"x": 1}],
    }
