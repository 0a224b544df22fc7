"""The whole service on a Redis that answers but cannot be used: log, health and calls until that is fixed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ratelimit_rls.core.model import Code
from tests.support.grpc_client import ask, rate_limit_request
from tests.support.servers import RedisServer, redis_binaries
from tests.support.service_process import StartingService

pytestmark = pytest.mark.slow

REASON = (
    "its user may not run the script with FCALL or EVALSHA: grant +evalsha +eval +script|load, "
    "and on Redis 7 and Valkey +fcall +function|load"
)
RULES = """\
domain: edge
descriptors: [{key: user, on_store_failure: deny, rate_limit: {unit: year, requests_per_unit: 1000}}]
"""


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer(redis_binaries()["valkey-9"]) as server:
        set_user(server, "-fcall", "-evalsha", "-eval")
        yield server


def set_user(server: RedisServer, *rights: str) -> None:
    server.cli("ACL", "SETUSER", "limiter", "reset", "on", ">hush", "~rl:*", "&*", "+@all", *rights)


@pytest.fixture
def variables(redis: RedisServer, tmp_path: Path) -> dict[str, object]:
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES)
    return {"RLS_RULES": rules, "REDIS_URL": f"redis://limiter:hush@{redis.address}"}


def code(service: StartingService) -> int:
    return int(ask(service.grpc_address, rate_limit_request("edge", {"user": "alice"})).overall_code)


@pytest.mark.parametrize("active", ["false", "true"])
def test_health_has_the_reason_and_calls_follow_on_store_failure(
    variables: dict[str, object], redis: RedisServer, active: str
) -> None:
    variables |= {"RLS_WAIT_FOR_REDIS": "false", "REDIS_HEALTH_CHECK_ACTIVE_CONNECTION": active}
    with StartingService(variables) as service:
        service.wait_for_log("msg=serving")
        service.wait_for_log("redis_connect_failed")
        health = service.healthcheck()
        assert f"is not usable: {REASON}" in service.log()
        if active == "true":
            assert (health.status, health.body) == (500, f"redis: {REASON}")
        else:
            assert (health.status, health.headers["x-ratelimit-detail"]) == (200, f"redis: {REASON}")
        assert code(service) == Code.OVER_LIMIT

        set_user(redis)
        service.wait_until(lambda: code(service) == Code.OK, "counts in Redis")
        health = service.healthcheck()
        assert health.status == 200
        assert "x-ratelimit-detail" not in health.headers
        assert service.log().count("redis_connect_failed") == 1


def test_waiting_for_redis_logs_the_reason(variables: dict[str, object], redis: RedisServer) -> None:
    variables |= {"REDIS_STARTUP_INITIAL_INTERVAL": "100ms", "REDIS_STARTUP_MAX_INTERVAL": "200ms"}
    with StartingService(variables) as service:
        service.wait_for_log("waiting_for_redis", times=2)
        assert service.log().count(f"is not usable: {REASON}") >= 2
        set_user(redis)
        service.wait_until_serving()
        assert code(service) == Code.OK
