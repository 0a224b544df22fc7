"""A replay counts what the service would have counted, says what has changed, and can be looked at."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from xml.etree import ElementTree

import pytest

from ratelimit_rls.core.plan import Policy
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.errors import RateLimitRlsError, RulesError
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.rules.snapshot import Rules
from ratelimit_rls.service import RateLimiter
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.transport.grpc.messages import RateLimitRequest, RateLimitResponse
from ratelimit_rls.transport.grpc.rls import RlsDoor
from ratelimit_rls.transport.grpc.waiting import WaitingRoom
from ratelimit_rls.trial import rule_set as rule_set_module
from ratelimit_rls.trial.decider import Apart
from ratelimit_rls.trial.mapping import Mapping
from ratelimit_rls.trial.moments import START_US
from ratelimit_rls.trial.picture import Panel, draw
from ratelimit_rls.trial.replay import Replay
from ratelimit_rls.trial.rule_set import RuleSet
from ratelimit_rls.trial.traffic import MOST_BAD_TOLD, BadLines, Line

RULES = """\
domain: edge
descriptors:
  - {key: user, rate_limit: {unit: second, requests_per_unit: 3}}
  - {key: user, value: u1, rate_limit: {unit: minute, requests_per_unit: 20, algorithm: gcra, burst: 5}}
  - {key: user, value: u2, rate_limit: {unlimited: true}}
  - {key: path, value: /a*, shadow_mode: true, rate_limit: {unit: minute, requests_per_unit: 50}}
  - {key: path, rate_limit: {unit: second, requests_per_unit: 15, algorithm: sliding_window}}
"""
MAPPING = Mapping("edge", ["user=%user%", "path=%path%"])


def tree(text: str = RULES) -> Tree:
    return compile_documents({"rules.yaml": text.encode()}).tree


def traffic(count: int) -> list[Line]:
    draw_ = random.Random(7)
    now_us, lines = START_US, []
    for number in range(1, count + 1):
        now_us += draw_.choice((0, 0, 1_000, 40_000))
        fields = {"user": f"u{draw_.randrange(30)}", "path": draw_.choice(("/a", "/ab", "/b", None))}
        lines.append((now_us, number, MAPPING.values(fields)))
    return lines


def replayed(lines: Sequence[Line], *texts: str, bad: BadLines | None = None, apart: bool = False) -> Replay:
    trees = [(f"rules {number}", tree(text)) for number, text in enumerate(texts)]
    replay = Replay(trees, MAPPING, bad or BadLines("log"), apart=apart)
    replay.run(lines[start : start + 700] for start in range(0, len(lines), 700))
    return replay


async def live(lines: Sequence[Line]) -> tuple[int, Metrics]:
    """The same requests over the service's own door, each at its moment: how many were refused, and its counters."""
    now = [0]
    rules, metrics = Rules(), Metrics()
    rules.swap(tree(), digest="", files=1, loaded_at=datetime.now(UTC))
    limiter = RateLimiter(rules, EmbeddedStore(clock=lambda: now[0]), metrics, Policy())
    door = RlsDoor(limiter, metrics, room=WaitingRoom(0, 0))
    refused = 0
    for at_us, _, values in lines:
        asked = MAPPING.request(values)
        assert asked is not None
        message = RateLimitRequest(domain=asked.domain)
        for descriptor in asked.descriptors:
            added = message.descriptors.add()
            for key, value in descriptor.entries:
                added.entries.add(key=key, value=value)
        now[0] = at_us
        answer = await door.check(message.SerializeToString())
        assert isinstance(answer, bytes)
        refused += RateLimitResponse.FromString(answer).overall_code == RateLimitResponse.OVER_LIMIT
    return refused, metrics


@pytest.mark.parametrize("count", [2_000, pytest.param(30_000, marks=pytest.mark.slow)])
async def test_the_counts_are_those_of_the_service_fed_the_same_requests(count: int) -> None:
    lines = traffic(count)
    replay = replayed(lines, RULES)
    refused, metrics = await live(lines)

    tally = replay.outcomes[0].tally
    assert (tally.calls, tally.refused) == (count, refused)
    assert 0 < refused < count
    for one in tally.rules():
        if one.path == "edge.user_u2":  # unlimited: nothing is counted in the service
            assert (one.refused, one.let_pass) == (0, 0)
            continue
        counted = metrics.limit(one.path, "edge", one.path)
        assert one.hits == counted.total_hits
        assert one.let_pass == counted.shadow_mode
        over = counted.over_limit - counted.shadow_mode
        assert one.refused == over, one.path


def test_a_replay_of_one_rule_set_against_itself_has_no_difference() -> None:
    replay = replayed(traffic(2_000), RULES, RULES)
    first, second = replay.outcomes

    assert first.tally.refused == second.tally.refused > 0
    assert (replay.changes.refused_only_by_first, replay.changes.refused_only_by_second) == (0, 0)


