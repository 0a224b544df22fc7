"""Authentication and limits of callers, through a real Envoy in front of each of two replicas on one database.

On PostgreSQL the replicas share only the database, which notifies them of changes. With a SQLite file they share one
Redis for counters and notifications. At the end, the test searches for all sent credentials in everything that was
stored and logged.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

from tests.support.admin import TOKEN, Admin, Key, ServiceWithDatabase, upgrade_schema, yearly_limit
from tests.support.databases import PASSWORD, PostgresServer
from tests.support.grpc_client import Reply, get
from tests.support.jwt_factory import jwk, key_set, mint, private_key
from tests.support.otlp_collector import OtlpCollector
from tests.support.servers import SANDBOXES, EnvoyServer, RedisServer, Upstream

pytestmark = pytest.mark.e2e

SANDBOX = SANDBOXES / "api-keys"
PATIENCE_S = 5.0
"""The guarantee is one second. The measured time is printed, and a busy machine does not fail the test."""

IDENTITY = """\
identity:
  credentials:
    - {kind: api_key, header: x-api-key}
    - {kind: jwt, header: authorization}
  entries:
    - {key: x-api-key, kind: api_key, becomes: [tier, user]}
"""
RULES = f"""\
domain: api
answer: {{headers: [x-ratelimit, retry-after]}}
{IDENTITY}
  on_invalid: refuse
  hide_credentials: true
ext_authz:
  descriptors:
    - entries: [{{key: tier, from: tier, default: none}}, {{key: user, from: user}}]
    - entries: [{{key: ip, from: anonymous_ip}}]
descriptors:
  - key: tier
    descriptors:
      - {{key: user, limits_of: user, rate_limit: {{unit: year, requests_per_unit: 7}}}}
  - {{key: user, limits_of: user, rate_limit: {{unit: year, requests_per_unit: 7}}}}
  - {{key: ip, rate_limit: {{unit: year, requests_per_unit: 50}}}}
"""
STRICT = f"""\
domain: strict
{IDENTITY}
  on_missing: refuse
  blocked_status: 429
ext_authz:
  descriptors:
    - entries: [{{key: user, from: user}}]
    - entries: [{{key: ip, from: anonymous_ip}}]
descriptors:
  - {{key: user, limits_of: user, rate_limit: {{unit: year, requests_per_unit: 7}}}}
  - {{key: ip, rate_limit: {{unit: year, requests_per_unit: 2}}}}
"""
ISSUERS = """\
- name: accounts
  issuer: https://issuer
  audiences: [api]
  algorithms: [ES256]
  jwks: {file: keys.json}
  claims: {user: sub, tier: plan, org: org}
