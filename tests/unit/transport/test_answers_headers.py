"""The exact lines of every family of headers, on a call that passes and on one that is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import http_sf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimit_rls.core.decide import decide
from ratelimit_rls.core.model import (
    Algorithm,
    Decision,
    Limit,
    Outline,
    Penalty,
    Reading,
    Rule,
    Slot,
    State,
    Unit,
    WarnAt,
)
from ratelimit_rls.core.style import AnswerStyle, Deny, Family
from ratelimit_rls.core.template import Template
from ratelimit_rls.transport.answers import AnswerOptions, Answers
from tests.unit.transport.decisions import (
    DAY_LIMIT,
    MINUTE_LIMIT,
    NOW_US,
    SECOND,
    TO_DAY_US,
    TO_MINUTE_US,
    WRITTEN,
    Met,
    decided,
    rule,
)

PASSING = Reading(847, 0, TO_MINUTE_US), Reading(95_234, 0, TO_DAY_US)
REFUSED = Reading(0, TO_MINUTE_US, TO_MINUTE_US), Reading(98_766, 0, TO_DAY_US)
PENALTY = Penalty(3600 * SECOND, 1, (2, 4))


def lines(decision: Decision, options: AnswerOptions | None = None) -> list[str]:
    return [f"{name}: {value}" for name, value in Answers(options or AnswerOptions()).tell(decision).headers]


def both(family: Family, *more: Family) -> tuple[list[str], list[str]]:
    """The lines of the seed's example, a minute's and a day's limit, on a pass and on a refusal."""
    said = rule(MINUTE_LIMIT, DAY_LIMIT, headers=(family, *more))
    return lines(decided(Met(said, PASSING))), lines(decided(Met(said, REFUSED)))


def test_the_reference_s_three() -> None:
    passed, refused = both(Family.REFERENCE)
    assert passed == ["RateLimit-Limit: 1000", "RateLimit-Remaining: 847", "RateLimit-Reset: 45"]
    assert refused == ["RateLimit-Limit: 1000", "RateLimit-Remaining: 0", "RateLimit-Reset: 45"]


def test_the_reference_s_three_have_the_names_of_the_settings() -> None:
    options = AnswerOptions(limit_header="L", remaining_header="R", reset_header="T")
    said = rule(headers=[Family.REFERENCE])
    assert lines(decided(Met(said, PASSING[:1])), options) == ["L: 1000", "R: 847", "T: 45"]


@pytest.mark.parametrize(("enabled", "told"), [(False, 0), (True, 3)])
def test_rules_that_choose_nothing_have_the_reference_s_three_if_the_settings_say_so(enabled: bool, told: int) -> None:
    assert len(lines(decided(Met(rule(), PASSING[:1])), AnswerOptions(headers_enabled=enabled))) == told


def test_rules_that_choose_no_headers_have_none() -> None:
    assert lines(decided(Met(rule(headers=[]), PASSING[:1])), AnswerOptions(headers_enabled=True)) == []


def test_legacy_headers_count_seconds() -> None:
    passed, refused = both(Family.LEGACY)
    assert passed == ["X-RateLimit-Limit: 1000", "X-RateLimit-Remaining: 847", "X-RateLimit-Reset: 45"]
    assert refused == ["X-RateLimit-Limit: 1000", "X-RateLimit-Remaining: 0", "X-RateLimit-Reset: 45"]


def test_legacy_headers_name_the_second_in_which_it_is_over_and_never_one_before() -> None:
    passed, refused = both(Family.LEGACY_EPOCH)
    full_minute = (NOW_US + TO_MINUTE_US) // SECOND
    assert full_minute * SECOND == NOW_US + TO_MINUTE_US
    assert passed[2] == refused[2] == f"X-RateLimit-Reset: {full_minute}"
    later = rule(headers=[Family.LEGACY_EPOCH])
    assert lines(decided(Met(later, [Reading(5, 0, 1)])))[2] == f"X-RateLimit-Reset: {NOW_US // SECOND + 1}"


def test_legacy_remaining_is_never_above_the_limit_though_a_burst_is() -> None:
    bucket = Limit(1000, Unit.MINUTE, Algorithm.TOKEN_BUCKET, burst=1500)
    said = rule(bucket, headers=[Family.LEGACY, Family.IETF])
    told = lines(decided(Met(said, [Reading(1499, 0, 60_000)])))
    assert told[:2] == ["X-RateLimit-Limit: 1000", "X-RateLimit-Remaining: 1000"]
    assert told[4] == 'RateLimit: "edge.user:minute";r=1499;t=1'


