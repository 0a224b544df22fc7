"""`enabled` and `action`: rules switched off, and other words for what the reference has."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.model import Charge, Rule
from ratelimit_rls.errors import RulesError
from ratelimit_rls.rules.compile import compile_documents

LIMIT = "rate_limit: {unit: minute, requests_per_unit: 5}"


def rule(written: str) -> Rule | None:
    text = f"domain: d\ndescriptors:\n- key: k\n  {written}"
    return compile_documents({"f": text.encode()}).tree.domains["d"].by_key["k"].rule


def test_a_rule_that_is_switched_off_limits_nothing_but_is_still_checked() -> None:
    assert rule(f"enabled: false\n  {LIMIT}") is None
    assert rule(f"enabled: true\n  {LIMIT}") is not None
    with pytest.raises(RulesError, match="invalid rate limit unit"):
        rule("enabled: false\n  rate_limit: {unit: fortnight, requests_per_unit: 5}")


def test_actions_are_what_the_reference_calls_otherwise() -> None:
    assert rule(f"action: reject\n  {LIMIT}") == rule(f"shadow_mode: false\n  {LIMIT}")
    assert rule(f"action: log_only\n  {LIMIT}") == rule(f"shadow_mode: true\n  {LIMIT}")
    for allowed in (rule(f"action: allow\n  {LIMIT}"), rule("action: allow")):
        assert allowed is not None
        assert allowed.unlimited


@pytest.mark.parametrize(
    "written",
    [
        "limits: [{unit: minute, requests_per_unit: 5}]",
        "rate_limit: {unit: minute, requests_per_unit: 5, unit_multiplier: 2}",
        "rate_limit: {unit: day, requests_per_unit: 5, calendar: true}",
    ],
)
def test_rules_with_new_keys_charge_the_admitted(written: str) -> None:
    found = rule(written)

    assert found is not None
    assert found.charge is Charge.ADMITTED
