"""Log lines of a server's life: stable events, each at the level that an operator expects, visible by default."""

from __future__ import annotations

import re
from pathlib import Path
from signal import SIGHUP

import pytest

from tests.support.servers import RedisServer
from tests.support.service_process import UNRESTRICTIVE_RULES, ServiceProcess

pytestmark = pytest.mark.slow


def events(service: ServiceProcess) -> list[tuple[str, str]]:
    """Return event and level of every line, in order."""
    lines = [re.match(r"time=\S+ level=(\w+) msg=(\w+)", line) for line in service.log().splitlines()]
    assert all(lines), service.log()
    return [(line[2], line[1]) for line in lines if line]


def test_start_reload_and_stop_are_logged_at_info(rules: Path) -> None:
    with ServiceProcess({"RLS_RULES": rules}) as service:
        service.signal(SIGHUP)
        service.wait_for_log("rules_unchanged")
        rules.write_text(UNRESTRICTIVE_RULES.replace("4000000000", "3999999999"))
        service.wait_for_log("rules_loaded", times=2)
        assert service.stop() == 0
        assert events(service) == [
            ("rules_loaded", "info"),
            ("serving", "info"),
            ("rules_unchanged", "info"),
            ("rules_loaded", "info"),
            ("stopping", "info"),
            ("stopped", "info"),
        ]


def test_rejected_rules_are_an_error(rules: Path) -> None:
    with ServiceProcess({"RLS_RULES": rules}) as service:
        rules.write_text(UNRESTRICTIVE_RULES.replace("year", "eon"))
        service.wait_for_log("rules_error")
        assert events(service)[2:] == [("rules_rejected", "error"), ("rules_error", "error")]


def test_redis_outage_is_a_warning_and_its_end_is_logged_at_info(rules: Path, any_redis: RedisServer) -> None:
    with ServiceProcess({"RLS_RULES": rules, "REDIS_URL": any_redis.address}) as service:
        service.wait_for_log("redis_connected")
        any_redis.stop()
        service.wait_for_log("redis_connection_lost")
        any_redis.start()
        service.wait_for_log("redis_connection_restored")
        assert service.stop() == 0
        levels = dict(events(service))
    assert levels.pop("redis_connect_failed", "warning") == "warning"  # if Redis was away for long enough
    assert levels == {
        "rules_loaded": "info",
        "serving": "info",
        "redis_connected": "info",
        "redis_connection_lost": "warning",
        "redis_connection_restored": "info",
        "stopping": "info",
        "stopped": "info",
    }
