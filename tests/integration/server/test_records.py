"""A process with a database: start without it, change notifications, and rejected schemas."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
from redis import Redis

from ratelimit_rls.cli.exit_codes import ExitCode
from tests.support.admin import Key, ServiceWithDatabase, upgrade_schema, yearly_limit
from tests.support.databases import PASSWORD, PostgresServer
from tests.support.grpc_client import METHOD, RateLimitResponse, ask, rate_limit_request
from tests.support.servers import RedisServer
from tests.support.service_process import ServiceProcess, StartingService

pytestmark = pytest.mark.slow

RULES = """\
domain: api
identity: {entries: [{key: x-api-key, kind: api_key, becomes: [user]}]}
descriptors:
  - {key: user, limits_of: user, rate_limit: {unit: year, requests_per_unit: 7}}
  - {key: ip, rate_limit: {unit: year, requests_per_unit: 8}}
"""
STORED = "domain: api\ndescriptors: [{key: shop, rate_limit: {unit: year, requests_per_unit: %d}}]\n"
PATIENCE_S = 5.0
"""Changes take effect within a second; the margin is for a busy machine."""


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    """A server that tests may stop. Committed data must survive a crash."""
    with PostgresServer(["-c", "synchronous_commit=on"]) as server:
        yield server


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rules") / "api.yaml"
    path.write_text(RULES)
    return path


class Installation(NamedTuple):
    service: ServiceWithDatabase
    database: str


@pytest.fixture(scope="module")
def installation(rules: Path, postgres_server: PostgresServer) -> Iterator[Installation]:
    """Shared by tests that change only what they created."""
    database = postgres_server.new_database()
    url = upgrade_schema(postgres_server.url(database))
    with ServiceWithDatabase(url, {"RLS_RULES": rules, "RLS_DATABASE_POLL": "1s"}) as service:
        yield Installation(service, database)


def limit_of(service: ServiceProcess, **entries: str) -> int:
    """Return the limit that applies to a user; 0 if none."""
    request = rate_limit_request("api", {key.replace("_", "-"): value for key, value in entries.items()})
    (status,) = ask(service.grpc_address, request).statuses
    return status.current_limit.requests_per_unit if status.current_limit else 0


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    begun_s = time.monotonic()
    while not condition():
        assert time.monotonic() - begun_s < timeout_s, f"not seen: {what}"
        time.sleep(0.005)
    print(f"{what}: after {(time.monotonic() - begun_s) * 1000:.0f} ms")


def settled(service: ServiceWithDatabase) -> Key:
    """Create a user with a key and 20 calls per year, and a stored rule; wait until the process applies them."""
    service.admin.put_tier("gold", 20)
    service.admin.put_user("alice", tier="gold")
    key = service.admin.add_key("alice")
    service.admin.add_rule("shop", STORED % 30)
    wait_for(lambda: limit_of(service, shop="a") == 30, "a rule of the database")
    assert limit_of(service, x_api_key=key.text) == 20
    return key


def test_outdated_schema_is_rejected_with_instructions(rules: Path, postgres: PostgresServer) -> None:
    url = postgres.url(postgres.new_database())
    with StartingService(
        {"RLS_RULES": rules, "RLS_DATABASE_URL": url, "RLS_KEY_SECRET": "0123456789abcdef"}
    ) as service:
        assert service.ended() == ExitCode.BAD
        assert "ratelimit-rls db upgrade" in service.log()
        assert "Traceback" not in service.log()
        assert PASSWORD not in service.log()


def test_process_starts_from_snapshot_and_catches_up(rules: Path, postgres: PostgresServer, tmp_path: Path) -> None:
    url = upgrade_schema(postgres.url(postgres.new_database()))
    variables = {"RLS_RULES": rules, "RLS_SNAPSHOT_FILE": tmp_path / "snapshot", "LOG_LEVEL": "info"}
    with ServiceWithDatabase(url, variables) as service:
        key = settled(service)

    postgres.kill()
    service, without = (
        ServiceWithDatabase(url, variables),
        ServiceWithDatabase(url, {**variables, "RLS_SNAPSHOT_FILE": ""}),
    )
    with ExitStack() as stack, ThreadPoolExecutor() as beside:
        for one in (service, without):
            stack.callback(one.close)
        list(beside.map(ServiceWithDatabase.start, (service, without)))
        assert service.admin.source()["loaded_from"] == "snapshot"
        assert [limit_of(service, x_api_key=key.text), limit_of(service, shop="a")] == [20, 30]
        assert service.admin.send("PUT", "/users/bob", {}).status == 503
        assert [service.healthcheck().status, service.health()] == [200, "SERVING"]
        # Without a snapshot: rules from files, and callers identified by address.
        assert [limit_of(without, x_api_key=key.text), limit_of(without, shop="a")] == [8, 0]
        assert "the database is unavailable, and there is no snapshot" in without.log()

        postgres.start()

        for one in (service, without):
            one.wait_for_source(lambda state: state["connected"], "follows the database again")
            wait_for(lambda one=one: limit_of(one, x_api_key=key.text) == 20, "its key")  # type: ignore[misc]
            wait_for(lambda one=one: limit_of(one, shop="a") == 30, "its rule")  # type: ignore[misc]
        without.admin.put_tier("gold", 21)
        wait_for(lambda: limit_of(service, x_api_key=key.text) == 21, "a change after the outage")
        assert PASSWORD not in service.log()
        assert "Traceback" not in service.log()


def test_read_only_database_is_reported(rules: Path, tmp_path: Path) -> None:
    """Another program holds SQLite's lock: calls are decided, and health, metrics and /sources report it."""
    path = tmp_path / "records.db"
    with ServiceWithDatabase(f"sqlite:///{path}", {"RLS_RULES": rules}) as service:
        service.admin.put_user("alice", limits=[yearly_limit(20)])
        wait_for(lambda: limit_of(service, user="alice") == 20, "a user")
        assert service.admin.source().items() >= {"connected": True, "writable": True, "write_error": None}.items()
        assert "ratelimit_database_writable 1" in service.debug("/metrics").body
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            assert service.admin.send("PUT", "/users/bob", {}).status == 503
            state = service.admin.source()
            assert (state["connected"], state["writable"]) == (True, False)
            assert "records.db" in state["write_error"]
            response = service.healthcheck()
            assert (response.status, response.body, service.health()) == (200, "OK", "SERVING")
            assert response.headers["x-ratelimit-detail"] == "database: writes fail"
            page = service.debug("/metrics").body
            assert "ratelimit_database_writable 0" in page
            assert "ratelimit_database_available 1" in page
            assert limit_of(service, user="alice") == 20
        # The write probe finds out: nothing else is written, since these calls are not recorded yet.
        service.wait_for_source(lambda state: state["writable"], "writes again")
        assert "x-ratelimit-detail" not in service.healthcheck().headers
        service.admin.put_user("bob")
        assert service.log().count("database_writes_failed") == service.log().count("database_writes_recovered") == 1


