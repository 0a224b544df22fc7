"""Redis dies under load and comes back: calls fail with a message meanwhile, and succeed soon after."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from ratelimit_rls.core.model import Code
from tests.support.closed_loop_clients import ClosedLoopClients
from tests.support.servers import RedisServer
from tests.support.service_process import HIT, UNRESTRICTIVE_RULES, ServiceProcess

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]

BACK_WITHIN_S = 1.5


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "roomy.yaml"
    path.write_text(UNRESTRICTIVE_RULES)
    return path


@pytest.mark.parametrize("looks", ["true", "false"])
@pytest.mark.parametrize("away_s", [0.3, 4.0])
def test_calls_succeed_within_about_a_second_of_redis_being_back(
    looks: str, away_s: float, rules: Path, redis: RedisServer
) -> None:
    variables = {"RLS_RULES": rules, "REDIS_URL": redis.address, "REDIS_HEALTH_CHECK_ACTIVE_CONNECTION": looks}
    with ServiceProcess(variables) as service, ClosedLoopClients(service.grpc_address, HIT, clients=2) as load:
        redis.kill()
        down_s = time.monotonic()
        service.wait_for_log("redis_connection_lost")
        load.wait_for_more(20)
        unwell = looks == "true"
        assert service.healthcheck().status == (500 if unwell else 200)
        assert [service.health(), service.health("")] == ["NOT_SERVING" if unwell else "SERVING", "SERVING"]
        time.sleep(max(0.0, down_s + away_s - time.monotonic()))

        redis.start()
        back_s = time.monotonic()
        service.wait_for_log("redis_connection_restored")
        service.wait_until(lambda: any(call.outcome == Code.OK for call in load.since(back_s)), "answers again")
        load.stop()

        answered_s = min(call.ended_s for call in load.since(back_s) if call.outcome == Code.OK)
        print(f"away for {back_s - down_s:.1f} s, first answer {answered_s - back_s:.2f} s after Redis was back")
        assert answered_s - back_s < BACK_WITHIN_S
        assert set(load.outcomes) == {Code.OK, grpc.StatusCode.UNAVAILABLE}
        sentences = {call.details for call in load.calls if call.outcome != Code.OK}
        assert all("Redis" in sentence for sentence in sentences), sentences
        assert service.healthcheck().status == 200
        assert (
            service.stat("ratelimit.service.call.should_rate_limit.redis_error")
            == load.outcomes[grpc.StatusCode.UNAVAILABLE]
        )


def test_calls_fail_within_the_store_timeout_while_redis_hangs(rules: Path, redis: RedisServer) -> None:
    variables = {"RLS_RULES": rules, "REDIS_URL": redis.address, "RLS_STORE_TIMEOUT": "300ms"}
    with ServiceProcess(variables) as service, ClosedLoopClients(service.grpc_address, HIT) as load:
        redis.pause()
        time.sleep(2)
        redis.resume()
        back_s = time.monotonic()
        load.wait_for_more(1000)
        load.stop()

        assert load.outcomes[grpc.StatusCode.UNAVAILABLE] > 0
        longest_s = max(call.ended_s - call.begun_s for call in load.calls)
        answered_s = min(call.ended_s for call in load.since(back_s) if call.outcome == Code.OK)
        print(f"longest call {longest_s:.2f} s, first answer {answered_s - back_s:.2f} s after Redis was back")
        assert longest_s < 1
        assert answered_s - back_s < BACK_WITHIN_S
