"""Replay of traffic: its counts equal the service's, comparisons of rule sets, and the SVG."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from xml.etree import ElementTree

import pytest

from ratelimit_rls.api.rls.codec import RlsCodec
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.errors import RateLimitRlsError, RulesError
from ratelimit_rls.pipeline.limiter import RateLimiter
from ratelimit_rls.pipeline.throttle_queue import ThrottleQueue
from ratelimit_rls.protos.messages import RateLimitRequest, RateLimitResponse
from ratelimit_rls.rules.active_rules import ActiveRules
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.simulation import rule_set as rule_set_module
from ratelimit_rls.simulation.clock import DEFAULT_START_US
from ratelimit_rls.simulation.executor import SubprocessExecutor
from ratelimit_rls.simulation.field_mapping import FieldMapping
from ratelimit_rls.simulation.replay import Replay
from ratelimit_rls.simulation.rule_set import RuleSet
from ratelimit_rls.simulation.svg import Panel, draw
from ratelimit_rls.simulation.traffic import MAX_REPORTED_BAD_LINES, InvalidLines, Line
from ratelimit_rls.store.embedded import EmbeddedStore
from ratelimit_rls.telemetry.metrics import Metrics
from tests.support.pipelines import new_pipeline

RULES = """\
domain: edge
descriptors:
  - {key: user, rate_limit: {unit: second, requests_per_unit: 3}}
  - {key: user, value: u1, rate_limit: {unit: minute, requests_per_unit: 20, algorithm: gcra, burst: 5}}
  - {key: user, value: u2, rate_limit: {unlimited: true}}
  - {key: path, value: /a*, shadow_mode: true, rate_limit: {unit: minute, requests_per_unit: 50}}
  - {key: path, rate_limit: {unit: second, requests_per_unit: 15, algorithm: sliding_window}}
