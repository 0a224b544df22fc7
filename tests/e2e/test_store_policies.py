"""Failure policies, leases, cached denials and request ids, as seen by a client of Envoy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.grpc_client import get
from tests.support.servers import SANDBOXES, EnvoyServer, RedisServer, Service, Upstream

pytestmark = pytest.mark.e2e

RULES = """\
domain: edge
charge: admitted
descriptors:
  - {key: user, value: local, on_store_failure: local, rate_limit: {unit: year, requests_per_unit: 4}}
  - {key: user, value: deny, on_store_failure: deny, rate_limit: {unit: year, requests_per_unit: 4}}
  - {key: user, value: allow, on_store_failure: allow, rate_limit: {unit: year, requests_per_unit: 4}}
  - {key: user, value: hot, hot: {lease: 10s}, rate_limit: {unit: year, requests_per_unit: 30}}
  - {key: user, rate_limit: {unit: year, requests_per_unit: 4}}
"""

Change = Callable[[dict[str, Any]], None]


def by_user(document: dict[str, Any]) -> dict[str, Any]:
    """Add a descriptor with x-user to every request. Return the settings of the connection manager."""
    chain = document["static_resources"]["listeners"][0]["filter_chains"][0]
    manager: dict[str, Any] = chain["filters"][0]["typed_config"]
    action = {"request_headers": {"header_name": "x-user", "descriptor_key": "user"}}
    manager["route_config"]["virtual_hosts"][0]["rate_limits"] = [{"actions": [action]}]
    return manager


def with_request_id(document: dict[str, Any]) -> None:
    service = by_user(document)["http_filters"][0]["typed_config"]["rate_limit_service"]
    service["grpc_service"]["initial_metadata"] = [{"key": "x-request-id", "value": "%REQ(x-request-id)%"}]


@pytest.fixture
def envoy_on(upstream: Upstream, any_redis: RedisServer, tmp_path: Path) -> Iterator[Callable[..., EnvoyServer]]:
    """Start Envoy in front of a service on Redis, with a changed configuration."""
    running: list[Service | EnvoyServer] = []

    def start(change: Change = by_user, **variables: object) -> EnvoyServer:  # type: ignore[assignment]
        (tmp_path / "rules.yaml").write_text(RULES)
        document = yaml.safe_load((SANDBOXES / "rls-http" / "envoy.yaml").read_text())
        change(document)
        config = tmp_path / "envoy.yaml"
        config.write_text(yaml.safe_dump(document))
        service = Service(
            {"RLS_RULES": tmp_path / "rules.yaml", "REDIS_URL": any_redis.address, "RLS_REPLICAS": 2, **variables}
        )
        running.append(service.start())
        proxy = EnvoyServer(config, {8000: upstream.port, 8081: service.grpc_port})
        running.append(proxy.start())
        return proxy

    yield start
    for process in reversed(running):
        process.close()


def statuses(proxy: EnvoyServer, user: str, times: int, **headers: str) -> list[int]:
    return [get(proxy.url, "/anything", x_user=user, **headers).status for _ in range(times)]


def test_failure_policies_during_a_redis_outage(envoy_on: Callable[..., EnvoyServer], any_redis: RedisServer) -> None:
    proxy = envoy_on()
    assert statuses(proxy, "local", 1) == [200]
    any_redis.stop()

    assert statuses(proxy, "local", 3) == [200, 200, 429]  # half of four
    assert statuses(proxy, "deny", 2) == [429, 429]
    assert statuses(proxy, "allow", 6) == [200] * 6
    any_redis.start()
    proxy.wait_until(lambda: statuses(proxy, "deny", 1) == [200], "is served by Redis again", timeout_s=5)


def test_denial_cache_saves_calls_and_lease_is_exact(
    envoy_on: Callable[..., EnvoyServer], any_redis: RedisServer
) -> None:
    proxy = envoy_on()
    assert statuses(proxy, "somebody", 5)[-2:] == [200, 429]
    before = any_redis.script_runs()
    assert statuses(proxy, "somebody", 20) == [429] * 20
    assert any_redis.script_runs() == before
    assert sorted(statuses(proxy, "hot", 35)) == [200] * 30 + [429] * 5


def test_retry_with_a_request_id_is_counted_once(envoy_on: Callable[..., EnvoyServer]) -> None:
    proxy = envoy_on(with_request_id, RLS_REQUEST_ID_METADATA="x-request-id")
    same = "11111111-1111-4111-8111-111111111111"

    assert statuses(proxy, "somebody", 10, x_request_id=same) == [200] * 10
    assert statuses(proxy, "somebody", 4) == [200, 200, 200, 429]
