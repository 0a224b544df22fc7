"""Redis outage: Envoy gets a response in time, and limits apply again once Redis is back."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.grpc_client import Http, get
from tests.support.servers import SANDBOXES, EnvoyServer, RedisServer, Service, Upstream

pytestmark = pytest.mark.e2e


def limited(url: str) -> bool:
    """Return whether a response has the state of its limit, which only the store knows."""
    return "x-ratelimit-remaining" in get(url, "/limited").headers


@pytest.mark.parametrize("how", ["paused", "stopped"])
def test_envoy_decides_during_a_redis_outage_and_limits_recover(
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
