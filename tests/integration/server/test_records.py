"""A process with a database: what it starts from when that is away, how it hears of changes, and what it refuses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
from redis import Redis

from ratelimit_rls.cli.exit_codes import ExitCode
from tests.admin import Key, Recorded, a_day, upgraded
from tests.client import METHOD, RateLimitResponse, ask, rate_limit_request
from tests.databases import PASSWORD, PostgresServer
from tests.launched import Launched, Watched
from tests.servers import RedisServer

pytestmark = pytest.mark.slow

RULES = """\
domain: api
identity: {entries: [{key: x-api-key, kind: api_key, becomes: [user]}]}
descriptors:
  - {key: user, limits_of: user, rate_limit: {unit: day, requests_per_unit: 7}}
  - {key: ip, rate_limit: {unit: day, requests_per_unit: 8}}
"""
STORED = "domain: api\ndescriptors: [{key: shop, rate_limit: {unit: day, requests_per_unit: %d}}]\n"
PATIENCE_S = 5.0
"""A second is what is promised; a machine that is busy fails nobody."""


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    """One that tests may stop. A crash must not take what it said was kept."""
    with PostgresServer(["-c", "synchronous_commit=on"]) as server:
        yield server


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rules") / "api.yaml"
    path.write_text(RULES)
    return path


class House(NamedTuple):
    service: Recorded
    database: str


@pytest.fixture(scope="module")
def house(rules: Path, postgres_server: PostgresServer) -> Iterator[House]:
    """For all tests that change nothing but what they made."""
    database = postgres_server.new_database()
    url = upgraded(postgres_server.url(database))
    with Recorded(url, {"RLS_RULES": rules, "RLS_DATABASE_POLL": "1s"}) as service:
        yield House(service, database)


def limit_of(service: Watched, **entries: str) -> int:
    """That somebody is told; 0: none holds."""
    request = rate_limit_request("api", {key.replace("_", "-"): value for key, value in entries.items()})
    (status,) = ask(service.grpc_address, request).statuses
    return status.current_limit.requests_per_unit if status.current_limit else 0


def wait_for(condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    begun_s = time.monotonic()
    while not condition():
        assert time.monotonic() - begun_s < patience_s, f"not seen: {what}"
        time.sleep(0.005)
    print(f"{what}: after {(time.monotonic() - begun_s) * 1000:.0f} ms")


def settled(service: Recorded) -> Key:
    """Somebody with a key and 20 a day, and a stored rule, as this process has them."""
    service.admin.put_tier("gold", 20)
    service.admin.put_user("alice", tier="gold")
    key = service.admin.add_key("alice")
    service.admin.add_rule("shop", STORED % 30)
    wait_for(lambda: limit_of(service, shop="a") == 30, "a rule of the database")
    assert limit_of(service, x_api_key=key.text) == 20
    return key


def test_a_schema_that_is_behind_is_refused_with_what_to_do(rules: Path, postgres: PostgresServer) -> None:
    url = postgres.url(postgres.new_database())
    with Launched({"RLS_RULES": rules, "RLS_DATABASE_URL": url, "RLS_KEY_SECRET": "0123456789abcdef"}) as service:
        assert service.ended() == ExitCode.BAD
        assert "ratelimit-rls db upgrade" in service.log()
        assert "Traceback" not in service.log()
        assert PASSWORD not in service.log()


def test_a_process_starts_from_what_it_last_knew_and_catches_up(
    rules: Path, postgres: PostgresServer, tmp_path: Path
) -> None:
    url = upgraded(postgres.url(postgres.new_database()))
    variables = {"RLS_RULES": rules, "RLS_SNAPSHOT_FILE": tmp_path / "snapshot", "LOG_LEVEL": "info"}
    with Recorded(url, variables) as service:
        key = settled(service)

    postgres.kill()
    service, without = Recorded(url, variables), Recorded(url, {**variables, "RLS_SNAPSHOT_FILE": ""})
    with ExitStack() as stack, ThreadPoolExecutor() as beside:
        for one in (service, without):
            stack.callback(one.close)
        list(beside.map(Recorded.start, (service, without)))
        assert service.admin.source()["loaded_from"] == "snapshot"
        assert [limit_of(service, x_api_key=key.text), limit_of(service, shop="a")] == [20, 30]
        assert service.admin.send("PUT", "/users/bob", {}).status == 503
        assert [service.healthcheck().status, service.health()] == [200, "SERVING"]
        # Without one: the rules of files, for callers who are known by their address.
        assert [limit_of(without, x_api_key=key.text), limit_of(without, shop="a")] == [8, 0]
        assert "the database is away and there is no snapshot" in without.log()

        postgres.start()

        for one in (service, without):
            one.wait_for_source(lambda state: state["connected"], "follows the database again")
            wait_for(lambda one=one: limit_of(one, x_api_key=key.text) == 20, "its key")
            wait_for(lambda one=one: limit_of(one, shop="a") == 30, "its rule")
        without.admin.put_tier("gold", 21)
        wait_for(lambda: limit_of(service, x_api_key=key.text) == 21, "a change after the outage")
        assert PASSWORD not in service.log()
        assert "Traceback" not in service.log()


def test_what_nobody_told_of_is_found_by_asking(house: House, postgres_server: PostgresServer) -> None:
    service = house.service
    service.admin.put_user("bob", limits=[a_day(40)])
    wait_for(lambda: limit_of(service, user="bob") == 40, "told of")
    # Another process, whose word is lost on the way: no NOTIFY.
    postgres_server.sql(
        """UPDATE user_quotas SET custom_limits = '[{"requests_per_unit": 41, "unit": "day"}]' WHERE user_id = 'bob';
           INSERT INTO changes (at, kind, subject) VALUES (now(), 'user', 'bob')""",
        house.database,
    )
    wait_for(lambda: limit_of(service, user="bob") == 41, "found by asking every second")


def test_a_rule_acts_at_once_and_one_that_does_not_compile_changes_nothing(house: House) -> None:
    service, admin = house.service, house.service.admin

    def state() -> list[object]:
        return [admin.do("GET", "/rules"), admin.source(), admin.source("files"), service.debug("/rlconfig").body]

    rule_id = admin.add_rule("shop", STORED % 30)
    wait_for(lambda: limit_of(service, shop="a") == 30, "a new rule")
    admin.do("PUT", f"/rules/{rule_id}", {"name": "shop", "document": STORED % 31})
    wait_for(lambda: limit_of(service, shop="a") == 31, "another in its place")
    before = state()

    bad = (STORED % 32).replace("day", "eon")
    for method, path in (("POST", "/rules"), ("PUT", f"/rules/{rule_id}")):
        refused = admin.send(method, path, {"name": "bad", "document": bad})
        assert refused.status == 422
        error = refused.body["errors"][0]
        assert (error["line"], error["column"]) == (2, bad.splitlines()[1].index("eon") + 1)
        assert "invalid rate limit unit 'eon'" in str(error)
    assert state() == before
    assert limit_of(service, shop="a") == 31

    admin.do("DELETE", f"/rules/{rule_id}")
    wait_for(lambda: limit_of(service, shop="a") == 0, "the end of a rule")


def test_every_worker_follows_and_others_are_told_over_redis(
    rules: Path, any_redis: RedisServer, tmp_path: Path
) -> None:
    variables = {"RLS_RULES": rules, "REDIS_URL": any_redis.address, "RLS_WORKERS": 2, "LOG_LEVEL": "info"}
    with (
        Recorded(f"sqlite:///{tmp_path / 'records.db'}", variables) as service,
        Redis(port=any_redis.port) as redis,
        redis.pubsub() as heard,
        ExitStack() as stack,
    ):
        service.wait_for_log("msg=serving", times=2)
        heard.subscribe("rl:changes")
        own_pool = [("grpc.use_local_subchannel_pool", 1)]
        channels = [stack.enter_context(grpc.insecure_channel(service.grpc_address, own_pool)) for _ in range(12)]

        def limits() -> set[int]:
            """By connections that are spread over both."""
            request = rate_limit_request("api", {"user": "alice"})
            answers = [
                channel.unary_unary(METHOD, bytes, RateLimitResponse.parse)(request, timeout=5) for channel in channels
            ]
            return {answer.statuses[0].current_limit.requests_per_unit for answer in answers}

        assert limits() == {7}
        for number in range(50, 53):
            service.admin.put_user("alice", limits=[a_day(number)])
            wait_for(lambda number=number: limits() == {number}, "a change, in both workers")
        told = [message["data"] for _ in range(20) if (message := heard.get_message(True, 0.05))]
        assert told.count(b"changed") == 3
        assert "nobody was told" not in service.log()
