"""Refusals in the log: the rule, the trace, and no more lines than were asked for."""

from __future__ import annotations

import pytest
import structlog

from ratelimit_rls.core.decide import decide
from ratelimit_rls.core.model import (
    Answer,
    Charge,
    Limit,
    Outline,
    Position,
    Reading,
    Refusal,
    Rule,
    Slot,
    Step,
    Unit,
)
from ratelimit_rls.telemetry.refusals import RefusalLog
from ratelimit_rls.telemetry.traces import Ids

STEP = Step(Limit(10, Unit.MINUTE), 1, Charge.ALWAYS)
RULE = Rule("edge.user", (STEP.limit,), position=Position("rules.yaml", 1, 1))
OUTLINE = Outline("edge", True, (STEP,), (Slot(RULE, (STEP,), 1, "edge.user"),))
PASSED = decide(OUTLINE, Answer(False, 0, (Reading(3, 0, 1),)))
REFUSED = decide(OUTLINE, Answer(True, 0, (Reading(-1, 5_000_000, 1),)))


class Clock:
    now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_line_names_the_rule_the_limit_and_the_trace(clock: Clock) -> None:
    log = RefusalLog(5, clock)
    with structlog.testing.capture_logs() as lines:
        assert log.has_room
        log.note([(0, PASSED), (2, REFUSED)], lambda number: Ids("t" * 32, str(number)))
    assert lines == [
        {
            "log_level": "info",
            "event": "refused",
            "domain": "edge",
            "rule": "edge.user",
            "limit": "10 per minute",
            "retry_after_s": 5,
            "trace_id": "t" * 32,
            "span_id": "2",
        }
    ]


def test_a_limit_that_came_with_the_request_is_not_named_by_its_values(clock: Clock) -> None:
    own = Outline("edge", True, (STEP,), (Slot(Rule("edge.user_secret", (STEP.limit,)), (STEP,), 1, "edge.user"),))
    log = RefusalLog(5, clock)
    with structlog.testing.capture_logs() as lines:
        assert log.has_room
        log.note([(0, decide(own, Answer(True, 0, (Reading(-1, 1, 1),))))], lambda _: None)
    assert [line["rule"] for line in lines] == ["_override"]


def test_who_is_turned_away_is_told_with_the_reason_and_without_a_rule(clock: Clock) -> None:
    away = Outline("edge", True, (), (Slot(None, (), 0),), refusal=Refusal("unauthorized", "no", 401))
    log = RefusalLog(5, clock)
    with structlog.testing.capture_logs() as lines:
        assert log.has_room
        log.note([(0, decide(away, None))], lambda _: None)
    assert lines == [{"log_level": "info", "event": "refused", "domain": "edge", "reason": "unauthorized"}]


def test_no_more_lines_a_second_than_were_asked_for(clock: Clock) -> None:
    log = RefusalLog(2, clock)
    with structlog.testing.capture_logs() as lines:
        for clock.now_s in (10.0, 10.2, 10.9, 11.0, 11.1):
            if log.has_room:
                log.note([(0, REFUSED)] * 5, lambda _: None)
    assert len(lines) == 4
    assert "trace_id" not in lines[0]


def test_lines_that_were_not_needed_are_not_saved_up(clock: Clock) -> None:
    log = RefusalLog(2, clock)
    with structlog.testing.capture_logs() as lines:
        for clock.now_s in (10.0, 11.0, 12.0):
            assert log.has_room
        log.note([(0, REFUSED)] * 5, lambda _: None)
    assert len(lines) == 2


def test_none_at_all_if_none_are_wanted(clock: Clock) -> None:
    assert not RefusalLog(0, clock).has_room
