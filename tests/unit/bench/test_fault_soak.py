"""Verdict of the fault soak: it finds every violation in a record, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest

from bench.fault_soak import Record, Vitals, recoveries, violations
from bench.faults import Fault
from bench.mixed_load import KINDS, CallRecord, Outcome
from ratelimit_rls.core.model import Code

OK, OVER = Code.OK, Code.OVER_LIMIT
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
NOW_S = 1_786_000_000.0
MIB = 2**20

BY_NAME = {kind.name: kind for kind in KINDS}
WARM = Vitals(80 * MIB, 13, 34, 2)


def call(name: str, at_s: float, outcome: Outcome = OK, took_s: float = 0.001, **more: Any) -> CallRecord:
    return CallRecord(BY_NAME[name], 0, NOW_S + at_s, took_s, outcome)._replace(**more)


def record(
    calls: Sequence[CallRecord], *faults: Fault, begun: int | None = None, last: Vitals = WARM, lag_s: float = 0.001
) -> Record:
    orders = [call("order", 0.1 * number) for number in range(100)]  # present throughout a soak
    return Record(
        seed=1,
        begun=len(calls) + len(orders) if begun is None else begun,
        calls=[*orders, *calls],
        lags_s=[lag_s] * 100,
        faults=faults,
        vitals={"warm": WARM, "at last": last},
    )


def killed(at_s: float, until_s: float) -> Fault:
    return Fault("killed", NOW_S + at_s, NOW_S + until_s, (NOW_S + at_s, NOW_S + until_s), forgets=True)


def admitted(number: int, name: str = "share") -> list[CallRecord]:
    """Return calls in the window that begins now."""
    return [call(name, 0.01 * at) for at in range(number)]


LIMIT = BY_NAME["share"].limit

WELL = {
    "no calls": record([]),
    "as many as the limit": record(admitted(LIMIT)),
    "twice the limit after a reset of Redis": record(admitted(2 * LIMIT), Fault("reset", NOW_S, NOW_S + 1, None, True)),
    "twice the limit with a local share": replace(record(admitted(2 * LIMIT)), decided_here=[(NOW_S + 1, NOW_S + 1.2)]),
    "a retry that gets the same response": record(
        [call("order", 0, remaining=7, request_id="a"), call("order", 1, remaining=7, request_id="a")]
    ),
    "late within the lag of the machine": record([call("share", 0, grpc.StatusCode.DEADLINE_EXCEEDED, 0.2)], lag_s=0.2),
    "fewer resources than before": record([], last=Vitals(70 * MIB, 12, 33, 1)),
}

NOT_WELL = {
    "a lost call": (record([], begun=101), "lost"),
    "more than the limit": (record(admitted(LIMIT + 1)), "admitted"),
    "an error with policy allow": (record([call("page", 0, UNAVAILABLE, details="Redis is away")]), "`allow`"),
    "a decision that violates the policy": (record([call("login", 0.5, OK)], killed(0.1, 0.9)), "without Redis"),
    "a retry that was counted": (
        record([call("order", 0, remaining=7, request_id="a"), call("order", 1, remaining=6, request_id="a")]),
        "retry",
    ),
    "no response": (record([call("share", 0, grpc.StatusCode.DEADLINE_EXCEEDED, 0.1)]), "no answer"),
    "a response after the deadline": (record([call("share", 0, took_s=0.2)] * 2), "more than their deadlines"),
    "no recovery": (record([], Fault("cut", NOW_S + 20, NOW_S + 21)), "only inf"),
    "an additional connection": (record([], last=WARM._replace(connections=3)), "connections 2 → 3"),
    "an additional file": (record([], last=WARM._replace(files=35)), "files"),
    "additional threads": (record([], last=WARM._replace(threads=18)), "threads 13 → 18"),
    "memory growth": (record([], last=WARM._replace(resident_bytes=90 * MIB)), "memory by 10.0 MiB"),
    "a call that waits forever": (replace(record([]), left_over={"held": 1}), "held is 1"),
}


@pytest.mark.parametrize("name", WELL)
def test_correct_records_have_no_violations(name: str) -> None:
    assert list(violations(WELL[name])) == []


@pytest.mark.parametrize("name", NOT_WELL)
def test_violations_are_found(name: str) -> None:
    not_well, words = NOT_WELL[name]
    assert any(words in trouble for trouble in violations(not_well)), list(violations(not_well))


def test_recovery_ends_when_redis_decides_several_calls_in_a_row() -> None:
    faults = (
        Fault("cut", NOW_S, NOW_S + 1.05),
        Fault("paused", NOW_S + 3, NOW_S + 3.05),
        Fault("cut", NOW_S + 8, NOW_S + 8),
    )
    failing = [call("order", at_s, UNAVAILABLE, details="no connection to Redis") for at_s in (0.5, 1.25, 2.5, 3.01)]
    back_s = [seconds for _, seconds in recoveries(record(failing, *faults))]

    assert back_s == pytest.approx([1.301 - 1.05, 3.101 - 3.05, 0.001], abs=1e-5)


def test_recovery_interrupted_by_next_fault_lasts_until_it() -> None:
    faults = Fault("cut", NOW_S, NOW_S), Fault("cut", NOW_S + 0.02, NOW_S + 0.02)
    failing = [call("order", 0.01, UNAVAILABLE, details="no connection to Redis")]
    (_, first_s), _ = recoveries(record(failing, *faults))

    assert first_s == pytest.approx(0.02, abs=1e-5)
