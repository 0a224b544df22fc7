"""A process with only the environment variables of envoyproxy/ratelimit behaves like envoyproxy/ratelimit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.support.grpc_client import Http, RateLimitResponse, ask, get, rate_limit_request
from tests.support.servers import RedisServer, Service
from tests.support.windows import DAY_S, wait_for_time_left

pytestmark = pytest.mark.e2e

# Rules written for envoyproxy/ratelimit: a number and a boolean as values, a nested key, a wildcard.
MONGO = """\
domain: mongo_cps
descriptors:
  - key: database
    value: users
    rate_limit:
      unit: day
      requests_per_unit: 3
  - key: database
    value: default
    rate_limit:
      unit: day
      requests_per_unit: 500
  - key: shard
    value: 1
    rate_limit: {unit: year, requests_per_unit: 7}
"""
EDGE = """\
domain: edge
descriptors:
  - key: message_type
    value: marketing
    descriptors:
      - key: to_number
        rate_limit:
          unit: day
          requests_per_unit: 2
  - key: path
    value: /v1/*
    shadow_mode: true
    rate_limit:
      unit: day
      requests_per_unit: 1
  - key: internal
    rate_limit:
      unlimited: true
"""
OK, OVER_LIMIT, DAY = 1, 2, 4


@pytest.fixture
def runtime_root(tmp_path: Path) -> Path:
    """RUNTIME_ROOT as a symbolic link to a release, which deployments of envoyproxy/ratelimit swap."""
    config = tmp_path / "releases" / "1" / "ratelimit" / "config"
    config.mkdir(parents=True)
    (config / "mongo.yaml").write_text(MONGO)
    (config / "edge.yaml").write_text(EDGE)
    current = tmp_path / "current"
    current.symlink_to(tmp_path / "releases" / "1")
    return current


@pytest.fixture
def service(runtime_root: Path, any_redis: RedisServer) -> Iterator[Service]:
    environment = {
        "RUNTIME_ROOT": runtime_root,
        "RUNTIME_SUBDIRECTORY": "ratelimit",
        "REDIS_SOCKET_TYPE": "tcp",
        "REDIS_URL": any_redis.address,
        "USE_STATSD": "false",
        "LOG_LEVEL": "debug",
        "LIMIT_RESPONSE_HEADERS_ENABLED": "true",
        "RLS_DRAIN_DELAY": None,
    }
    with Service(environment) as process:
        wait_for_time_left(DAY_S)
        yield process
        process.kill()


def headers(answer: RateLimitResponse) -> dict[str, str]:
    return {header.key: header.value for header in answer.response_headers_to_add}


def test_codes_statuses_and_headers_over_grpc(service: Service) -> None:
    request = rate_limit_request("mongo_cps", {"database": "users"}, {"database": "unheard of"})

    answers = [ask(service.grpc_address, request) for _ in range(4)]

    assert [answer.overall_code for answer in answers] == [OK, OK, OK, OVER_LIMIT]
    limited, unmatched = answers[3].statuses
    assert (limited.code, limited.limit_remaining) == (OVER_LIMIT, 0)
    assert limited.current_limit is not None
    assert (limited.current_limit.requests_per_unit, limited.current_limit.unit) == (3, DAY)
    assert limited.duration_until_reset is not None
    assert 0 < limited.duration_until_reset.total_seconds() <= DAY_S
    assert limited.duration_until_reset.microseconds == 0
    assert (unmatched.code, unmatched.current_limit, unmatched.limit_remaining) == (OK, None, 0)
    assert [headers(answer)["RateLimit-Remaining"] for answer in answers] == ["2", "1", "0", "0"]
    assert list(headers(answers[3])) == ["RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset"]


def test_nested_wildcard_shadow_unlimited_and_scalar_rules(service: Service) -> None:
    def codes(domain: str, descriptor: dict[str, str], times: int) -> list[int]:
        request = rate_limit_request(domain, descriptor)
        return [int(ask(service.grpc_address, request).overall_code) for _ in range(times)]

    marketing = {"message_type": "marketing", "to_number": "2061111111"}
    assert codes("edge", marketing, 3) == [OK, OK, OVER_LIMIT]
    assert codes("edge", {**marketing, "to_number": "2062222222"}, 1) == [OK]
    assert codes("edge", {"path": "/v1/users"}, 3) == [OK, OK, OK]
    assert codes("edge", {"internal": "yes"}, 3) == [OK, OK, OK]
    assert codes("mongo_cps", {"shard": "1"}, 8) == [OK] * 7 + [OVER_LIMIT]
    unlimited = ask(service.grpc_address, rate_limit_request("edge", {"internal": "yes"})).statuses[0]
    assert unlimited.limit_remaining == 4294967295


def test_denied_hits_are_counted_in_redis(service: Service, any_redis: RedisServer) -> None:
    request = rate_limit_request("mongo_cps", {"database": "users"}, hits=10)

    assert ask(service.grpc_address, request).overall_code == OVER_LIMIT

    one = rate_limit_request("mongo_cps", {"database": "users"})
    assert ask(service.grpc_address, one).overall_code == OVER_LIMIT
    assert any_redis.cli("DBSIZE") == 1


def test_json_healthcheck_and_rlconfig_over_http(service: Service) -> None:
    body = json.dumps({"domain": "mongo_cps", "descriptors": [{"entries": [{"key": "database", "value": "users"}]}]})
    with Http(f"http://127.0.0.1:{service.http_port}") as client:
        answers = [client.post("/json", body) for _ in range(4)]
        assert [answer.status for answer in answers] == [200, 200, 200, 429]
        assert answers[3].headers["content-type"].startswith("application/json")
        denial = json.loads(answers[3].body)
        assert denial["overallCode"] == "OVER_LIMIT"
        assert denial["statuses"][0]["currentLimit"] == {"requestsPerUnit": 3, "unit": "DAY"}
        assert re.fullmatch(r"\d+s", denial["statuses"][0]["durationUntilReset"])
        assert json.loads(answers[0].body)["statuses"][0]["limitRemaining"] == 2
        assert client.post("/json", "{").status == 400
        assert client.post("/json", "").status == 400
        health = client.get("/healthcheck")
        assert (health.status, health.body) == (200, "OK")
        assert client.get("/nowhere").status == 404

    config = get(f"http://127.0.0.1:{service.debug_port}", "/rlconfig")
    limits = "shadow_mode: false, quota_mode: false"
    assert f"mongo_cps.database_users: unit=DAY requests_per_unit=3, {limits}" in config.body.splitlines()
    assert f"edge.message_type_marketing.to_number: unit=DAY requests_per_unit=2, {limits}" in config.body.splitlines()
    assert f"edge.internal: unit=UNKNOWN requests_per_unit=0, {limits}" in config.body.splitlines()
    listing = get(f"http://127.0.0.1:{service.debug_port}", "/")
    assert "/rlconfig: print out the currently loaded configuration for debugging" in listing.body


@pytest.mark.parametrize(
    ("domain", "descriptors", "sentence"),
    [
        ("", [{"a": "b"}], "rate limit domain must not be empty"),
        ("edge", [], "rate limit descriptor list must not be empty"),
    ],
)
def test_invalid_requests_get_the_errors_of_envoyproxy_ratelimit(
    service: Service, domain: str, descriptors: list[dict[str, str]], sentence: str
) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        ask(service.grpc_address, rate_limit_request(domain, *descriptors))

    assert sentence in (raised.value.details() or "")
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_swapped_runtime_root_is_reloaded(service: Service, runtime_root: Path) -> None:
    config = runtime_root.parent / "releases" / "2" / "ratelimit" / "config"
    config.mkdir(parents=True)
    (config / "new.yaml").write_text(MONGO.replace("mongo_cps", "renamed"))

    link = runtime_root.with_name("next")
    link.symlink_to(runtime_root.parent / "releases" / "2")
    link.rename(runtime_root)

    url = f"http://127.0.0.1:{service.debug_port}"
    service.wait_until(lambda: "renamed.database_users" in get(url, "/rlconfig").body, "loads the new release")
    assert "mongo_cps" not in get(url, "/rlconfig").body
