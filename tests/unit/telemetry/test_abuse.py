"""Abuse is counted exactly, and logged at a bounded rate."""

from __future__ import annotations

import structlog

from ratelimit_rls.telemetry.abuse import LOG_LINES_PER_SECOND, Abuse, AbuseLog
from ratelimit_rls.telemetry.instruments import ABUSE
from ratelimit_rls.telemetry.series import Series


class Clock:
    now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


def test_every_event_is_counted_by_its_reason() -> None:
    abuse = AbuseLog(Clock())
    with structlog.testing.capture_logs():
        for _ in range(100):
            abuse.record(Abuse.PING_FLOOD, "203.0.113.7")
        abuse.record(Abuse.RAPID_RESET, "203.0.113.7", times=3)
    assert abuse.count(Abuse.PING_FLOOD) == 100
    assert dict(abuse.measured()) == {
        Series(ABUSE.name, ("ping_flood",)): 100,
        Series(ABUSE.name, ("rapid_reset",)): 3,
    }


def test_the_log_is_rate_limited_and_reports_unlogged_events() -> None:
    clock = Clock()
    abuse = AbuseLog(clock)
    with structlog.testing.capture_logs() as lines:
        for _ in range(LOG_LINES_PER_SECOND + 7):
            abuse.record(Abuse.PING_FLOOD, "203.0.113.7")
        assert len(lines) == LOG_LINES_PER_SECOND
        clock.now_s += 1
        abuse.record(Abuse.RAPID_RESET, "203.0.113.8")
    assert lines[0] == {
        "event": "client_abuse",
        "reason": "ping_flood",
        "peer": "203.0.113.7",
        "log_level": "warning",
    }
    assert lines[-1]["unlogged"] == 7
    assert lines[-1]["peer"] == "203.0.113.8"