"""
MAPPING = FieldMapping("edge", ["user=%user%", "path=%path%"])


def tree(text: str = RULES) -> Tree:
    return compile_documents({"rules.yaml": text.encode()}).tree


def traffic(count: int) -> list[Line]:
    draw_ = random.Random(7)
    now_us, lines = DEFAULT_START_US, []
    for number in range(1, count + 1):
        now_us += draw_.choice((0, 0, 1_000, 40_000))
        fields = {"user": f"u{draw_.randrange(30)}", "path": draw_.choice(("/a", "/ab", "/b", None))}
        lines.append((now_us, number, MAPPING.values(fields)))
    return lines


def replayed(
    lines: Sequence[Line], *texts: str, invalid: InvalidLines | None = None, in_subprocess: bool = False
) -> Replay:
    trees = [(f"rules {number}", tree(text)) for number, text in enumerate(texts)]
    replay = Replay(trees, MAPPING, invalid or InvalidLines("log"), in_subprocess=in_subprocess)
    replay.run(lines[start : start + 700] for start in range(0, len(lines), 700))
    return replay


async def live(lines: Sequence[Line]) -> tuple[int, Metrics]:
    """Send the requests through the service's own pipeline at their times. Return the number of denials, and the
    metrics.
    """
    now = [0]
    rules, metrics = ActiveRules(), Metrics()
    rules.swap(tree(), digest="", files=1, loaded_at=datetime.now(UTC))
    limiter = RateLimiter(rules, EmbeddedStore(clock=lambda: now[0]), metrics, Policy())
    pipeline = new_pipeline(RlsCodec(limiter), metrics, ThrottleQueue(0, 0))
    denied = 0
    for at_us, _, values in lines:
        request = MAPPING.request(values)
        assert request is not None
        message = RateLimitRequest(domain=request.domain)
        for descriptor in request.descriptors:
            added = message.descriptors.add()
            for key, value in descriptor.entries:
                added.entries.add(key=key, value=value)
        now[0] = at_us
        answer = await pipeline.check(message.SerializeToString())
        assert isinstance(answer, bytes)
        denied += RateLimitResponse.FromString(answer).overall_code == RateLimitResponse.OVER_LIMIT
    return denied, metrics


@pytest.mark.parametrize("count", [2_000, pytest.param(30_000, marks=pytest.mark.slow)])
async def test_replay_counts_equal_the_service_counts(count: int) -> None:
    lines = traffic(count)
    replay = replayed(lines, RULES)
    denied, metrics = await live(lines)

    tally = replay.outcomes[0].tally
    assert (tally.calls, tally.denied) == (count, denied)
    assert 0 < denied < count
    for one in tally.rules():
        if one.path == "edge.user_u2":  # unlimited: the service counts nothing
            assert (one.denied, one.passed_over_limit) == (0, 0)
            continue
        counted = metrics.limit(one.path, "edge", one.path)
        assert one.hits == counted.total_hits
        assert one.passed_over_limit == counted.shadow_mode
        over = counted.over_limit - counted.shadow_mode
        assert one.denied == over, one.path


def test_replay_against_itself_has_no_difference() -> None:
    replay = replayed(traffic(2_000), RULES, RULES)
    first, second = replay.outcomes

    assert first.tally.denied == second.tally.denied > 0
    assert (replay.changes.denied_only_by_first, replay.changes.denied_only_by_second) == (0, 0)


def test_changed_verdicts_are_counted() -> None:
    looser = RULES.replace("requests_per_unit: 3}", "requests_per_unit: 6}").replace("burst: 5", "burst: 1")

    replay = replayed(traffic(2_000), looser, RULES)

    new, old = (one.tally.denied for one in replay.outcomes)
    changes = replay.changes
    assert new - old == changes.denied_only_by_first - changes.denied_only_by_second
    assert changes.denied_only_by_first > 0
    assert changes.denied_only_by_second > 0


def test_rule_tally_has_first_and_last_denial_and_peak() -> None:
    moments = [0, 0, 0, 0, 0, 1_000_000, 2_100_000, 2_200_000, 2_300_000, 2_400_000]
    values = MAPPING.values({"user": "u9"})

    replay = replayed([(DEFAULT_START_US + at, n, values) for n, at in enumerate(moments)], RULES)

    (one,) = replay.outcomes[0].tally.rules()
    assert (one.calls, one.denied, one.first_us, one.last_us) == (
        10,
        3,
        DEFAULT_START_US,
        DEFAULT_START_US + 2_400_000,
    )
    assert (one.peak, one.peak_us) == (5, DEFAULT_START_US)


def test_calls_without_rule_and_lines_without_descriptor_are_counted() -> None:
    lines = [(DEFAULT_START_US, 1, MAPPING.values({})), (DEFAULT_START_US, 2, MAPPING.values({"path": "/b"}))]
    replay = replayed([*lines, *lines], "domain: other")
    assert (replay.without_descriptor, replay.calls, replay.outcomes[0].tally.without_rule) == (2, 2, 2)


@pytest.mark.parametrize("in_subprocess", [False, True])
def test_value_that_is_not_unicode_is_a_bad_line(in_subprocess: bool) -> None:
    lines = [(DEFAULT_START_US, number, MAPPING.values({"user": "\ud800"})) for number in range(5, 25)]
    invalid = InvalidLines("log")
    replay = replayed(lines, RULES, RULES, invalid=invalid, in_subprocess=in_subprocess)
    assert (replay.calls, invalid.count) == (0, 20)
    assert invalid.first == [(number, "a value is not Unicode text") for number in range(5, 5 + MAX_REPORTED_BAD_LINES)]

    with pytest.raises(RulesError, match="log:5:1"):
        replayed(lines, RULES, invalid=InvalidLines("log", strict=True), in_subprocess=in_subprocess)


@pytest.mark.slow
def test_request_cache_is_bounded_without_changing_results(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = traffic(2_000)
    whole = RuleSet("rules", tree(), MAPPING)
    verdicts = whole.replay(lines)
    monkeypatch.setattr(rule_set_module, "MAX_CACHE_BYTES", 5_000)

    small = RuleSet("rules", tree(), MAPPING)

    assert small.replay(lines) == verdicts
    assert len(small._cache) < 10 < len(whole._cache)


def summary(replay: Replay) -> list[object]:
    """Return everything that a replay reports about its rules, including the SVG."""
    rules = [replace(rule, series=None) for one in replay.outcomes for rule in one.tally.rules()]
    return [*rules, draw([Panel(one.name, one.tally) for one in replay.outcomes])]


@pytest.mark.slow
def test_subprocesses_give_the_same_results() -> None:
    lines = traffic(5_000)
    looser = RULES.replace("requests_per_unit: 3}", "requests_per_unit: 6}")

    in_process, in_subprocess = (
        replayed(lines, looser, RULES, in_subprocess=in_subprocess) for in_subprocess in (False, True)
    )

    assert in_subprocess.changes == in_process.changes
    assert summary(in_subprocess) == summary(in_process)


def test_subprocess_that_dies_is_reported() -> None:
    decider = SubprocessExecutor(lambda: RuleSet("rules", tree(), MAPPING))
    try:
        decider._process.kill()
        with pytest.raises(RateLimitRlsError, match="ended unexpectedly, with exit code -9"):
            decider.receive()
    finally:
        decider.close()


def test_delayed_calls_are_admitted_and_their_waits_reported() -> None:
    throttled = """\
domain: edge
descriptors:
  - key: user
    action: throttle
    max_delay: 250ms
    rate_limit: {unit: second, requests_per_unit: 10, algorithm: gcra, burst: 1}
"""
    values = MAPPING.values({"user": "u1"})

    replay = replayed([(DEFAULT_START_US, number, values) for number in range(5)], throttled)

    (one,) = replay.outcomes[0].tally.rules()
    assert (one.calls, one.denied, one.delayed, one.max_wait_us) == (5, 2, 2, 200_000)


def test_svg_is_valid_xml_and_shows_every_call() -> None:
    replay = replayed(traffic(3_000), RULES, RULES.replace("sliding_window", "gcra"))
    panels = [Panel(f"<{one.name}> \x02 &", one.tally) for one in replay.outcomes]

    root = ElementTree.fromstring(draw(panels))

    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "<rules 0> \ufffd &" in texts
    drawn = Counter[str]()
    for title in root.iter("{http://www.w3.org/2000/svg}title"):
        words = (title.text or "").rpartition(": ")[2]
        for part in words.split(", ") if "admitted" in words else ():
            number, what = part.split()
            drawn[what] += int(number.replace(",", ""))
    assert drawn == {
        "admitted": sum(one.tally.calls - one.tally.denied for one in replay.outcomes),
        "denied": sum(one.tally.denied for one in replay.outcomes),
    }


def test_svg_of_no_traffic_is_valid() -> None:
    replay = replayed([], RULES)
    ElementTree.fromstring(draw([Panel("nothing", replay.outcomes[0].tally)]))