def test_every_window_has_its_own_headers() -> None:
    passed, refused = both(Family.WINDOWS)
    assert passed == [
        "X-RateLimit-Limit-Minute: 1000",
        "X-RateLimit-Remaining-Minute: 847",
        "X-RateLimit-Reset-Minute: 2026-01-25T14:32:00Z",
        "X-RateLimit-Limit-Day: 100000",
        "X-RateLimit-Remaining-Day: 95234",
        "X-RateLimit-Reset-Day: 2026-01-26T00:00:00Z",
    ]
    assert refused == [
        "X-RateLimit-Limit-Minute: 1000",
        "X-RateLimit-Remaining-Minute: 0",
        "X-RateLimit-Reset-Minute: 2026-01-25T14:32:00Z",
        "X-RateLimit-Limit-Day: 100000",
        "X-RateLimit-Remaining-Day: 98766",
        "X-RateLimit-Reset-Day: 2026-01-26T00:00:00Z",
    ]


def test_a_window_s_remaining_is_never_above_its_limit_though_a_burst_is() -> None:
    bucket = Limit(1000, Unit.MINUTE, Algorithm.TOKEN_BUCKET, burst=1500)
    for left, told in ((1499, 1000), (7, 7)):
        passed = lines(decided(Met(rule(bucket, headers=[Family.WINDOWS]), [Reading(left, 0, 60_000)])))
        assert passed[:2] == ["X-RateLimit-Limit-Minute: 1000", f"X-RateLimit-Remaining-Minute: {told}"]


def test_ietf_lists_every_limit_of_the_call_and_on_a_refusal_those_that_refuse() -> None:
    passed, refused = both(Family.IETF)
    policy = 'RateLimit-Policy: "edge.user:minute";q=1000;w=60, "edge.user:day";q=100000;w=86400'
    assert passed == [policy, 'RateLimit: "edge.user:minute";r=847;t=45, "edge.user:day";r=95234;t=34125']
    assert refused == [policy, 'RateLimit: "edge.user:minute";r=0;t=45']


def test_ietf_leaves_out_the_length_of_a_calendar_s_window_and_whatever_cannot_refuse() -> None:
    month = Limit(5, Unit.MONTH, timezone="Europe/Berlin", name="monthly")
    said, shadow = rule(month, headers=[Family.IETF]), rule(path="edge.path", shadow_mode=True)
    told = lines(decided(Met(shadow, [Reading(900, 0, 1)]), Met(said, [Reading(4, 0, 1)])))
    assert told == ['RateLimit-Policy: "monthly";q=5', 'RateLimit: "monthly";r=4;t=1']


def test_retry_after_is_the_longest_wait_in_whole_seconds_rounded_up_and_of_refusals_only() -> None:
    passed, refused = both(Family.RETRY_AFTER)
    assert (passed, refused) == ([], ["Retry-After: 45"])
    first, last = rule(headers=[Family.RETRY_AFTER]), rule(path="edge.path", headers=[Family.RETRY_AFTER])
    long, short = Reading(0, 9_000_001, 9_000_001), Reading(0, 1, 1)
    assert lines(decided(Met(first, [long]), Met(last, [short]))) == ["Retry-After: 10"]
    assert lines(decided(Met(first, [short]))) == ["Retry-After: 1"]


def test_what_can_never_pass_is_told_when_the_limit_is_whole_again() -> None:
    assert lines(decided(Met(rule(headers=[Family.RETRY_AFTER]), [Reading(3, -1, 7 * SECOND)]))) == ["Retry-After: 7"]


def test_retry_after_is_not_earlier_than_any_limit_that_refuses_though_another_never_allows() -> None:
    said = rule(MINUTE_LIMIT, DAY_LIMIT, headers=[Family.IETF, Family.RETRY_AFTER])
    assert lines(decided(Met(said, [Reading(0, -1, 0), Reading(0, 2 * SECOND, 2 * SECOND)])))[1:] == [
        'RateLimit: "edge.user:minute";r=0;t=0, "edge.user:day";r=0;t=1',
        "Retry-After: 1",
    ]


def test_jitter_is_drawn_anew_and_added_to_retry_after_alone() -> None:
    asked: list[int] = []

    def draw(below: int) -> int:
        asked.append(below)
        return len(asked) + 1

    answers = Answers(AnswerOptions(), draw)
    style = AnswerStyle((Family.IETF, Family.RETRY_AFTER), retry_jitter_us=4_500_000)
    refused = decided(Met(rule(style=style), REFUSED[:1]))
    told = [dict(answers.tell(refused).headers) for _ in range(2)]
    assert [one["Retry-After"] for one in told] == ["47", "48"]
    assert told[0]["RateLimit"] == 'RateLimit: "edge.user:minute";r=0;t=45'.partition(": ")[2]
    assert asked == [6, 6]  # from nothing to five seconds
    assert answers.fired(refused)["rule"]["retry_after"] == 45
    answers.tell(decided(Met(rule(style=style), PASSING[:1])))
    assert len(asked) == 2


