"""PostgreSQL is killed under load and comes back: no call notices, and what is recorded afterwards is exact.

What a call took is measured by its caller. A machine that has other things to do makes calls look slow, so what caller
and service had to wait for a core is taken off; the tenth by which an outage may slow calls down at the 99th percentile
is then still less than by which two quiet spells differ, hence NOISE_S: a call that waited for the database, or for
anything that does, would take longer by far.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from signal import SIGKILL
from typing import NamedTuple

import pytest

from bench import cpu
from ratelimit_rls.core.model import Code
from tests.admin import Recorded, a_day, upgraded
from tests.client import rate_limit_request
from tests.databases import PostgresServer
from tests.paced import Paced, Told
from tests.starved import Starved

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]

RULES = """\
domain: load
identity: {entries: [{key: x-api-key, kind: api_key, becomes: [user]}], on_invalid: refuse}
descriptors: [{key: user, limits_of: user}]
"""
CALLS_PER_S = (200, 60)
"""To each service; every other one is refused. The first is measured, so the second must not be in its way."""

QUIET_S = 3.0
OUTAGE_S = 4.0
DEADLINE_S = 1.0
SMALL_BUFFER = 40
"""Of recorded decisions: what is refused within little more than a second."""

RECORDED = "rate_limit_audit_logs"
BY_THE_MINUTE = "rate_limit_metrics WHERE granularity = 'minute'"

SLOWER = 1.1
NOISE_S = 0.002
TRIES = 3


class House(NamedTuple):
    postgres: PostgresServer
    databases: Sequence[str]  # one for each service
    services: Sequence[Recorded]
    messages: Sequence[Sequence[bytes]]  # of a caller with a key who passes, and of one who does not


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    """A service that can wait for the database for long, and one that can keep little meanwhile."""
    (tmp_path / "rules.yaml").write_text(RULES)
    variables = {"RLS_RULES": tmp_path / "rules.yaml", "RLS_AUDIT_SAMPLE": 0}
    with ExitStack() as stack:
        # What it said was kept must not go with it, or nothing could be counted.
        postgres = stack.enter_context(PostgresServer(["-c", "synchronous_commit=on"]))
        databases = [postgres.new_database() for _ in range(2)]
        services = [
            Recorded(upgraded(postgres.url(database)), {**variables, **more})
            for database, more in zip(databases, ({}, {"RLS_AUDIT_BUFFER": SMALL_BUFFER}), strict=True)
        ]
        for service in services:
            stack.callback(service.close)
        with ThreadPoolExecutor() as beside:
            list(beside.map(Recorded.start, services))
        yield House(postgres, databases, services, [new_callers(service) for service in services])


def new_callers(service: Recorded) -> list[bytes]:
    messages = []
    for user, limit in (("easy", 4_000_000_000), ("hard", 1)):
        service.admin.put_user(user, limits=[a_day(limit)])
        key = service.admin.add_key(user)
        messages.append(bytes(rate_limit_request("load", {"x-api-key": key.text})))
    service.wait_for_source(lambda state: state["sequence"] == 4, "knows its callers")
    return messages


def crash(postgres: PostgresServer) -> None:
    """All of it at once, without a word to anybody."""
    for pid in cpu.family(postgres.pid):
        os.kill(pid, SIGKILL)
    postgres.kill()  # which finds it dead


def p99_s(calls: list[Told], starved: Starved) -> float:
    took_s = sorted(call.ended_s - call.begun_s - starved.between_s(call.begun_s, call.ended_s) for call in calls)
    return took_s[len(took_s) * 99 // 100]


def between(load: Paced, since_s: float, until_s: float) -> list[Told]:
    return [call for call in load.calls if since_s <= call.begun_s and call.ended_s < until_s]


def test_no_call_notices_that_the_database_is_gone_and_records_are_exact(house: House) -> None:
    postgres, databases, services, messages = house
    with ExitStack() as stack:
        loads = [
            stack.enter_context(Paced(service.grpc_address, own, per_second=rate, timeout_s=DEADLINE_S))
            for service, own, rate in zip(services, messages, CALLS_PER_S, strict=True)
        ]
        starved = stack.enter_context(Starved(os.getpid(), services[0].pid))
        time.sleep(1)  # everything that is made once is made
        for _ in range(TRIES):
            before_s = time.monotonic()
            time.sleep(QUIET_S)
            crash(postgres)
            gone_s = time.monotonic()
            time.sleep(OUTAGE_S)
            assert services[0].admin.send("PUT", "/users/other", {}).status == 503
            back_s = time.monotonic()
            postgres.start()
            for service in services:
                service.wait_for_source(lambda state: state["connected"], "follows the database again")
            again_s = time.monotonic()
            spans = (before_s, gone_s), (gone_s, back_s), (back_s, again_s + 1)
            time.sleep(1)
            quiet, outage, after = (p99_s(between(loads[0], *span), starved) for span in spans)
            print(
                f"p99 {quiet * 1000:.2f} ms before, {outage * 1000:.2f} ms without the database for "
                f"{back_s - gone_s:.1f} s, {after * 1000:.2f} ms while it came back ({again_s - back_s:.1f} s)"
            )
            if outage <= SLOWER * quiet + NOISE_S:
                break
        else:
            pytest.fail(f"slower by more than {SLOWER - 1:.0%} and {NOISE_S * 1000:g} ms, {TRIES} times")

        for load in loads:
            load.stop()
            assert set(load.outcomes) == {Code.OK, Code.OVER_LIMIT}, load.outcomes
            assert all((call.outcome == Code.OK) == (call.message == 0) for call in load.calls[10:])

    for service, database, load, is_small in zip(services, databases, loads, (False, True), strict=True):
        refused = load.outcomes[Code.OVER_LIMIT]
        service.wait_until(lambda service=service: service.stat("ratelimit.audit.waiting") == 0, "has caught up")
        dropped = service.stat("ratelimit.audit.dropped_total")
        assert service.stop() == 0  # the last of it, and usage of the minute that runs, is written by then
        recorded = int(postgres.sql(f"SELECT count(*) FROM {RECORDED} WHERE decision = 'throttled'", database))
        usage = postgres.sql(f"SELECT sum(total_requests), sum(throttled_requests) FROM {BY_THE_MINUTE}", database)
        print(f"{refused} refused, {recorded} recorded, {dropped} dropped; usage {usage.strip()} of {len(load.calls)}")
        assert recorded == refused - dropped
        assert (dropped > 0) == is_small
        assert usage.strip() == f"{len(load.calls)}|{refused}"
