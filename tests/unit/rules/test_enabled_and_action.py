"""Compilation of `enabled` and `action`: disabled rules, synonyms, and throttling."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.model import Algorithm, Charge, Limit, Rule, Unit
from ratelimit_rls.errors import RulesError
from ratelimit_rls.rules.compile import compile_documents

LIMIT = "rate_limit: {unit: minute, requests_per_unit: 5}"


def rule(written: str, domain_keys: str = "") -> Rule | None:
    text = f"domain: d\n{domain_keys}\ndescriptors:\n- key: k\n  {written}"
    return compile_documents({"f": text.encode()}).tree.domains["d"].by_key["k"].rule


def test_disabled_rule_is_still_checked() -> None:
    assert rule(f"enabled: false\n  {LIMIT}") is None
    assert rule(f"enabled: true\n  {LIMIT}") is not None
    with pytest.raises(RulesError, match="invalid rate limit unit"):
        rule("enabled: false\n  rate_limit: {unit: fortnight, requests_per_unit: 5}")


def test_actions_are_synonyms_of_shadow_mode_and_unlimited() -> None:
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
def test_rules_with_new_keys_default_to_charge_admitted(written: str) -> None:
    found = rule(written)

    assert found is not None
    assert found.charge is Charge.ADMITTED


class TestThrottle:
    def test_throttle_defaults_to_an_even_stream(self) -> None:
        found = rule(f"action: throttle\n  {LIMIT}")

        assert found is not None
        assert found.limits == (Limit(5, Unit.MINUTE, Algorithm.LEAKY_BUCKET, burst=1),)
        assert found.max_delay_us == 1_000_000

    def test_throttle_keeps_explicit_values(self) -> None:
        limit = f"{LIMIT[:-1]}, algorithm: gcra, burst: 3}}"
        found = rule(f"action: throttle\n  max_delay: 60s\n  {limit}")

        assert found is not None
        assert found.limits == (Limit(5, Unit.MINUTE, Algorithm.GCRA, burst=3),)
        assert found.max_delay_us == 60_000_000

    def test_windows_next_to_a_queue_stay_windows(self) -> None:
        queue = "{unit: second, requests_per_unit: 9, algorithm: token_bucket}"
        found = rule(
            f"action: throttle\n  limits: [{queue}, {{unit: day, requests_per_unit: 8}}, "
            "{unit: month, requests_per_unit: 7, calendar: true}]"
        )

        assert found is not None
        assert [(limit.algorithm, limit.burst) for limit in found.limits] == [
            (Algorithm.TOKEN_BUCKET, 1),
            (Algorithm.FIXED_WINDOW, 0),
            (Algorithm.FIXED_WINDOW, 0),
        ]

    def test_throttle_with_zero_limit_is_not_an_error(self) -> None:
        assert rule("action: throttle\n  rate_limit: {unit: day, requests_per_unit: 0}") is not None

    @pytest.mark.parametrize("charge", ["", "charge: admitted", "charge: always"])
    def test_throttle_charges_admitted_whatever_the_domain_says(self, charge: str) -> None:
        found = rule(f"action: throttle\n  {LIMIT}", charge)

        assert found is not None
        assert found.charge is Charge.ADMITTED

    @pytest.mark.parametrize("action", ["reject", "log_only", "allow"])
    def test_other_actions_have_no_delay(self, action: str) -> None:
        found = rule(f"action: {action}\n  {LIMIT}")

        assert found is not None
        assert found.max_delay_us == 0
