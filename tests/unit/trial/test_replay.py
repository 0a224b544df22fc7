"""A replay counts what the service would have counted, says what has changed, and can be looked at."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from xml.etree import ElementTree

import pytest

from ratelimit_rls.core.plan import Policy
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.errors import RulesError
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.rules.snapshot import Rules
from ratelimit_rls.service import RateLimiter
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.transport.grpc.messages import RateLimitRequest, RateLimitResponse
from ratelimit_rls.transport.grpc.rls import RlsDoor
from ratelimit_rls.trial import replay as replay_module
from ratelimit_rls.trial.mapping import Mapping
from ratelimit_rls.trial.moments import START_US
from ratelimit_rls.trial.picture import Panel, draw
from ratelimit_rls.trial.replay import Replay
from ratelimit_rls.trial.traffic import BadLines, Line

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
        lines.append(Line(now_us, number, MAPPING.values(fields)))
    return lines


async def replayed(lines: Sequence[Line], *texts: str) -> Replay:
    replay = Replay([(f"rules {number}", tree(text)) for number, text in enumerate(texts)], MAPPING, BadLines("log"))
    await replay.run(lines)
    return replay


async def live(lines: Sequence[Line]) -> tuple[int, Metrics]:
    """The same requests over the service's own door, each at its moment: how many were refused, and its counters."""
    now = [0]
    rules, metrics = Rules(), Metrics()
    rules.swap(tree(), digest="", files=1, loaded_at=datetime.now(UTC))
    limiter = RateLimiter(rules, EmbeddedStore(clock=lambda: now[0]), metrics, Policy())
    door = RlsDoor(limiter, metrics)
    refused = 0
    for line in lines:
        asked = MAPPING.request(line.values)
        assert asked is not None
        message = RateLimitRequest(domain=asked.domain)
        for descriptor in asked.descriptors:
            added = message.descriptors.add()
            for key, value in descriptor.entries:
                added.entries.add(key=key, value=value)
        now[0] = line.at_us
        (answer,) = await door.answer([message.SerializeToString()])
        assert isinstance(answer, bytes)
        refused += RateLimitResponse.FromString(answer).overall_code == RateLimitResponse.OVER_LIMIT
    return refused, metrics


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
async def test_the_counts_are_those_of_the_service_fed_the_same_requests(count: int) -> None:
    lines = traffic(count)
    replay = await replayed(lines, RULES)
    refused, metrics = await live(lines)

    tally = replay.rule_sets[0].tally
    assert (tally.calls, tally.refused) == (count, refused)
    assert 0 < refused < count
    for one in tally.rules():
        if not one.rule.limits:
            assert (one.refused, one.let_pass) == (0, 0)
            continue
        counted = metrics.limit(one.rule.path)
        assert one.hits == counted.total_hits
        assert one.let_pass == counted.shadow_mode
        over = counted.over_limit - counted.shadow_mode
        assert one.refused == over, one.rule.path


async def test_a_replay_of_one_rule_set_against_itself_has_no_difference() -> None:
    replay = await replayed(traffic(2_000), RULES, RULES)
    first, second = replay.rule_sets

    assert first.tally.refused == second.tally.refused > 0
    assert (replay.changes.refused_only_by_first, replay.changes.refused_only_by_second) == (0, 0)


async def test_calls_whose_verdict_changes_are_counted_one_by_one() -> None:
    looser = RULES.replace("requests_per_unit: 3}", "requests_per_unit: 6}").replace("burst: 5", "burst: 1")

    replay = await replayed(traffic(2_000), looser, RULES)

    new, old = (one.tally.refused for one in replay.rule_sets)
    changes = replay.changes
    assert new - old == changes.refused_only_by_first - changes.refused_only_by_second
    assert changes.refused_only_by_first > 0
    assert changes.refused_only_by_second > 0


async def test_a_rule_knows_its_first_and_last_refusal_and_its_peak() -> None:
    moments = [0, 0, 0, 0, 0, 1_000_000, 2_100_000, 2_200_000, 2_300_000, 2_400_000]
    values = MAPPING.values({"user": "u9"})

    replay = await replayed([Line(START_US + at, n, values) for n, at in enumerate(moments)], RULES)

    (one,) = replay.rule_sets[0].tally.rules()
    assert (one.calls, one.refused, one.first_us, one.last_us) == (10, 3, START_US, START_US + 2_400_000)
    assert (one.peak, one.peak_us) == (5, START_US)


async def test_what_no_rule_is_for_and_what_asks_nothing_is_counted() -> None:
    lines = [Line(START_US, 1, MAPPING.values({})), Line(START_US, 2, MAPPING.values({"path": "/b"}))]
    replay = await replayed([*lines, *lines], "domain: other")
    assert (replay.unasked, replay.calls, replay.rule_sets[0].tally.without_rule) == (2, 2, 2)


async def test_a_value_that_no_request_can_carry_is_a_bad_line() -> None:
    line = Line(START_US, 5, MAPPING.values({"user": "\ud800"}))
    bad = BadLines("log")
    replay = Replay([("rules", tree())], MAPPING, bad)
    await replay.run([line])
    assert (bad.count, bad.first) == (1, [(5, "a value is not Unicode text")])

    with pytest.raises(RulesError, match="log:5:1"):
        await Replay([("rules", tree())], MAPPING, BadLines("log", strict=True)).run([line])


async def test_what_is_kept_of_requests_is_bounded_and_forgetting_it_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = traffic(2_000)
    whole = await replayed(lines, RULES)
    monkeypatch.setattr(replay_module, "MOST_KNOWN_BYTES", 5_000)

    small = await replayed(lines, RULES)

    assert len(small._known) < 10 < len(whole._known)
    assert small.rule_sets[0].tally.refused == whole.rule_sets[0].tally.refused


async def test_the_picture_is_valid_xml_and_shows_every_call() -> None:
    replay = await replayed(traffic(3_000), RULES, RULES.replace("sliding_window", "gcra"))
    panels = [Panel(f"<{one.name}> \x02 &", one.tally) for one in replay.rule_sets]

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
        "admitted": sum(one.tally.calls - one.tally.refused for one in replay.rule_sets),
        "refused": sum(one.tally.refused for one in replay.rule_sets),
    }


async def test_a_picture_of_nothing_is_a_picture() -> None:
    replay = await replayed([], RULES)
    ElementTree.fromstring(draw([Panel("nothing", replay.rule_sets[0].tally)]))
