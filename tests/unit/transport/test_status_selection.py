"""Selection of the headline status, and dynamic metadata."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from google.protobuf import json_format
from google.protobuf.struct_pb2 import Struct

from ratelimit_rls.api.responses.dynamic_metadata import describe_request, encode_struct, merge_rule_metadata
from ratelimit_rls.api.responses.status_selection import headline_status
from ratelimit_rls.core.model import (
    Charge,
    Code,
    Decision,
    Descriptor,
    DescriptorPlan,
    Entry,
    Limit,
    LimitOverride,
    PlanTemplate,
    Request,
    Rule,
    Status,
    Step,
    Unit,
)

LIMIT = Limit(10, Unit.MINUTE)


def decision(*statuses: tuple[Code, int | None, bool], metadata: tuple[dict[str, Any], ...] = ()) -> Decision:
    """Return a decision from statuses (code, remaining or None for no limit, is a quota)."""
    steps: list[Step] = []
    built: list[Status] = []
    for index, (code, remaining, quota) in enumerate(statuses):
        rule = Rule("a.b", (LIMIT,), metadata=metadata[index] if metadata else None)
        if remaining is None:
            built.append(Status(code, None, 0, 0, DescriptorPlan(rule, (), 1)))
            continue
        steps.append(Step(LIMIT, 1, Charge.ALWAYS, False, quota))
        built.append(Status(code, steps[-1], remaining, 0, DescriptorPlan(rule, (steps[-1],), 1)))
    template = PlanTemplate("a", True, tuple(steps), tuple(status.descriptor_plan for status in built))
    return Decision(Code.OK, tuple(built), template)


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
    ids=["no-limit", "only-limit", "first-of-least", "last-denial", "quota", "denial-over-quota", "first-quota"],
)
def test_headline_status(statuses: list[tuple[Code, int | None, bool]], chosen: int | None) -> None:
    made = decision(*statuses)
    assert headline_status(made) is (None if chosen is None else made.statuses[chosen])


def test_request_description_matches_envoyproxy_ratelimit() -> None:
    request = Request(
        "edge",
        (
            Descriptor((Entry("a", "b"), Entry("c", "")), LimitOverride(10, Unit.MINUTE), hits=0),
            Descriptor((Entry("d", "e"),)),
        ),
        hits=7,
    )
    assert describe_request(request) == {
        "domain": "edge",
        "descriptors": [
            {"entries": ["a=b", "c="], "limit": "requests_per_unit:10 unit:MINUTE", "hitsAddend": 0},
            {"entries": ["d=e"]},
        ],
        "hitsAddend": 7,
    }
    assert "hitsAddend" not in describe_request(Request("edge", request.descriptors))


def test_rule_metadata_is_merged_with_precedence_of_the_first() -> None:
    rules = (
        {"plan": "free", "deep": {"a": 1, "list": [1]}},
        {"denied": True},
        {"plan": "paid", "deep": {"a": 2, "b": {"c": 3}, "list": [2]}, "extra": None},
        {"unlimited": True},
    )
    made = decision((OK, 5, False), (OVER, 0, False), (OK, 0, False), (OK, None, False), metadata=rules)
    assert merge_rule_metadata(made) == {"plan": "free", "deep": {"a": 1, "list": [1], "b": {"c": 3}}, "extra": None}
    assert rules[0] == {"plan": "free", "deep": {"a": 1, "list": [1]}}, "the rules themselves stay as they are"


def test_values_that_json_cannot_express_become_strings() -> None:
    odd = {"huge": 10**400, "nan": float("nan"), "day": datetime.date(2020, 1, 2), 5: [True, None, {"x": 1}]}
    message = Struct.FromString(encode_struct({"odd": odd}))
    assert json_format.MessageToDict(message)["odd"] == {
        "huge": str(10**400),
        "nan": "nan",
        "day": "2020-01-02",
        "5": [True, None, {"x": 1}],
    }
