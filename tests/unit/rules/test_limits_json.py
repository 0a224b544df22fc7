"""JSON limits compile like rules, and their errors name the field."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.model import Algorithm, Limit, Unit
from ratelimit_rls.errors import RulesError
from ratelimit_rls.identity.accounts import limit_fields
from ratelimit_rls.rules.limits_json import MAX_LIMITS, read_limits

MINUTE = {"unit": "minute", "requests_per_unit": 100}


def test_json_limits_compile_like_rules() -> None:
    bucket = {**MINUTE, "algorithm": "token_bucket", "burst": 20}
    month = {"unit": "month", "requests_per_unit": 9, "calendar": True, "timezone": "Europe/Berlin"}

    limits = read_limits([bucket, month, {"unit": "hour", "requests_per_unit": 0, "unit_multiplier": 2, "burst": None}])

    assert limits == (
        Limit(100, Unit.MINUTE, Algorithm.TOKEN_BUCKET, burst=20),
        Limit(9, Unit.MONTH, timezone="Europe/Berlin"),
        Limit(0, Unit.HOUR, unit_multiplier=2),
    )
    assert read_limits([limit_fields(limit) for limit in limits]) == limits
    assert read_limits([]) == ()


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({}, "limits", "must be a list of limits"),
        ("x", "limits", "must be a list of limits"),
        (None, "limits", "must be a list of limits"),
        ([MINUTE, 5], "limits[1]", "must be a limit, e.g."),
        ([MINUTE, {**MINUTE, "unit": "minuet"}], "limits[1].unit", "did you mean 'minute'?"),
        ([{**MINUTE, "unit": ["minute"]}], "limits[0].unit", "must be text, a number, true or false"),
        ([{**MINUTE, "requests_per_unit": "5"}], "limits[0].requests_per_unit", "cannot unmarshal !!str `5`"),
        ([{**MINUTE, "requests_per_unit": -1}], "limits[0].requests_per_unit", "from 0 to 4294967295"),
        ([{**MINUTE, "requests_per_unit": 5.5}], "limits[0].requests_per_unit", "5.5 is neither text nor"),
        ([{**MINUTE, "requests_per_unit": 10**5000}], "limits[0].requests_per_unit", "neither text nor a whole number"),
        ([{**MINUTE, "requests_per_unit": float("nan")}], "limits[0].requests_per_unit", "cannot unmarshal"),
        ([{**MINUTE, "calendar": 1}], "limits[0].calendar", "true or false"),
        ([{**MINUTE, "burst": 5}], "limits[0].burst", "burst has no meaning for algorithm fixed_window"),
        ([{"unit": "minute"}], "limits[0]", "'requests_per_unit' is missing"),
        ([{"requests_per_unit": 5}], "limits[0]", "invalid rate limit unit ''"),
        (
            [{**MINUTE, "name": "x"}],
            "limits[0]",
            "unknown key 'name'; allowed here: unit, requests_per_unit, algorithm",
        ),
        ([{**MINUTE, 5: "x"}], "limits[0]", "unknown key '5'"),  # type: ignore[misc]
        ([MINUTE, {**MINUTE, "requests_per_unit": 7}], "limits[1]", "share a counter"),
        ([MINUTE] * (MAX_LIMITS + 1), "limits", "at most 16 are allowed"),
    ],
)
def test_json_limit_error_names_its_field(fields: object, field: str, message: str) -> None:
    with pytest.raises(RulesError) as raised:
        read_limits(fields)
    (problem,) = raised.value.problems
    assert (problem.file, problem.line) == (field, 0)
    assert message in problem.message
    assert str(raised.value).startswith(f"{field}: error: ")
    assert "line " not in problem.message


def test_all_json_limit_errors_use_the_given_field_name() -> None:
    with pytest.raises(RulesError) as raised:
        read_limits([{**MINUTE, "unit": "x"}, {**MINUTE, "algorithm": "y"}], "override.limits")
    assert [problem.file for problem in raised.value.problems] == [
        "override.limits[0].unit",
        "override.limits[1].algorithm",
    ]