"""
EXT_AUTHZ = "envoy.filters.http.ext_authz"
EXT_AUTHZ_ROUTE = "type.googleapis.com/envoy.extensions.filters.http.ext_authz.v3.ExtAuthzPerRoute"


@dataclass
class Harness:
    """Two replicas, each behind its own Envoy. Administrators use the first."""

    services: Sequence[ServiceWithDatabase]
    envoys: Sequence[EnvoyServer]
    kept: Callable[[], bytes]  # contents of the database and of Redis
    collector: OtlpCollector
    secrets: list[str] = field(default_factory=list)  # the secret part of each credential

    @property
    def admin(self) -> Admin:
        return self.services[0].admin

    def key(self, user_id: str, **fields: Any) -> Key:
        key = self.admin.add_key(user_id, **fields)
        self.secrets.append(key.text[-43:])
        return key

    def token(self, **claims: Any) -> str:
        token = mint(**{"iat": time.time() - 5, "exp": time.time() + 600, **claims})
        self.secrets.append(token.rpartition(".")[2])
        return token

    def everywhere(self, what: str, is_so: Callable[[Reply], bool], path: str = "/", **headers: str) -> None:
        """Wait until both replicas respond as expected, and print how long it took."""
        begun_s = time.monotonic()
        took_s = []
        for envoy in reversed(self.envoys):  # first the replica that was not changed directly
            while not is_so(reply := get(envoy.url, path, **headers)):
                assert time.monotonic() - begun_s < PATIENCE_S, f"{what} is not seen: {reply}"
                time.sleep(0.005)
            took_s.append(time.monotonic() - begun_s)
        print(f"{what}: after {took_s[0] * 1000:.0f} ms on the other replica")

    def until_limit_is(self, limit: int, key: Key, what: str) -> None:
        self.everywhere(what, lambda reply: reply.headers.get("x-ratelimit-limit") == str(limit), x_api_key=key.text)

    def until_status_is(self, status: int, key: Key, what: str, path: str = "/") -> None:
        self.everywhere(what, lambda reply: reply.status == status, path, x_api_key=key.text)


def envoy_config() -> str:
    """The sandbox's configuration, with a route for the domain `strict` and one that uses RLS."""
    config = yaml.safe_load((SANDBOX / "envoy.yaml").read_text())
    (listener,) = config["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    routes = manager["route_config"]["virtual_hosts"][0]["routes"]

    def per_route(**settings: Any) -> dict[str, Any]:
        return {"typed_per_filter_config": {EXT_AUTHZ: {"@type": EXT_AUTHZ_ROUTE, **settings}}}

    sent = {"request_headers": {"header_name": "x-api-key", "descriptor_key": "x-api-key"}}
    routes[:0] = [
        {
            "match": {"prefix": "/strict"},
            "route": {"cluster": "upstream"},
            **per_route(check_settings={"context_extensions": {"ratelimit_domain": "strict"}}),
        },
        {
            "match": {"prefix": "/rls"},
            "route": {"cluster": "upstream", "rate_limits": [{"actions": [sent]}]},
            **per_route(disabled=True),
        },
    ]
    plain = yaml.safe_load((SANDBOXES / "rls-http" / "envoy.yaml").read_text())
    filters = plain["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"][
        "http_filters"
    ]
    (by_rls,) = (one for one in filters if one["name"] == "envoy.filters.http.ratelimit")
    by_rls["typed_config"]["domain"] = "api"
    manager["http_filters"].insert(1, by_rls)
    return str(yaml.safe_dump(config))


@pytest.fixture(scope="module", params=["postgresql", "sqlite-redis"])
def harness(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, upstream: Upstream
) -> Iterator[Harness]:
    directory = tmp_path_factory.mktemp("identity")
    for name, text in {"api.yaml": RULES, "strict.yaml": STRICT}.items():
        (directory / "rules").mkdir(exist_ok=True)
        (directory / "rules" / name).write_text(text)
    (directory / "issuers.yaml").write_text(ISSUERS)
    (directory / "keys.json").write_bytes(key_set(jwk(private_key("ES256"), kid="1")))
    (directory / "envoy.yaml").write_text(envoy_config())
    with ExitStack() as stack:
        collector = stack.enter_context(OtlpCollector())
        variables: dict[str, object] = {
            "RLS_RULES": directory / "rules",
            "RLS_JWT_ISSUERS": directory / "issuers.yaml",
            "RLS_AUDIT_SAMPLE": 1,
            "LOG_LEVEL": "trace",
            "RLS_LOG_DENIALS": 1000,
            "TRACING_ENABLED": "true",
            "TRACING_EXPORTER_PROTOCOL": "http",
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.http_url,
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }
        kept: Callable[[], bytes]
        if request.param == "postgresql":
            server: PostgresServer = request.getfixturevalue("postgres_server")
            database = server.new_database()
            stack.callback(server.drop_database, database)
            url = upgrade_schema(server.url(database))
            kept = lambda: in_postgres(server)  # noqa: E731
        else:
            redis = stack.enter_context(RedisServer())
            variables["REDIS_URL"] = redis.address
            url = f"sqlite:///{directory / 'records.db'}"
            kept = lambda: in_files(directory, "records.db*") + in_redis(redis)  # noqa: E731
        services = [ServiceWithDatabase(url, variables) for _ in range(2)]
        envoys = [
            EnvoyServer(directory / "envoy.yaml", {8000: upstream.port, 8081: service.grpc_port})
            for service in services
        ]
        for process in (*services, *envoys):
            stack.callback(process.close)
        if request.param == "sqlite-redis":
            services[0].start()  # creates the tables
        with ThreadPoolExecutor() as beside:  # startup is mostly waiting
            started = [beside.submit(service.start) for service in services if not service.running]
            for envoy in envoys:
                envoy.start()
            for service in started:
                service.result()
        yield Harness(services, envoys, kept, collector)


def in_files(directory: Path, pattern: str) -> bytes:
    return b"".join(path.read_bytes() for path in directory.glob(pattern) if path.is_file())


def in_postgres(server: PostgresServer) -> bytes:
    server.sql("CHECKPOINT")
    return in_files(server.directory / "data", "base/**/*") + in_files(server.directory / "data", "pg_wal/*")


def in_redis(redis: RedisServer) -> bytes:
    keys = redis.cli("KEYS", "*")
    return b"\n".join([*keys, *(redis.cli("DUMP", key) or b"" for key in keys)])


def test_admin_changes_reach_every_replica(harness: Harness) -> None:
    harness.admin.put_tier("gold", 1000)
    harness.admin.put_user("alice", tier="gold", org="acme")
    key = harness.key("alice")
    harness.until_limit_is(1000, key, "a new key, and its tier")
    harness.admin.put_tier("gold", 1001)
    harness.until_limit_is(1001, key, "other limits of the tier")
    harness.admin.put_user("alice", tier="gold", org="acme", limits=[yearly_limit(1002)])
    harness.until_limit_is(1002, key, "limits of its own")
    harness.admin.override("alice", 1003)
    harness.until_limit_is(1003, key, "an override")
    harness.admin.do("DELETE", "/users/alice/override")
    harness.until_limit_is(1002, key, "the override's end")
    harness.admin.block("alice", reason="spam")
    harness.until_status_is(403, key, "a block")
    harness.until_status_is(429, key, "the same where the domain says 429", "/strict")
    harness.admin.unblock("alice")
    harness.until_status_is(200, key, "the block's end")
    harness.admin.revoke(key)
    harness.until_status_is(401, key, "a revoked key")


def test_override_raises_the_tier_limit_and_keeps_the_count(harness: Harness) -> None:
    harness.admin.put_tier("silver", 3)
    harness.admin.put_user("bob", tier="silver")
    key, other = harness.key("bob"), harness.key("bob")
    envoy = harness.envoys[1]
    wait_for_key(envoy, other)  # counts as one request
    statuses = [get(envoy.url, "/", x_api_key=key.text).status for _ in range(3)]
    assert statuses == [200, 200, 429]
    harness.admin.override("bob", 5, "10m")
    wait_for(lambda: get(envoy.url, "/", x_api_key=key.text).status == 200)
    assert [get(envoy.url, "/", x_api_key=other.text).status for _ in range(2)] == [200, 429]


def wait_for_key(envoy: EnvoyServer, key: Key) -> None:
    wait_for(lambda: get(envoy.url, "/", x_api_key=key.text).status == 200)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.005)


