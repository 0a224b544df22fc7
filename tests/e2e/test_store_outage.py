"""Redis goes away behind the service: Envoy is told in time, and limits hold again once it is back."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.client import Http, get
from tests.servers import SANDBOXES, EnvoyServer, RedisServer, Service, Upstream

pytestmark = pytest.mark.e2e


def limited(url: str) -> bool:
    """Whether an answer says where its limit stands, which only the store knows."""
    return "x-ratelimit-remaining" in get(url, "/limited").headers


@pytest.mark.parametrize("how", ["paused", "stopped"])
def test_envoy_decides_while_redis_is_away_and_limits_hold_within_seconds_of_its_return(
    upstream: Upstream, rules: Path, any_redis: RedisServer, how: str
) -> None:
    leave, back = {
        "paused": (any_redis.pause, any_redis.resume),
        "stopped": (any_redis.stop, any_redis.start),
    }[how]
    service = Service({"RLS_RULES": rules, "REDIS_URL": any_redis.address})
    where = {8000: upstream.port, 8081: service.grpc_port}
    with service, EnvoyServer(SANDBOXES / "rls-http" / "envoy.yaml", where) as proxy:
        assert limited(proxy.url)

        leave()
        with Http(proxy.url) as client:
            begun = time.monotonic()
            assert client.get("/limited").status == 200
            assert time.monotonic() - begun < 2
            assert not limited(proxy.url)
        assert service.running

        back()
        proxy.wait_until(lambda: limited(proxy.url), "limits again", timeout_s=5)
        assert [get(proxy.url, "/limited").status for _ in range(6)][-1] == 429