def test_the_rule_is_one_visible_word() -> None:
    said = rule(path='edge.path_/a b\r\nSet-Cookie: x.größe_"', headers=[Family.RULE])
    assert lines(decided(Met(said, PASSING[:1]))) == [
        'X-RateLimit-Rule: edge.path_/a%20b%0D%0ASet-Cookie:%20x.gr%C3%B6%C3%9Fe_"'
    ]


def test_a_limit_that_came_with_the_request_is_told_without_the_request_s_values() -> None:
    brought = rule(path="edge.user_secret", position=None, headers=[Family.RULE, Family.IETF])
    told = lines(decided(Met(brought, PASSING[:1])))
    assert told[0] == "X-RateLimit-Rule: edge.(request)"
    assert told[1] == 'RateLimit-Policy: "edge.(request):minute";q=1000;w=60'
    assert "secret" not in str(Answers(AnswerOptions()).fired(decided(Met(brought, PASSING[:1]))))


@pytest.mark.parametrize("state", list(State))
def test_rules_with_warn_at_always_tell_their_state(state: State) -> None:
    for headers, before in ((None, 0), ([Family.LEGACY], 3)):
        warns = rule(headers=headers, warn_at=WarnAt(800))
        told = lines(decided(Met(warns, [PASSING[0], Reading(int(state), 0, 0)])))
        assert told[before:] == [f"X-RateLimit-State: {state.name.lower()}"]


def test_during_a_cooldown_all_limits_of_the_descriptor_are_refused_for_as_long() -> None:
    said = rule(MINUTE_LIMIT, DAY_LIMIT, headers=[Family.IETF, Family.RETRY_AFTER], penalty=PENALTY)
    cooldown = Reading(2, 90 * SECOND, 3600 * SECOND)
    assert lines(decided(Met(said, [*PASSING, cooldown])))[1:] == [
        'RateLimit: "edge.user:minute";r=0;t=90, "edge.user:day";r=0;t=90',
        "Retry-After: 90",
    ]
    windows = rule(headers=[Family.WINDOWS], penalty=PENALTY)
    assert lines(decided(Met(windows, [PASSING[0], cooldown])))[1:] == [
        "X-RateLimit-Remaining-Minute: 0",
        "X-RateLimit-Reset-Minute: 2026-01-25T14:32:46Z",
    ]


def test_the_style_is_that_of_the_descriptor_spoken_of() -> None:
    short, plain = rule(headers=[Family.RULE]), rule(path="edge.path")
    assert lines(decided(Met(short, [Reading(1, 0, 1)]), Met(plain, [Reading(2, 0, 1)]))) == [
        "X-RateLimit-Rule: edge.user"
    ]
    assert lines(decided(Met(short, [Reading(3, 0, 1)]), Met(plain, [Reading(2, 0, 1)]))) == []


def test_the_global_shadow_mode_lets_pass_and_its_answers_say_so() -> None:
    said = rule(headers=[Family.RETRY_AFTER, Family.LEGACY])
    told = Answers(AnswerOptions()).tell(decided(Met(said, REFUSED[:1]), shadow_mode=True))
    assert (told.status, told.body, dict(told.headers)["X-RateLimit-Remaining"]) == (200, b"", "0")
    assert "Retry-After" not in dict(told.headers)


@pytest.mark.parametrize(
    ("quotas_s", "limit_s", "told"),
    [([50, 20], 0, "20"), ([50, 20], 30, "30"), ([50, 40], 30, "40"), ([50, 0], 30, "30")],
    ids=[
        "the first quota to come back",
        "the limit, by then a quota is back",
        "the quota",
        "quotas that do not refuse",
    ],
)
def test_of_used_up_quotas_the_first_one_back_is_waited_for(quotas_s: list[int], limit_s: int, told: str) -> None:
    families = [Family.RETRY_AFTER, Family.IETF, Family.RULE]
    quotas = [
        Met(rule(path=f"edge.{n}", headers=families, quota_mode=True), [Reading(0, wait * SECOND, 60 * SECOND)])
        for n, wait in enumerate(quotas_s)
    ]
    limit = Met(rule(path="edge.limit", headers=families), [Reading(0, limit_s * SECOND, 60 * SECOND)])
    decision = decided(limit, *quotas)
    headers = dict(Answers(AnswerOptions()).tell(decision).headers)
    assert headers["Retry-After"] == told
    listed = http_sf.parse(headers["RateLimit"].encode(), tltype="list")
    assert max(item[1]["t"] for item in listed) == int(told)
    assert headers["X-RateLimit-Rule"] == ("edge.limit" if limit_s else "edge.1")
    assert Answers(AnswerOptions()).fired(decision)["rule"] == {
        "path": headers["X-RateLimit-Rule"],
        "window": "minute",
        "retry_after": int(told),
    }