def test_changes_without_notification_are_found_by_polling(
    installation: Installation, postgres_server: PostgresServer
) -> None:
    service = installation.service
    service.admin.put_user("bob", limits=[yearly_limit(40)])
    wait_for(lambda: limit_of(service, user="bob") == 40, "told of")
    # A change by another process whose notification is lost: no NOTIFY.
    postgres_server.sql(
        """UPDATE user_quotas SET custom_limits = '[{"requests_per_unit": 41, "unit": "year"}]' WHERE user_id = 'bob';
           INSERT INTO changes (at, kind, subject) VALUES (now(), 'user', 'bob')""",
        installation.database,
    )
    wait_for(lambda: limit_of(service, user="bob") == 41, "found by asking every second")


def test_stored_rule_takes_effect_and_invalid_rule_changes_nothing(installation: Installation) -> None:
    service, admin = installation.service, installation.service.admin

    def state() -> list[object]:
        return [admin.do("GET", "/rules"), admin.source(), admin.source("files"), service.debug("/rlconfig").body]

    rule_id = admin.add_rule("shop", STORED % 30)
    wait_for(lambda: limit_of(service, shop="a") == 30, "a new rule")
    admin.do("PUT", f"/rules/{rule_id}", {"name": "shop", "document": STORED % 31})
    wait_for(lambda: limit_of(service, shop="a") == 31, "another in its place")
    before = state()

    bad = (STORED % 32).replace("year", "eon")
    for method, path in (("POST", "/rules"), ("PUT", f"/rules/{rule_id}")):
        rejected = admin.send(method, path, {"name": "bad", "document": bad})
        assert rejected.status == 422
        error = rejected.body["errors"][0]
        assert (error["line"], error["column"]) == (2, bad.splitlines()[1].index("eon") + 1)
        assert "invalid rate limit unit 'eon'" in str(error)
    assert state() == before
    assert limit_of(service, shop="a") == 31

    admin.do("DELETE", f"/rules/{rule_id}")
    wait_for(lambda: limit_of(service, shop="a") == 0, "the end of a rule")


def test_every_worker_applies_changes_and_redis_notifies_others(
    rules: Path, any_redis: RedisServer, tmp_path: Path
) -> None:
    variables = {"RLS_RULES": rules, "REDIS_URL": any_redis.address, "RLS_WORKERS": 2, "LOG_LEVEL": "info"}
    with (
        ServiceWithDatabase(f"sqlite:///{tmp_path / 'records.db'}", variables) as service,
        Redis(port=any_redis.port) as redis,
        redis.pubsub() as heard,
        ExitStack() as stack,
    ):
        service.wait_for_log("msg=serving", times=2)
        heard.subscribe("rl:changes")
        own_pool = [("grpc.use_local_subchannel_pool", 1)]
        channels = [stack.enter_context(grpc.insecure_channel(service.grpc_address, own_pool)) for _ in range(12)]

        def limits() -> set[int]:
            """Check over connections to both workers."""
            request = rate_limit_request("api", {"user": "alice"})
            answers = [
                channel.unary_unary(METHOD, bytes, RateLimitResponse.parse)(request, timeout=5) for channel in channels
            ]
            return {answer.statuses[0].current_limit.requests_per_unit for answer in answers}  # type: ignore[union-attr]

        assert limits() == {7}
        for number in range(50, 53):
            service.admin.put_user("alice", limits=[yearly_limit(number)])
            wait_for(lambda number=number: limits() == {number}, "a change, in both workers")  # type: ignore[misc]
        response = [message["data"] for _ in range(20) if (message := heard.get_message(True, 0.05))]
        assert response.count(b"changed") == 3
        assert "change_publish_failed" not in service.log()
