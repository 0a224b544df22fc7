"""Who is calling, and what they may do, through a real Envoy before each of two replicas on one database.

On PostgreSQL they have nothing but the database in common, and are told of changes by it; on a SQLite file they count
in one Redis, and are told over it. At the end, what was sent as a credential is looked for in all that was kept and
told.
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

import pytest
import yaml

from tests.admin import TOKEN, Admin, Key, Recorded, a_day, upgraded
from tests.client import Reply, get
from tests.databases import PASSWORD, PostgresServer
from tests.otlp_collector import OtlpCollector
from tests.servers import SANDBOXES, EnvoyServer, RedisServer, Upstream
from tests.unit.identity.minted import jwk, key_set, mint, private_key

pytestmark = pytest.mark.e2e

SANDBOX = SANDBOXES / "api-keys"
PATIENCE_S = 5.0
"""Within a second is what is promised; what is measured is printed, and a machine that is busy fails nobody."""

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
      - {{key: user, limits_of: user, rate_limit: {{unit: day, requests_per_unit: 7}}}}
  - {{key: user, limits_of: user, rate_limit: {{unit: day, requests_per_unit: 7}}}}
  - {{key: ip, rate_limit: {{unit: day, requests_per_unit: 50}}}}
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
  - {{key: user, limits_of: user, rate_limit: {{unit: day, requests_per_unit: 7}}}}
  - {{key: ip, rate_limit: {{unit: day, requests_per_unit: 2}}}}
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
class House:
    """Two replicas, each behind an Envoy of its own. Administrators speak to the first."""

    services: Sequence[Recorded]
    envoys: Sequence[EnvoyServer]
    kept: Callable[[], bytes]  # all that the database and Redis have
    collector: OtlpCollector
    secrets: list[str] = field(default_factory=list)  # the part of each credential that proves something

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
        """Waits until both replicas answer so, and prints how long that took."""
        begun_s = time.monotonic()
        took_s = []
        for envoy in reversed(self.envoys):  # the one that was not told directly first
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
    """The sandbox's, with a route whose domain is `strict`, and one that asks by RLS instead."""
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
def house(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, upstream: Upstream
) -> Iterator[House]:
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
            url = upgraded(server.url(database))
            kept = lambda: in_postgres(server)  # noqa: E731
        else:
            redis = stack.enter_context(RedisServer())
            variables["REDIS_URL"] = redis.address
            url = f"sqlite:///{directory / 'records.db'}"
            kept = lambda: in_files(directory, "records.db*") + in_redis(redis)  # noqa: E731
        services = [Recorded(url, variables) for _ in range(2)]
        envoys = [
            EnvoyServer(directory / "envoy.yaml", {8000: upstream.port, 8081: service.grpc_port})
            for service in services
        ]
        for process in (*services, *envoys):
            stack.callback(process.close)
        if request.param == "sqlite-redis":
            services[0].start()  # it makes the tables
        with ThreadPoolExecutor() as beside:  # most of a start is waiting
            started = [beside.submit(service.start) for service in services if not service.running]
            for envoy in envoys:
                envoy.start()
            for service in started:
                service.result()
        yield House(services, envoys, kept, collector)


def in_files(directory: Path, pattern: str) -> bytes:
    return b"".join(path.read_bytes() for path in directory.glob(pattern) if path.is_file())


def in_postgres(server: PostgresServer) -> bytes:
    server.sql("CHECKPOINT")
    return in_files(server.directory / "data", "base/**/*") + in_files(server.directory / "data", "pg_wal/*")


def in_redis(redis: RedisServer) -> bytes:
    keys = redis.cli("KEYS", "*")
    return b"\n".join([*keys, *(redis.cli("DUMP", key) or b"" for key in keys)])


def test_what_administrators_change_acts_on_every_replica(house: House) -> None:
    house.admin.put_tier("gold", 1000)
    house.admin.put_user("alice", tier="gold", org="acme")
    key = house.key("alice")
    house.until_limit_is(1000, key, "a new key, and its tier")
    house.admin.put_tier("gold", 1001)
    house.until_limit_is(1001, key, "other limits of the tier")
    house.admin.put_user("alice", tier="gold", org="acme", limits=[a_day(1002)])
    house.until_limit_is(1002, key, "limits of its own")
    house.admin.override("alice", 1003)
    house.until_limit_is(1003, key, "an override")
    house.admin.do("DELETE", "/users/alice/override")
    house.until_limit_is(1002, key, "the override's end")
    house.admin.block("alice", reason="spam")
    house.until_status_is(403, key, "a block")
    house.until_status_is(429, key, "the same where the domain says 429", "/strict")
    house.admin.unblock("alice")
    house.until_status_is(200, key, "the block's end")
    house.admin.revoke(key)
    house.until_status_is(401, key, "a revoked key")


def test_a_tier_limits_and_an_override_gives_more_without_forgetting(house: House) -> None:
    house.admin.put_tier("silver", 3)
    house.admin.put_user("bob", tier="silver")
    key, other = house.key("bob"), house.key("bob")
    envoy = house.envoys[1]
    wait_for_key(envoy, other)  # which counts as one
    statuses = [get(envoy.url, "/", x_api_key=key.text).status for _ in range(3)]
    assert statuses == [200, 200, 429]
    house.admin.override("bob", 5, "10m")
    wait_for(lambda: get(envoy.url, "/", x_api_key=key.text).status == 200)
    assert [get(envoy.url, "/", x_api_key=other.text).status for _ in range(2)] == [200, 429]


