"""The denial log: rule, trace ids, and the bound on lines."""

from __future__ import annotations

import pytest
import structlog

from ratelimit_rls.core.decision import decision_of
from ratelimit_rls.core.model import (
    Charge,
    DescriptorPlan,
    Limit,
    PlanTemplate,
    Position,
    Reading,
    Rejection,
    Rule,
    Step,
    StoreResult,
    Unit,
)
from ratelimit_rls.telemetry.denial_log import DenialLog
from ratelimit_rls.telemetry.traces import TraceIds

STEP = Step(Limit(10, Unit.MINUTE), 1, Charge.ALWAYS)
RULE = Rule("edge.user", (STEP.limit,), position=Position("rules.yaml", 1, 1))
TEMPLATE = PlanTemplate("edge", True, (STEP,), (DescriptorPlan(RULE, (STEP,), 1, "edge.user"),))
PASSED = decision_of(TEMPLATE, StoreResult.of(False, 0, (Reading(3, 0, 1),)))
DENIED = decision_of(TEMPLATE, StoreResult.of(True, 0, (Reading(-1, 5_000_000, 1),)))


class Clock:
    now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_line_names_the_rule_the_limit_and_the_trace(clock: Clock) -> None:
    log = DenialLog(5, clock)
    with structlog.testing.capture_logs() as lines:
        assert log.has_lines_left
        log.record([(0, PASSED), (2, DENIED)], lambda number: TraceIds("t" * 32, str(number)))
    assert lines == [
        {
            "log_level": "info",
            "event": "call_denied",
            "domain": "edge",
            "rule": "edge.user",
            "limit": "10 per minute",
            "retry_after_s": 5,
            "trace_id": "t" * 32,
            "span_id": "2",
        }
    ]


def test_an_overridden_limit_is_logged_without_request_values(clock: Clock) -> None:
    own = PlanTemplate(
        "edge", True, (STEP,), (DescriptorPlan(Rule("edge.user_secret", (STEP.limit,)), (STEP,), 1, "edge.user"),)
    )
    log = DenialLog(5, clock)
    with structlog.testing.capture_logs() as lines:
        assert log.has_lines_left
        log.record([(0, decision_of(own, StoreResult.of(True, 0, (Reading(-1, 1, 1),))))], lambda _: None)
    assert [line["rule"] for line in lines] == ["_override"]


def test_a_rejected_caller_is_logged_with_the_reason_and_no_rule(clock: Clock) -> None:
    away = PlanTemplate(
        "edge", True, (), (DescriptorPlan(None, (), 0),), rejection=Rejection("unauthorized", "no", 401)
    )
    log = DenialLog(5, clock)
    with structlog.testing.capture_logs() as lines:
        assert log.has_lines_left
        log.record([(0, decision_of(away, None))], lambda _: None)
    assert lines == [{"log_level": "info", "event": "call_denied", "domain": "edge", "reason": "unauthorized"}]


def test_lines_per_second_are_bounded(clock: Clock) -> None:
    log = DenialLog(2, clock)
    with structlog.testing.capture_logs() as lines:
        for clock.now_s in (10.0, 10.2, 10.9, 11.0, 11.1):
            if log.has_lines_left:
                log.record([(0, DENIED)] * 5, lambda _: None)
    assert len(lines) == 4
    assert "trace_id" not in lines[0]


def test_unused_lines_are_not_carried_over(clock: Clock) -> None:
    log = DenialLog(2, clock)
    with structlog.testing.capture_logs() as lines:
        for clock.now_s in (10.0, 11.0, 12.0):
            assert log.has_lines_left
        log.record([(0, DENIED)] * 5, lambda _: None)
    assert len(lines) == 2


def test_zero_disables_the_log(clock: Clock) -> None:
    assert not DenialLog(0, clock).has_lines_left
