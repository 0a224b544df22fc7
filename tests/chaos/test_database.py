"""PostgreSQL is killed under load and restarted: calls are not affected, and records are exact afterwards.

Durations are measured by the callers. On a busy machine calls look slow, so the time that caller and service waited for
a core is subtracted. The tenth by which an outage may slow calls at the 99th percentile is then still less than the
difference between two quiet periods, hence NOISE_S: a call that waited for the database, or for anything that does,
would take far longer.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from signal import SIGKILL
from typing import NamedTuple

import pytest

from bench import cpu
from ratelimit_rls.core.model import Code
from tests.support.admin import ServiceWithDatabase, upgrade_schema, yearly_limit
from tests.support.cpu_starvation import CpuStarvation
from tests.support.databases import PostgresServer
from tests.support.grpc_client import rate_limit_request
from tests.support.load import Outcome, run_load
from tests.support.open_loop_clients import CallRecord, OpenLoopClients

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]

RULES = """\
domain: load
identity: {entries: [{key: x-api-key, kind: api_key, becomes: [user]}], on_invalid: refuse}
descriptors: [{key: user, limits_of: user}]
"""
CALLS_PER_S = (200, 60)
"""Calls per second to each service; every other one is denied. The first is measured; the second must not slow it."""

QUIET_S = 3.0
OUTAGE_S = 4.0
DEADLINE_S = 1.0
SMALL_BUFFER = 40
"""Buffer for recorded decisions: the denials of little more than a second."""

RECORDED = "rate_limit_audit_logs"
BY_THE_MINUTE = "rate_limit_metrics WHERE granularity = 'minute'"

SLOWER = 1.1
NOISE_S = 0.002
TRIES = 3


class Setup(NamedTuple):
    postgres: PostgresServer
    databases: Sequence[str]  # one for each service
    services: Sequence[ServiceWithDatabase]
    messages: Sequence[Sequence[bytes]]  # of a caller with a key that passes, and of one that does not


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    """Start a service that can buffer for long while the database is down, and one that can buffer little."""
    (tmp_path / "rules.yaml").write_text(RULES)
    variables = {
        "RLS_RULES": tmp_path / "rules.yaml",
        "RLS_AUDIT_SAMPLE": 0,
        "RLS_AUDIT_REFUSALS_PER_MINUTE": 0,  # every record is checked
    }
    with ExitStack() as stack:
        # Confirmed writes must survive the kill, or records could not be compared.
        postgres = stack.enter_context(PostgresServer(["-c", "synchronous_commit=on"]))
        databases = [postgres.new_database() for _ in range(2)]
        services = [
            ServiceWithDatabase(upgrade_schema(postgres.url(database)), {**variables, **more})
            for database, more in zip(databases, ({}, {"RLS_AUDIT_BUFFER": SMALL_BUFFER}), strict=True)
        ]
        for service in services:
            stack.callback(service.close)
        with ThreadPoolExecutor() as beside:
            list(beside.map(ServiceWithDatabase.start, services))
        yield Setup(postgres, databases, services, [new_callers(service) for service in services])


def new_callers(service: ServiceWithDatabase) -> list[bytes]:
    messages = []
    for user, limit in (("easy", 4_000_000_000), ("hard", 1)):
        service.admin.put_user(user, limits=[yearly_limit(limit)])
        key = service.admin.add_key(user)
        messages.append(bytes(rate_limit_request("load", {"x-api-key": key.text})))
    service.wait_for_source(lambda state: state["sequence"] == 4, "knows its callers")
    return messages


def crash(postgres: PostgresServer) -> None:
    """Kill all processes of the server at once."""
    for pid in cpu.family(postgres.pid):
        os.kill(pid, SIGKILL)
    postgres.kill()  # cleans up after the dead process


def p99_s(calls: list[CallRecord], starved: CpuStarvation) -> float:
    took_s = sorted(call.ended_s - call.begun_s - starved.between_s(call.begun_s, call.ended_s) for call in calls)
    return took_s[len(took_s) * 99 // 100]


def between(load: OpenLoopClients, since_s: float, until_s: float) -> list[CallRecord]:
    return [call for call in load.calls if since_s <= call.begun_s and call.ended_s < until_s]


def test_a_database_outage_slows_no_call_and_records_stay_exact(setup: Setup) -> None:
    postgres, databases, services, messages = setup
    with ExitStack() as stack:
        loads = [
            stack.enter_context(OpenLoopClients(service.grpc_address, own, per_second=rate, timeout_s=DEADLINE_S))
            for service, own, rate in zip(services, messages, CALLS_PER_S, strict=True)
        ]
        starved = stack.enter_context(CpuStarvation(os.getpid(), services[0].pid))
        time.sleep(1)  # one-time initialisation is done
        for _ in range(TRIES):
            before_s = time.monotonic()
            time.sleep(QUIET_S)
            crash(postgres)
            down_s = time.monotonic()
            time.sleep(OUTAGE_S)
            assert services[0].admin.send("PUT", "/users/other", {}).status == 503
            back_s = time.monotonic()
            postgres.start()
            for service in services:
                service.wait_for_source(lambda state: state["connected"], "follows the database again")
            again_s = time.monotonic()
            spans = (before_s, down_s), (down_s, back_s), (back_s, again_s + 1)
            time.sleep(1)
            quiet, outage, after = (p99_s(between(loads[0], *span), starved) for span in spans)
            print(
                f"p99 {quiet * 1000:.2f} ms before, {outage * 1000:.2f} ms without the database for "
                f"{back_s - down_s:.1f} s, {after * 1000:.2f} ms while it came back ({again_s - back_s:.1f} s)"
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
        denied = load.outcomes[Code.OVER_LIMIT]
        service.wait_until(lambda service=service: service.stat("ratelimit.audit.buffered") == 0, "has caught up")  # type: ignore[misc]
        dropped = service.stat("ratelimit.audit.dropped")
        assert service.stop() == 0  # the last records, and usage of the current minute, are written by then
        recorded = int(postgres.sql(f"SELECT count(*) FROM {RECORDED} WHERE decision = 'throttled'", database))
        usage = postgres.sql(f"SELECT sum(total_requests), sum(throttled_requests) FROM {BY_THE_MINUTE}", database)
        print(f"{denied} denied, {recorded} recorded, {dropped} dropped; usage {usage.strip()} of {len(load.calls)}")
        assert recorded == denied - dropped
        assert (dropped > 0) == is_small
        assert usage.strip() == f"{len(load.calls)}|{denied}"


FLOOD_S = 15.0
FLOODERS = 64


def test_administrators_can_make_changes_during_a_flood_of_denials(tmp_path: Path) -> None:
    """On SQLite, which has one writer: every change succeeds, and the file does not grow with the flood."""
    (tmp_path / "rules.yaml").write_text(RULES)
    path = tmp_path / "records.db"
    with (
        ServiceWithDatabase(f"sqlite:///{path}", {"RLS_RULES": tmp_path / "rules.yaml"}) as service,
        ExitStack() as stack,
    ):
        denied = new_callers(service)[1]
        service.admin.put_user("quiet", limits=[yearly_limit(1)])
        flood = stack.enter_context(Flood(service.grpc_address, denied, FLOODERS))
        took_s = []
        until_s = time.monotonic() + FLOOD_S
        while time.monotonic() < until_s:
            began_s = time.monotonic()
            service.admin.block("quiet")
            service.admin.unblock("quiet")
            took_s.append(time.monotonic() - began_s)
            assert service.admin.source()["writable"]
            time.sleep(0.5)  # administrators are rate limited, too
        outcomes = flood.stop()
        recorded = service.stat("ratelimit.audit.written") + service.stat("ratelimit.audit.buffered")
        left_out = service.stat("ratelimit.audit.sampled_out")
        print(
            f"{outcomes}; {recorded} recorded, {left_out} left out; {len(took_s)} changes, {max(took_s):.2f} s at most"
        )
        assert service.stat("ratelimit.audit.dropped") == 0
        assert recorded + left_out == pytest.approx(outcomes[Code.OVER_LIMIT], abs=FLOODERS + 1)
        assert recorded < 3000  # 1,000 at once, and 1,000 a minute
        assert "database_writes_failed" not in service.log()


class Flood:
    """Closed-loop clients in a thread of their own."""

    def __init__(self, address: str, message: bytes, clients: int) -> None:
        self._address, self._message, self._clients = address, message, clients
        self._beside = ThreadPoolExecutor(1)
        self._is_over = False

    def __enter__(self) -> Flood:
        self._result = self._beside.submit(asyncio.run, self._run())
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._beside.shutdown()

    def stop(self) -> Counter[Outcome]:
        self._is_over = True
        return self._result.result()

    async def _run(self) -> Counter[Outcome]:
        outcomes: Counter[Outcome] = Counter()
        while not self._is_over:
            outcomes += await run_load([self._address], self._message, clients=self._clients, calls=2000)
        return outcomes
