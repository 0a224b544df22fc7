"""Exact headers of every family, for an allowed and for a denied call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import http_sf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimit_rls.api.responses import ResponseBuilder, ResponseOptions
from ratelimit_rls.core.decision import decision_of, deny_without_store
from ratelimit_rls.core.model import (
    Algorithm,
    Code,
    Decision,
    DescriptorPlan,
    Limit,
    Penalty,
    PlanTemplate,
    Reading,
    Rule,
    Unit,
    WarnAt,
    WarningState,
)
from ratelimit_rls.core.response_policy import DenyResponse, HeaderFamily, ResponsePolicy
from ratelimit_rls.core.template import Template
from tests.unit.transport.decisions import (
    DAY_LIMIT,
    MINUTE_LIMIT,
    NOW_US,
    SECOND,
    TO_DAY_US,
    TO_MINUTE_US,
    WRITTEN,
    Matched,
    decided,
    rule,
)

PASSING = Reading(847, 0, TO_MINUTE_US), Reading(95_234, 0, TO_DAY_US)
DENIED = Reading(0, TO_MINUTE_US, TO_MINUTE_US), Reading(98_766, 0, TO_DAY_US)
PENALTY = Penalty(3600 * SECOND, 1, (2, 4))


def lines(decision: Decision, options: ResponseOptions | None = None) -> list[str]:
    return [f"{name}: {value}" for name, value in ResponseBuilder(options or ResponseOptions()).build(decision).headers]


def both(family: HeaderFamily, *more: HeaderFamily) -> tuple[list[str], list[str]]:
    """Return the headers for a minute and a day limit, of an allowed and of a denied call."""
    matched_rule = rule(MINUTE_LIMIT, DAY_LIMIT, headers=(family, *more))
    return lines(decided(Matched(matched_rule, PASSING))), lines(decided(Matched(matched_rule, DENIED)))


def test_reference_headers() -> None:
    passed, denied = both(HeaderFamily.REFERENCE)
    assert passed == ["RateLimit-Limit: 1000", "RateLimit-Remaining: 847", "RateLimit-Reset: 45"]
    assert denied == ["RateLimit-Limit: 1000", "RateLimit-Remaining: 0", "RateLimit-Reset: 45"]


def test_reference_headers_have_configurable_names() -> None:
    options = ResponseOptions(limit_header="L", remaining_header="R", reset_header="T")
    matched_rule = rule(headers=[HeaderFamily.REFERENCE])
    assert lines(decided(Matched(matched_rule, PASSING[:1])), options) == ["L: 1000", "R: 847", "T: 45"]


@pytest.mark.parametrize(("enabled", "sent"), [(False, 0), (True, 3)])
def test_reference_headers_are_the_default_if_enabled(enabled: bool, sent: int) -> None:
    assert len(lines(decided(Matched(rule(), PASSING[:1])), ResponseOptions(headers_enabled=enabled))) == sent


def test_empty_choice_sends_no_headers() -> None:
    assert lines(decided(Matched(rule(headers=[]), PASSING[:1])), ResponseOptions(headers_enabled=True)) == []


def test_legacy_reset_is_in_seconds() -> None:
    passed, denied = both(HeaderFamily.LEGACY)
    assert passed == ["X-RateLimit-Limit: 1000", "X-RateLimit-Remaining: 847", "X-RateLimit-Reset: 45"]
    assert denied == ["X-RateLimit-Limit: 1000", "X-RateLimit-Remaining: 0", "X-RateLimit-Reset: 45"]


def test_legacy_epoch_reset_is_rounded_up() -> None:
    passed, denied = both(HeaderFamily.LEGACY_EPOCH)
    full_minute = (NOW_US + TO_MINUTE_US) // SECOND
    assert full_minute * SECOND == NOW_US + TO_MINUTE_US
    assert passed[2] == denied[2] == f"X-RateLimit-Reset: {full_minute}"
    later = rule(headers=[HeaderFamily.LEGACY_EPOCH])
    assert lines(decided(Matched(later, [Reading(5, 0, 1)])))[2] == f"X-RateLimit-Reset: {NOW_US // SECOND + 1}"


def test_legacy_remaining_is_capped_at_the_limit() -> None:
    bucket = Limit(1000, Unit.MINUTE, Algorithm.TOKEN_BUCKET, burst=1500)
    matched_rule = rule(bucket, headers=[HeaderFamily.LEGACY, HeaderFamily.IETF])
    sent = lines(decided(Matched(matched_rule, [Reading(1499, 0, 60_000)])))
    assert sent[:2] == ["X-RateLimit-Limit: 1000", "X-RateLimit-Remaining: 1000"]
    assert sent[4] == 'RateLimit: "edge.user:minute";r=1499;t=1'


def test_each_window_has_its_own_headers() -> None:
    passed, denied = both(HeaderFamily.WINDOWS)
    assert passed == [
        "X-RateLimit-Limit-Minute: 1000",
        "X-RateLimit-Remaining-Minute: 847",
        "X-RateLimit-Reset-Minute: 2026-01-25T14:32:00Z",
        "X-RateLimit-Limit-Day: 100000",
        "X-RateLimit-Remaining-Day: 95234",
        "X-RateLimit-Reset-Day: 2026-01-26T00:00:00Z",
    ]
    assert denied == [
        "X-RateLimit-Limit-Minute: 1000",
        "X-RateLimit-Remaining-Minute: 0",
        "X-RateLimit-Reset-Minute: 2026-01-25T14:32:00Z",
        "X-RateLimit-Limit-Day: 100000",
        "X-RateLimit-Remaining-Day: 98766",
        "X-RateLimit-Reset-Day: 2026-01-26T00:00:00Z",
    ]


def test_window_remaining_is_capped_at_the_limit() -> None:
    bucket = Limit(1000, Unit.MINUTE, Algorithm.TOKEN_BUCKET, burst=1500)
    for left, sent in ((1499, 1000), (7, 7)):
        passed = lines(decided(Matched(rule(bucket, headers=[HeaderFamily.WINDOWS]), [Reading(left, 0, 60_000)])))
        assert passed[:2] == ["X-RateLimit-Limit-Minute: 1000", f"X-RateLimit-Remaining-Minute: {sent}"]


def test_ietf_lists_all_limits_and_for_denials_the_denying_ones() -> None:
    passed, denied = both(HeaderFamily.IETF)
    policy = 'RateLimit-Policy: "edge.user:minute";q=1000;w=60, "edge.user:day";q=100000;w=86400'
    assert passed == [policy, 'RateLimit: "edge.user:minute";r=847;t=45, "edge.user:day";r=95234;t=34125']
    assert denied == [policy, 'RateLimit: "edge.user:minute";r=0;t=45']


def test_ietf_omits_calendar_lengths_and_shadow_limits() -> None:
    month = Limit(5, Unit.MONTH, timezone="Europe/Berlin", name="monthly")
    matched_rule, shadow = rule(month, headers=[HeaderFamily.IETF]), rule(path="edge.path", shadow_mode=True)
    sent = lines(decided(Matched(shadow, [Reading(900, 0, 1)]), Matched(matched_rule, [Reading(4, 0, 1)])))
    assert sent == ['RateLimit-Policy: "monthly";q=5', 'RateLimit: "monthly";r=4;t=1']


@pytest.mark.parametrize("family", HeaderFamily)
def test_decision_without_store_has_headers_although_a_limit_cannot_deny(family: HeaderFamily) -> None:
    """One of two quotas is in shadow mode: the call passes, and nothing is known of that limit."""
    quota = rule(headers=[family], quota_mode=True)
    shadow = rule(path="edge.path", headers=[family], quota_mode=True, shadow_mode=True)
    template = decided(Matched(quota, PASSING[:1]), Matched(shadow, PASSING[:1])).template
    decision = deny_without_store(template, NOW_US)
    assert decision.code is Code.OK
    assert all(line.isascii() for line in lines(decision))


def test_retry_after_is_the_longest_wait_rounded_up() -> None:
    passed, denied = both(HeaderFamily.RETRY_AFTER)
    assert (passed, denied) == ([], ["Retry-After: 45"])
    first, last = rule(headers=[HeaderFamily.RETRY_AFTER]), rule(path="edge.path", headers=[HeaderFamily.RETRY_AFTER])
    long, short = Reading(0, 9_000_001, 9_000_001), Reading(0, 1, 1)
    assert lines(decided(Matched(first, [long]), Matched(last, [short]))) == ["Retry-After: 10"]
    assert lines(decided(Matched(first, [short]))) == ["Retry-After: 1"]


def test_call_that_can_never_pass_reports_full_recovery() -> None:
    assert lines(decided(Matched(rule(headers=[HeaderFamily.RETRY_AFTER]), [Reading(3, -1, 7 * SECOND)]))) == [
        "Retry-After: 7"
    ]


def test_retry_after_is_not_earlier_than_ietf_resets() -> None:
    matched_rule = rule(MINUTE_LIMIT, DAY_LIMIT, headers=[HeaderFamily.IETF, HeaderFamily.RETRY_AFTER])
    assert lines(decided(Matched(matched_rule, [Reading(0, -1, 0), Reading(0, 2 * SECOND, 2 * SECOND)])))[1:] == [
        'RateLimit: "edge.user:minute";r=0;t=0, "edge.user:day";r=0;t=1',
        "Retry-After: 1",
    ]


def test_jitter_is_added_to_retry_after_only() -> None:
    drawn: list[int] = []

    def draw(below: int) -> int:
        drawn.append(below)
        return len(drawn) + 1

    answers = ResponseBuilder(ResponseOptions(), draw)
    style = ResponsePolicy((HeaderFamily.IETF, HeaderFamily.RETRY_AFTER), retry_jitter_us=4_500_000)
    denied = decided(Matched(rule(style=style), DENIED[:1]))
    sent = [dict(answers.build(denied).headers) for _ in range(2)]
    assert [one["Retry-After"] for one in sent] == ["47", "48"]
    assert sent[0]["RateLimit"] == 'RateLimit: "edge.user:minute";r=0;t=45'.partition(": ")[2]
    assert drawn == [6, 6]  # zero to five seconds
    assert answers.rule_metadata(denied)["rule"]["retry_after"] == 45
    answers.build(decided(Matched(rule(style=style), PASSING[:1])))
    assert len(drawn) == 2


def test_rule_header_has_no_spaces() -> None:
    matched_rule = rule(path='edge.path_/a b\r\nSet-Cookie: x.größe_"', headers=[HeaderFamily.RULE])
    assert lines(decided(Matched(matched_rule, PASSING[:1]))) == [
        'X-RateLimit-Rule: edge.path_/a%20b%0D%0ASet-Cookie:%20x.gr%C3%B6%C3%9Fe_"'
    ]


def test_override_limit_is_reported_without_request_values() -> None:
    brought = rule(path="edge.user_secret", position=None, headers=[HeaderFamily.RULE, HeaderFamily.IETF])
    sent = lines(decided(Matched(brought, PASSING[:1])))
    assert sent[0] == "X-RateLimit-Rule: edge.(request)"
    assert sent[1] == 'RateLimit-Policy: "edge.(request):minute";q=1000;w=60'
    assert "secret" not in str(ResponseBuilder(ResponseOptions()).rule_metadata(decided(Matched(brought, PASSING[:1]))))


@pytest.mark.parametrize("state", list(WarningState))
def test_rules_with_warn_at_always_send_their_state(state: WarningState) -> None:
    for headers, before in ((None, 0), ([HeaderFamily.LEGACY], 3)):
        warns = rule(headers=headers, warn_at=WarnAt(800))
        sent = lines(decided(Matched(warns, [PASSING[0], Reading(int(state), 0, 0)])))
        assert sent[before:] == [f"X-RateLimit-State: {state.name.lower()}"]


def test_cooldown_denies_all_limits_of_the_descriptor() -> None:
    matched_rule = rule(MINUTE_LIMIT, DAY_LIMIT, headers=[HeaderFamily.IETF, HeaderFamily.RETRY_AFTER], penalty=PENALTY)
    cooldown = Reading(2, 90 * SECOND, 3600 * SECOND)
    assert lines(decided(Matched(matched_rule, [*PASSING, cooldown])))[1:] == [
        'RateLimit: "edge.user:minute";r=0;t=90, "edge.user:day";r=0;t=90',
        "Retry-After: 90",
    ]
    windows = rule(headers=[HeaderFamily.WINDOWS], penalty=PENALTY)
    assert lines(decided(Matched(windows, [PASSING[0], cooldown])))[1:] == [
        "X-RateLimit-Remaining-Minute: 0",
        "X-RateLimit-Reset-Minute: 2026-01-25T14:32:46Z",
    ]


def test_header_choice_is_that_of_the_reported_descriptor() -> None:
    short, plain = rule(headers=[HeaderFamily.RULE]), rule(path="edge.path")
    assert lines(decided(Matched(short, [Reading(1, 0, 1)]), Matched(plain, [Reading(2, 0, 1)]))) == [
        "X-RateLimit-Rule: edge.user"
    ]
    assert lines(decided(Matched(short, [Reading(3, 0, 1)]), Matched(plain, [Reading(2, 0, 1)]))) == []


def test_global_shadow_mode_responses_are_allowed() -> None:
    matched_rule = rule(headers=[HeaderFamily.RETRY_AFTER, HeaderFamily.LEGACY])
    sent = ResponseBuilder(ResponseOptions()).build(decided(Matched(matched_rule, DENIED[:1]), shadow_mode=True))
    assert (sent.status, sent.body, dict(sent.headers)["X-RateLimit-Remaining"]) == (200, b"", "0")
    assert "Retry-After" not in dict(sent.headers)


@pytest.mark.parametrize(
    ("quotas_s", "limit_s", "sent"),
    [([50, 20], 0, "20"), ([50, 20], 30, "30"), ([50, 40], 30, "40"), ([50, 0], 30, "30")],
    ids=[
        "the first quota to come back",
        "the limit, by then a quota is back",
        "the quota",
        "quotas that do not deny",
    ],
)
def test_retry_after_is_the_first_quota_to_recover(quotas_s: list[int], limit_s: int, sent: str) -> None:
    families = [HeaderFamily.RETRY_AFTER, HeaderFamily.IETF, HeaderFamily.RULE]
    quotas = [
        Matched(rule(path=f"edge.{n}", headers=families, quota_mode=True), [Reading(0, wait * SECOND, 60 * SECOND)])
        for n, wait in enumerate(quotas_s)
    ]
    limit = Matched(rule(path="edge.limit", headers=families), [Reading(0, limit_s * SECOND, 60 * SECOND)])
    decision = decided(limit, *quotas)
    headers = dict(ResponseBuilder(ResponseOptions()).build(decision).headers)
    assert headers["Retry-After"] == sent
    listed: Any = http_sf.parse(headers["RateLimit"].encode(), tltype="list")
    assert max(item[1]["t"] for item in listed) == int(sent)
    assert headers["X-RateLimit-Rule"] == ("edge.limit" if limit_s else "edge.1")
    assert ResponseBuilder(ResponseOptions()).rule_metadata(decision)["rule"] == {
        "path": headers["X-RateLimit-Rule"],
        "window": "minute",
        "retry_after": int(sent),
    }


@pytest.mark.parametrize(
    ("never_whole_s", "penalty"),
    [(0, None), (7, None), (0, Reading(2, 90 * SECOND, 3600 * SECOND))],
    ids=["never used", "used", "in a cooldown"],
)
def test_quota_that_can_never_fit_the_call_is_not_waited_for(never_whole_s: int, penalty: Reading | None) -> None:
    """Ten hits never fit into five an hour; another quota has ten again in six minutes."""
    headers = [HeaderFamily.RETRY_AFTER, HeaderFamily.RULE]
    small = Limit(5, Unit.HOUR, Algorithm.GCRA)
    watched = {"penalty": PENALTY} if penalty else {}
    never = Matched(
        rule(small, path="edge.a", headers=headers, quota_mode=True, **watched),
        [Reading(5, -1, never_whole_s * SECOND), *([penalty] if penalty else [])],
    )
    back = Matched(
        rule(Limit(100, Unit.HOUR), path="edge.b", headers=headers, quota_mode=True),
        [Reading(0, 360 * SECOND, 3600 * SECOND)],
    )
    for matched in ((never, back), (back, never)):
        sent = dict(ResponseBuilder(ResponseOptions()).build(decided(*matched)).headers)
        assert (sent["Retry-After"], sent["X-RateLimit-Rule"]) == ("360", "edge.b")


def test_if_no_quota_can_fit_the_first_full_recovery_is_reported() -> None:
    quotas = [
        Matched(
            rule(path=f"edge.{s}", headers=[HeaderFamily.RETRY_AFTER], quota_mode=True), [Reading(3, -1, s * SECOND)]
        )
        for s in (50, 20)
    ]
    assert lines(decided(*quotas)) == ["Retry-After: 20"]


def test_deny_headers_replace_family_headers() -> None:
    headers = (("retry-after", Template.parse("${retry_after}")), ("X-Why", Template.parse("${rule} ü\n${window}")))
    matched_rule = rule(headers=[HeaderFamily.RETRY_AFTER, HeaderFamily.RULE], deny=DenyResponse(headers=headers))
    assert lines(decided(Matched(matched_rule, DENIED[:1]))) == [
        "X-RateLimit-Rule: edge.user",
        "retry-after: 45",
        "X-Why: edge.user %C3%BC%0Aminute",
    ]
    assert lines(decided(Matched(matched_rule, PASSING[:1]))) == ["X-RateLimit-Rule: edge.user"]


def test_call_without_a_limit_has_no_headers() -> None:
    sent = ResponseBuilder(ResponseOptions(headers_enabled=True)).build(decided())
    assert sent == ((), b"", 200)
    assert ResponseBuilder(ResponseOptions()).rule_metadata(decided()) == {}


def test_exempting_rule_is_reported_if_no_limit_applied() -> None:
    exempt = DescriptorPlan(Rule("edge.staff", (), position=WRITTEN), (), 1, unlimited=True)
    decision = decision_of(PlanTemplate("edge", True, (), (DescriptorPlan(None, (), 1), exempt)), None)
    assert ResponseBuilder(ResponseOptions()).rule_metadata(decision) == {
        "rule": {"path": "edge.staff", "unlimited": True}
    }


names = st.text(max_size=12) | st.sampled_from(["a", 'q"', "b\\", "naïve", "x\r\ny", ""])
limits = st.builds(
    Limit,
    st.integers(0, 2**32 - 1),
    st.sampled_from(Unit),
    st.sampled_from(Algorithm),
    name=names,
    unit_multiplier=st.integers(1, 5),
    timezone=st.sampled_from(["", "UTC", "Europe/Berlin", "Etc/GMT+1", "Etc/GMT-1"]),
)
readings = st.builds(
    Reading, st.integers(-(2**60), 2**60), st.integers(-1, 3) | st.integers(0, 2**70), st.integers(0, 2**70)
)

EVERY = [
    family for family in HeaderFamily if family is not HeaderFamily.LEGACY_EPOCH
]  # has the same header names as LEGACY


@st.composite
def any_call(draw: st.DrawFn) -> Decision:
    matched: list[Matched] = []
    for _ in range(draw(st.integers(1, 4))):
        chosen: Sequence[Limit] = draw(st.lists(limits, min_size=1, max_size=4))
        matched_rule = rule(
            *chosen,
            path=draw(names),
            headers=EVERY,
            quota_mode=draw(st.booleans()),
            shadow_mode=draw(st.booleans()),
        )
        matched.append(Matched(matched_rule, [draw(readings) for _ in chosen]))
    return decided(*matched, shadow_mode=draw(st.booleans()))


@given(any_call())
def test_headers_are_always_well_formed(decision: Decision) -> None:
    sent = ResponseBuilder(ResponseOptions()).build(decision).headers
    for name, value in sent:
        assert all(char.isascii() and (char.isalnum() or char == "-") for char in name)
        assert value.isascii()
        assert value.isprintable()
    assert len({name.lower() for name, _ in sent}) == len(sent)
    headers = dict(sent)
    policies = structured(headers, "RateLimit-Policy")
    current = structured(headers, "RateLimit")
    listed = [name for name, _ in policies]
    assert len(set(listed)) == len(listed)
    assert {name for name, _ in current} <= set(listed)
    for _, parameters in policies:
        assert set(parameters) <= {"q", "w"}
        assert 0 <= parameters["q"] < 2**32
        assert parameters.get("w", 1) > 0
    for _, parameters in current:
        assert set(parameters) == {"r", "t"}
        assert parameters["r"] >= 0
        assert 0 <= parameters["t"] <= int(headers.get("Retry-After", 10**15))
    assert ("Retry-After" in headers) == (decision.code == 2)


def structured(headers: dict[str, str], name: str) -> list[tuple[str, dict[str, Any]]]:
    """Parse a field as a list of strings with parameters; a missing field is an empty list."""
    if name not in headers:
        return []
    parsed: Any = http_sf.parse(headers[name].encode(), tltype="list")
    assert all(isinstance(item[0], str) and not isinstance(item[0], http_sf.Token) for item in parsed)
    return parsed