@pytest.mark.parametrize(
    ("never_whole_s", "penalty"),
    [(0, None), (7, None), (0, Reading(2, 90 * SECOND, 3600 * SECOND))],
    ids=["never used", "used", "in a cooldown"],
)
def test_a_quota_that_the_call_never_fits_into_is_not_waited_for(never_whole_s: int, penalty: Reading | None) -> None:
    """Ten hits: five an hour never have them, and another quota has them back in six minutes."""
    headers = [Family.RETRY_AFTER, Family.RULE]
    small = Limit(5, Unit.HOUR, Algorithm.GCRA)
    watched = {"penalty": PENALTY} if penalty else {}
    never = Met(
        rule(small, path="edge.a", headers=headers, quota_mode=True, **watched),
        [Reading(5, -1, never_whole_s * SECOND), *([penalty] if penalty else [])],
    )
    back = Met(
        rule(Limit(100, Unit.HOUR), path="edge.b", headers=headers, quota_mode=True),
        [Reading(0, 360 * SECOND, 3600 * SECOND)],
    )
    for met in ((never, back), (back, never)):
        told = dict(Answers(AnswerOptions()).tell(decided(*met)).headers)
        assert (told["Retry-After"], told["X-RateLimit-Rule"]) == ("360", "edge.b")


def test_of_quotas_that_the_call_never_fits_into_the_first_one_whole_again_is_told() -> None:
    quotas = [
        Met(rule(path=f"edge.{s}", headers=[Family.RETRY_AFTER], quota_mode=True), [Reading(3, -1, s * SECOND)])
        for s in (50, 20)
    ]
    assert lines(decided(*quotas)) == ["Retry-After: 20"]


def test_headers_of_a_refusal_stand_in_place_of_a_family_s_of_the_same_name() -> None:
    headers = (("retry-after", Template.parse("${retry_after}")), ("X-Why", Template.parse("${rule} ü\n${window}")))
    said = rule(headers=[Family.RETRY_AFTER, Family.RULE], deny=Deny(headers=headers))
    assert lines(decided(Met(said, REFUSED[:1]))) == [
        "X-RateLimit-Rule: edge.user",
        "retry-after: 45",
        "X-Why: edge.user %C3%BC%0Aminute",
    ]
    assert lines(decided(Met(said, PASSING[:1]))) == ["X-RateLimit-Rule: edge.user"]


def test_nothing_is_said_of_a_call_that_met_no_limit() -> None:
    told = Answers(AnswerOptions(headers_enabled=True)).tell(decided())
    assert told == ((), b"", 200)
    assert Answers(AnswerOptions()).fired(decided()) == {}


def test_an_exemption_is_named_where_no_limit_applied() -> None:
    exempt = Slot(Rule("edge.staff", (), position=WRITTEN), (), 1, unlimited=True)
    decision = decide(Outline("edge", True, (), (Slot(None, (), 1), exempt)), None)
    assert Answers(AnswerOptions()).fired(decision) == {"rule": {"path": "edge.staff", "unlimited": True}}


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

EVERY = [family for family in Family if family is not Family.LEGACY_EPOCH]  # its headers are called as LEGACY's are


@st.composite
def any_call(draw: st.DrawFn) -> Decision:
    met: list[Met] = []
    for _ in range(draw(st.integers(1, 4))):
        chosen: Sequence[Limit] = draw(st.lists(limits, min_size=1, max_size=4))
        said = rule(
            *chosen,
            path=draw(names),
            headers=EVERY,
            quota_mode=draw(st.booleans()),
            shadow_mode=draw(st.booleans()),
        )
        met.append(Met(said, [draw(readings) for _ in chosen]))
    return decided(*met, shadow_mode=draw(st.booleans()))


@given(any_call())
def test_whatever_the_rules_and_the_store_say_headers_are_well_formed(decision: Decision) -> None:
    told = Answers(AnswerOptions()).tell(decision).headers
    for name, value in told:
        assert all(char.isascii() and (char.isalnum() or char == "-") for char in name)
        assert value.isascii()
        assert value.isprintable()
    assert len({name.lower() for name, _ in told}) == len(told)
    headers = dict(told)
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
    """The field as a list of strings with parameters; a field that is left out is an empty list."""
    if name not in headers:
        return []
    parsed = http_sf.parse(headers[name].encode(), tltype="list")
    assert all(isinstance(item[0], str) and not isinstance(item[0], http_sf.Token) for item in parsed)
    return parsed