def test_calls_whose_verdict_changes_are_counted_one_by_one() -> None:
    looser = RULES.replace("requests_per_unit: 3}", "requests_per_unit: 6}").replace("burst: 5", "burst: 1")

    replay = replayed(traffic(2_000), looser, RULES)

    new, old = (one.tally.refused for one in replay.outcomes)
    changes = replay.changes
    assert new - old == changes.refused_only_by_first - changes.refused_only_by_second
    assert changes.refused_only_by_first > 0
    assert changes.refused_only_by_second > 0


def test_a_rule_knows_its_first_and_last_refusal_and_its_peak() -> None:
    moments = [0, 0, 0, 0, 0, 1_000_000, 2_100_000, 2_200_000, 2_300_000, 2_400_000]
    values = MAPPING.values({"user": "u9"})

    replay = replayed([(START_US + at, n, values) for n, at in enumerate(moments)], RULES)

    (one,) = replay.outcomes[0].tally.rules()
    assert (one.calls, one.refused, one.first_us, one.last_us) == (10, 3, START_US, START_US + 2_400_000)
    assert (one.peak, one.peak_us) == (5, START_US)


def test_what_no_rule_is_for_and_what_asks_nothing_is_counted() -> None:
    lines = [(START_US, 1, MAPPING.values({})), (START_US, 2, MAPPING.values({"path": "/b"}))]
    replay = replayed([*lines, *lines], "domain: other")
    assert (replay.unasked, replay.calls, replay.outcomes[0].tally.without_rule) == (2, 2, 2)


@pytest.mark.parametrize("apart", [False, True])
def test_a_value_that_no_request_can_carry_is_a_bad_line(apart: bool) -> None:
    lines = [(START_US, number, MAPPING.values({"user": "\ud800"})) for number in range(5, 25)]
    bad = BadLines("log")
    replay = replayed(lines, RULES, RULES, bad=bad, apart=apart)
    assert (replay.calls, bad.count) == (0, 20)
    assert bad.first == [(number, "a value is not Unicode text") for number in range(5, 5 + MOST_BAD_TOLD)]

    with pytest.raises(RulesError, match="log:5:1"):
        replayed(lines, RULES, bad=BadLines("log", strict=True), apart=apart)


@pytest.mark.slow
def test_what_is_kept_of_requests_is_bounded_and_forgetting_it_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = traffic(2_000)
    whole = RuleSet("rules", tree(), MAPPING)
    verdicts = whole.decide(lines)
    monkeypatch.setattr(rule_set_module, "MOST_KNOWN_BYTES", 5_000)

    small = RuleSet("rules", tree(), MAPPING)

    assert small.decide(lines) == verdicts
    assert len(small._known) < 10 < len(whole._known)


def told(replay: Replay) -> list[object]:
    """All that is known of the rules, and how it looks."""
    rules = [replace(rule, series=None) for one in replay.outcomes for rule in one.tally.rules()]
    return [*rules, draw([Panel(one.name, one.tally) for one in replay.outcomes])]


@pytest.mark.slow
def test_processes_of_their_own_change_nothing() -> None:
    lines = traffic(5_000)
    looser = RULES.replace("requests_per_unit: 3}", "requests_per_unit: 6}")

    here, apart = (replayed(lines, looser, RULES, apart=apart) for apart in (False, True))

    assert apart.changes == here.changes
    assert told(apart) == told(here)


def test_a_process_that_ends_before_its_time_is_told_in_a_sentence() -> None:
    decider = Apart(lambda: RuleSet("rules", tree(), MAPPING))
    try:
        decider._process.kill()
        with pytest.raises(RateLimitRlsError, match="ended before its time, with code -9"):
            decider.receive()
    finally:
        decider.close()


def test_who_waits_is_admitted_and_the_waits_of_a_rule_are_told() -> None:
    throttled = """\
domain: edge
descriptors:
  - key: user
    action: throttle
    max_delay: 250ms
    rate_limit: {unit: second, requests_per_unit: 10, algorithm: gcra, burst: 1}
"""
    values = MAPPING.values({"user": "u1"})

    replay = replayed([(START_US, number, values) for number in range(5)], throttled)

    (one,) = replay.outcomes[0].tally.rules()
    assert (one.calls, one.refused, one.waited, one.longest_wait_us) == (5, 2, 2, 200_000)


def test_the_picture_is_valid_xml_and_shows_every_call() -> None:
    replay = replayed(traffic(3_000), RULES, RULES.replace("sliding_window", "gcra"))
    panels = [Panel(f"<{one.name}> \x02 &", one.tally) for one in replay.outcomes]

    root = ElementTree.fromstring(draw(panels))

    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "<rules 0> \ufffd &" in texts
    shown = Counter[str]()
    for title in root.iter("{http://www.w3.org/2000/svg}title"):
        words = (title.text or "").rpartition(": ")[2]
        for part in words.split(", ") if "admitted" in words else ():
            number, what = part.split()
            shown[what] += int(number.replace(",", ""))
    assert shown == {
        "admitted": sum(one.tally.calls - one.tally.refused for one in replay.outcomes),
        "refused": sum(one.tally.refused for one in replay.outcomes),
    }


def test_a_picture_of_nothing_is_a_picture() -> None:
    replay = replayed([], RULES)
    ElementTree.fromstring(draw([Panel("nothing", replay.outcomes[0].tally)]))