def wait_for_key(envoy: EnvoyServer, key: Key) -> None:
    wait_for(lambda: get(envoy.url, "/", x_api_key=key.text).status == 200)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.005)


def test_the_upstream_is_told_who_it_is_and_no_client_can_say_so(house: House, upstream: Upstream) -> None:
    house.admin.put_tier("copper", 100)
    house.admin.put_user("carol", tier="copper", org="acme")
    key = house.key("carol")
    forged = {f"x_ratelimit_{name}": "forged" for name in ("user", "tier", "org", "api_key", "ip", "rule")}
    wait_for_key(house.envoys[1], key)

    assert get(house.envoys[1].url, "/", x_api_key=key.text, **forged).status == 200
    told = {name: value for name, value in upstream.last_headers.items() if name.startswith("x-ratelimit-")}
    assert told.pop("x-ratelimit-ip")
    assert told == {
        "x-ratelimit-user": "carol",
        "x-ratelimit-tier": "copper",
        "x-ratelimit-org": "acme",
        "x-ratelimit-api-key": key.key_id,
    }
    assert "x-api-key" not in upstream.last_headers

    assert get(house.envoys[1].url, "/", **forged).status == 200
    assert {name for name in upstream.last_headers if name.startswith("x-ratelimit-")} == {"x-ratelimit-ip"}
    assert "forged" not in upstream.last_headers.values()


def test_a_token_says_who_it_is_by_a_key_of_a_file(house: House, upstream: Upstream) -> None:
    house.admin.put_tier("iron", 2)
    token = house.token(sub="dora", plan="iron", org="acme")
    envoy = house.envoys[1]
    house.everywhere(
        "a tier that a token names",
        lambda reply: reply.headers["x-ratelimit-limit"] == "2",
        authorization=f"Bearer {token}",
    )
    get(envoy.url, "/", authorization=f"Bearer {token}")
    refused = get(envoy.url, "/", authorization=f"Bearer {token}")
    assert refused.status == 429
    passed = get(envoy.url, "/", authorization=f"bearer {house.token(sub='dina')}")
    assert (passed.status, passed.headers["x-ratelimit-limit"]) == (200, "7")
    assert upstream.last_headers["x-ratelimit-user"] == "dina"
    assert "authorization" not in upstream.last_headers


def test_what_proves_nothing_is_refused_with_a_body(house: House, upstream: Upstream) -> None:
    house.admin.put_user("erin")
    key = house.key("erin")
    wait_for_key(house.envoys[1], key)
    before = upstream.requests
    guessed = "G" * 43
    house.secrets.append(guessed)
    sent: list[dict[str, str]] = [
        {"x_api_key": f"rlk_{'a' * 12}_{guessed}"},
        {"x_api_key": f"rlk_{key.key_id}_{guessed}"},
        {"x_api_key": key.text + "x"},
        {"authorization": f"Bearer {house.token(exp=time.time() - 100)}"},
        {"authorization": f"Bearer {house.token(aud='another')}"},
        {"authorization": f"Bearer {house.token()[:-4]}AAAA"},
    ]
    for headers in sent:
        reply = get(house.envoys[1].url, "/", **headers)
        assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer"), headers
        assert reply.headers["content-type"] == "application/json"
        told = json.loads(reply.body)
        assert (told["error"]["code"], *told) == (401, "error", "request_id")
    assert upstream.requests == before


def test_a_domain_says_what_becomes_of_those_who_prove_nothing(house: House) -> None:
    envoy = house.envoys[1]
    assert get(envoy.url, "/strict").status == 401
    by_address = [get(envoy.url, "/strict", x_api_key=f"rlk_{'b' * 12}_{'G' * 43}").status for _ in range(3)]
    assert by_address == [200, 200, 429]


def test_over_rls_an_entry_with_a_key_is_who_it_is(house: House) -> None:
    house.admin.put_tier("tin", 4)
    house.admin.put_user("fred", tier="tin")
    key = house.key("fred")
    envoy = house.envoys[1]
    wait_for_key(envoy, key)  # by ext_authz: the counter is the same
    replies = [get(envoy.url, "/rls", x_api_key=key.text) for _ in range(4)]
    assert [reply.status for reply in replies] == [200, 200, 200, 429]
    assert replies[0].headers["x-ratelimit-limit"].startswith("4")
    house.admin.revoke(key)
    house.until_status_is(429, key, "a revoked key, over RLS", "/rls")


def test_no_credential_is_kept_or_told_anywhere(house: House) -> None:
    """The last one: of all that the tests before it have sent."""
    house.admin.put_user("gina")
    key = house.key("gina")
    for envoy in house.envoys:
        wait_for_key(envoy, key)
    wait_for(lambda: len(house.admin.do("GET", "/decisions?user=gina")["items"]) >= len(house.envoys))
    house.collector.wait_until(lambda: len(house.collector.spans()) > 0)
    told = {
        "the database and Redis": house.kept(),
        "spans": repr([span.span for span in house.collector.spans()]).encode(),
        **{f"the log of {service.pid}": service.log_path.read_bytes() for service in house.services},
        **{
            f"{path} of {service.pid}": service.debug(path).body.encode()
            for service in house.services
            for path in ("/stats", "/metrics", "/rlconfig")
        },
        "the record of changes": json.dumps(house.admin.do("GET", "/audit?limit=500")).encode(),
    }
    assert key.key_id.encode() in told["the database and Redis"], "what is there is found"
    for secret in {*house.secrets, TOKEN, PASSWORD}:
        for where, content in told.items():
            assert secret.encode() not in content, f"{secret} is in {where}"