def test_identity_headers_are_sent_and_cannot_be_forged(harness: Harness, upstream: Upstream) -> None:
    harness.admin.put_tier("copper", 100)
    harness.admin.put_user("carol", tier="copper", org="acme")
    key = harness.key("carol")
    forged = {f"x_ratelimit_{name}": "forged" for name in ("user", "tier", "org", "api_key", "ip", "rule")}
    wait_for_key(harness.envoys[1], key)

    assert get(harness.envoys[1].url, "/", x_api_key=key.text, **forged).status == 200
    received = {name: value for name, value in upstream.last_headers.items() if name.startswith("x-ratelimit-")}
    assert received.pop("x-ratelimit-ip")
    assert received == {
        "x-ratelimit-user": "carol",
        "x-ratelimit-tier": "copper",
        "x-ratelimit-org": "acme",
        "x-ratelimit-api-key": key.key_id,
    }
    assert "x-api-key" not in upstream.last_headers

    assert get(harness.envoys[1].url, "/", **forged).status == 200
    assert {name for name in upstream.last_headers if name.startswith("x-ratelimit-")} == {"x-ratelimit-ip"}
    assert "forged" not in upstream.last_headers.values()


def test_jwt_is_verified_with_a_key_file(harness: Harness, upstream: Upstream) -> None:
    harness.admin.put_tier("iron", 2)
    token = harness.token(sub="dora", plan="iron", org="acme")
    envoy = harness.envoys[1]
    harness.everywhere(
        "a tier that a token names",
        lambda reply: reply.headers["x-ratelimit-limit"] == "2",
        authorization=f"Bearer {token}",
    )
    get(envoy.url, "/", authorization=f"Bearer {token}")
    denied = get(envoy.url, "/", authorization=f"Bearer {token}")
    assert denied.status == 429
    passed = get(envoy.url, "/", authorization=f"bearer {harness.token(sub='dina')}")
    assert (passed.status, passed.headers["x-ratelimit-limit"]) == (200, "7")
    assert upstream.last_headers["x-ratelimit-user"] == "dina"
    assert "authorization" not in upstream.last_headers


def test_identity_header_values_are_injective(harness: Harness, upstream: Upstream) -> None:
    envoy = harness.envoys[1]
    received = {}
    for name in ("a\N{GRINNING FACE}", "a%F0%9F%98%80", "Zoë 100%"):
        assert get(envoy.url, "/", authorization=f"Bearer {harness.token(sub=name)}").status == 200
        received[upstream.last_headers["x-ratelimit-user"]] = name
    assert len(received) == 3
    assert all(unquote(value) == name for value, name in received.items())
    for name in (" dora", "dora ", "dora\u00a0"):
        assert get(envoy.url, "/", authorization=f"Bearer {harness.token(sub=name)}").status == 401
    for unreadable in (
        "Basic ZG9yYTpkb3Jh",
        "Bearer",
        "Bearer\tabc",
        f"Basic x, Bearer {harness.token(sub='dora')}",
        "",
    ):
        assert get(envoy.url, "/", authorization=unreadable).status == 401, unreadable


def test_invalid_credentials_are_denied_with_a_body(harness: Harness, upstream: Upstream) -> None:
    harness.admin.put_user("erin")
    key = harness.key("erin")
    wait_for_key(harness.envoys[1], key)
    before = upstream.requests
    guessed = "G" * 43
    harness.secrets.append(guessed)
    sent: list[dict[str, str]] = [
        {"x_api_key": f"rlk_{'a' * 12}_{guessed}"},
        {"x_api_key": f"rlk_{key.key_id}_{guessed}"},
        {"x_api_key": key.text + "x"},
        {"authorization": f"Bearer {harness.token(exp=time.time() - 100)}"},
        {"authorization": f"Bearer {harness.token(aud='another')}"},
        {"authorization": f"Bearer {harness.token()[:-4]}AAAA"},
    ]
    for headers in sent:
        reply = get(harness.envoys[1].url, "/", **headers)
        assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer"), headers
        assert reply.headers["content-type"] == "application/json"
        received = json.loads(reply.body)
        assert (received["error"]["code"], *received) == (401, "error", "request_id")
    assert upstream.requests == before


def test_domain_policy_for_unauthenticated_requests(harness: Harness) -> None:
    envoy = harness.envoys[1]
    assert get(envoy.url, "/strict").status == 401
    by_address = [get(envoy.url, "/strict", x_api_key=f"rlk_{'b' * 12}_{'G' * 43}").status for _ in range(3)]
    assert by_address == [200, 200, 429]


def test_rls_key_entry_is_resolved_to_a_caller(harness: Harness) -> None:
    harness.admin.put_tier("tin", 4)
    harness.admin.put_user("fred", tier="tin")
    key = harness.key("fred")
    envoy = harness.envoys[1]
    wait_for_key(envoy, key)  # over ext_authz, which shares the counter
    replies = [get(envoy.url, "/rls", x_api_key=key.text) for _ in range(4)]
    assert [reply.status for reply in replies] == [200, 200, 200, 429]
    assert replies[0].headers["x-ratelimit-limit"].startswith("4")
    harness.admin.revoke(key)
    harness.until_status_is(429, key, "a revoked key, over RLS", "/rls")


def test_credentials_are_not_stored_or_logged(harness: Harness) -> None:
    """Runs last: checks the credentials that all tests before it have sent."""
    harness.admin.put_user("gina")
    key = harness.key("gina")
    for envoy in harness.envoys:
        wait_for_key(envoy, key)
    wait_for(lambda: len(harness.admin.do("GET", "/decisions?user=gina")["items"]) >= len(harness.envoys))
    harness.collector.wait_until(lambda: len(harness.collector.spans()) > 0)
    received = {
        "the database and Redis": harness.kept(),
        "spans": repr([span.span for span in harness.collector.spans()]).encode(),
        **{f"the log of {service.pid}": service.log_path.read_bytes() for service in harness.services},
        **{
            f"{path} of {service.pid}": service.debug(path).body.encode()
            for service in harness.services
            for path in ("/stats", "/metrics", "/rlconfig")
        },
        "the record of changes": json.dumps(harness.admin.do("GET", "/audit?limit=500")).encode(),
    }
    assert key.key_id.encode() in received["the database and Redis"], "what is there is found"
    for secret in {*harness.secrets, TOKEN, PASSWORD}:
        for where, content in received.items():
            assert secret.encode() not in content, f"{secret} is in {where}"
