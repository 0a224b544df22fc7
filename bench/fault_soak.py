"""`python -m bench.fault_soak`: constant load of all kinds of calls during random Redis faults, for ten minutes.

Requirements, checked at the end: every call has a response or a status, which matches `on_store_failure` of its rule;
no call exceeds its deadline; no limit admits more than Redis and the local shares explain; Redis decides again soon
after its recovery; and at the end the process has no more memory, threads, files and connections than after each fault
occurred once. The seed is printed; the same seed repeats the same faults.

An overloaded machine delays everything. The lag of the load itself is measured continuously and tolerated.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import NamedTuple, Self

import grpc

from bench import mixed_load
from bench.cpu import resident_bytes
from bench.faults import Fault, Faults
from bench.mixed_load import KINDS, WINDOW_S, CallRecord, LoadKind, MixedLoad, Outcome
from ratelimit_rls.core.model import Code, OnStoreFailure
from tests.support.redis_servers import RedisCluster
from tests.support.servers import RedisServer
from tests.support.service_process import ServiceProcess
from tests.support.tcp_proxy import SlowProxy

SECONDS = 600.0
WARM_S = 3.0
CALM_S = (0.5, 2.0)
"""Pause between two faults; the next one sometimes overlaps with the recovery of the last."""

SETTLE_S = 6.0
STORE_TIMEOUT_S = 0.3
LOOK_EVERY_S = 0.2
NODE_TIMEOUT_S = 1.0
"""Node timeout of a cluster (tests/support/redis_servers.py)."""

BACK_WITHIN_S = 1.0
IN_A_ROW = 3
MAX_OVER_S = 0.005
MAX_UNANSWERED = 0.002
"""Maximum share of calls without a response within their deadline, on an idle machine."""

LAGGING_S = 0.01
MAX_GROWTH_BYTES = 8 * 2**20
POOL_THREADS = 4
"""Threads that asyncio may add to its pool at any time when reading files, if all others are busy."""

AWAY_MARGIN_S = 0.1
"""Margin after a server is gone, in which calls are still decided by earlier state."""

OUTCOME_LABELS: dict[Outcome, str] = {Code.OK: "passed", Code.OVER_LIMIT: "denied"}
TIMED_OUT = grpc.StatusCode.DEADLINE_EXCEEDED


class Vitals(NamedTuple):
    """Resources of a process."""

    resident_bytes: int
    threads: int
    files: int
    connections: int  # to Redis, as counted by its servers

    def __str__(self) -> str:
        memory = self.resident_bytes / 2**20
        return f"{memory:.1f} MiB, {self.threads} threads, {self.files} files, {self.connections} connections to Redis"


@dataclass(slots=True)
class Record:
    """Record of a whole soak."""

    seed: int
    begun: int = 0
    calls: Sequence[CallRecord] = ()
    lags_s: Sequence[float] = ()
    faults: Sequence[Fault] = ()
    decided_here: Sequence[tuple[float, float]] = ()  # periods in which local shares decided
    vitals: dict[str, Vitals] = field(default_factory=dict)
    left_over: dict[str, int] = field(default_factory=dict)  # by gauge, after the last call


class Stats:
    """Polls the counters of the service, in a thread."""

    def __init__(self, service: ServiceProcess) -> None:
        self.decided_here: list[tuple[float, float]] = []
        self._service = service
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        before, before_s = 0, time.time()
        while not self._over.wait(LOOK_EVERY_S):
            looking_s = time.time()
            now = self._service.stat("ratelimit.fallback.decisions.local")
            if now > before:
                self.decided_here.append((before_s, time.time()))
            before, before_s = now, looking_s


def soak(seconds: float, seed: int, *, cluster: bool = False) -> Record:
    """Run the soak. Raises if the service dies."""
    record = Record(seed)
    with ExitStack() as stack:
        rules = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-"))) / "soak.yaml"
        rules.write_text(mixed_load.rules())
        variables: dict[str, object] = {
            "RLS_RULES": rules,
            "RLS_STORE_TIMEOUT": f"{STORE_TIMEOUT_S:g}s",
            "RLS_REQUEST_ID_METADATA": mixed_load.REQUEST_ID,
        }
        new_faults: Callable[..., Faults]
        if cluster:
            nodes = stack.enter_context(RedisCluster(masters=3))
            servers, new_faults = nodes.nodes, partial(Faults, settle=partial(_wait_for_agreement, nodes))
            variables |= {"REDIS_TYPE": "CLUSTER", "REDIS_URL": nodes.url}
        else:
            servers = [stack.enter_context(RedisServer())]
            relay = stack.enter_context(SlowProxy(servers[0]))
            new_faults = partial(Faults, relay=relay)
            variables["REDIS_URL"] = relay.address
        service = stack.enter_context(ServiceProcess(variables))
        faults = new_faults(servers, service, rules, seed)
        record.vitals["at first"] = vitals(service, servers)
        with Stats(service) as stats, MixedLoad(service.grpc_address, seed) as load:
            _inject_faults(record, faults, load, service, servers, seconds)
        record.begun, record.calls, record.lags_s = load.begun, load.calls, load.lags_s
        record.faults, record.decided_here = faults.done, stats.decided_here
        for gauge in ("ratelimit.store.calls_in_flight", "ratelimit.throttle.queue_length"):
            record.left_over[gauge] = service.stat(gauge)
    return record


def _wait_for_agreement(nodes: RedisCluster) -> None:
    """Wait until all nodes agree.

    A node that was away for nearly the node timeout may still be failed and recovered afterwards.
    """
    time.sleep(NODE_TIMEOUT_S)
    nodes.wait_until_ok()


def _inject_faults(
    record: Record,
    faults: Faults,
    load: MixedLoad,
    service: ServiceProcess,
    servers: Sequence[RedisServer],
    seconds: float,
) -> None:
    """Inject each fault once as a warm-up, then random faults until the time is up, then none."""
    drawn = random.Random(record.seed)
    ends_s = time.monotonic() + seconds - SETTLE_S
    time.sleep(WARM_S)
    for inject in faults.kinds():
        inject()
        time.sleep(drawn.uniform(*CALM_S))
    time.sleep(CALM_S[1])
    baseline = record.vitals["warm"] = vitals(service, servers)
    reported_s = time.monotonic()
    while (now_s := time.monotonic()) < ends_s:
        faults.any()
        time.sleep(drawn.uniform(*CALM_S))
        if now_s - reported_s >= 60.0:
            reported_s = now_s
            print(f"{len(faults.done):4} faults{len(load.calls):9,} calls   {vitals(service, servers)}", flush=True)
    settled_s = time.monotonic() + SETTLE_S
    time.sleep(SETTLE_S / 2)
    record.vitals["at last"] = vitals(service, servers)
    while time.monotonic() < settled_s and _growth_violations(baseline, record.vitals["at last"]):
        time.sleep(LOOK_EVERY_S)
        record.vitals["at last"] = vitals(service, servers)


def vitals(service: ServiceProcess, servers: Sequence[RedisServer]) -> Vitals:
    connections = 0
    for server in servers:
        listed = server.cli("CLIENT", "LIST")
        # Without this connection and those between cluster nodes.
        connections += sum(client["cmd"] != "client" and client["flags"] != "M" for client in _clients(listed))
    of_process = Path(f"/proc/{service.pid}")
    threads, files = len(os.listdir(of_process / "task")), len(os.listdir(of_process / "fd"))
    return Vitals(resident_bytes(service.pid), threads, files, connections)


def _clients(listed: object) -> Iterator[dict[str, str]]:
    """Yield clients from CLIENT LIST, parsed by redis-py or as text."""
    if isinstance(listed, list):
        yield from listed
        return
    text = listed.decode() if isinstance(listed, bytes) else str(listed)
    for line in text.splitlines():
        yield dict(word.partition("=")[::2] for word in line.split())


def _growth_violations(before: Vitals, after: Vitals) -> list[str]:
    """Return violations for resources that have grown."""
    counts = [
        ("threads", before.threads, after.threads - POOL_THREADS),
        ("files", before.files, after.files),
        ("connections", before.connections, after.connections),
    ]
    more = [f"{name} {getattr(before, name)} → {getattr(after, name)}" for name, had, has in counts if has > had]
    grown_bytes = after.resident_bytes - before.resident_bytes
    return more + ([f"memory by {grown_bytes / 2**20:.1f} MiB"] if grown_bytes > MAX_GROWTH_BYTES else [])


def recoveries(record: Record) -> list[tuple[Fault, float]]:
    """Return the time from each fault until Redis decides several calls in a row: the end of the first of them.

    If another fault came first, it took at least until then.
    """
    decisive_calls = [
        call for call in record.calls if call.kind.policy is OnStoreFailure.ERROR and not unanswered(call)
    ]
    decisive_calls.sort(key=lambda call: call.begun_s)
    begun_s = [call.begun_s for call in decisive_calls]
    decided = [isinstance(call.outcome, int) for call in decisive_calls]
    found = []
    for fault, following in pairwise([*record.faults, None]):
        assert fault is not None
        after = range(bisect_left(begun_s, fault.ended_s), len(decisive_calls))
        first_s = next((decisive_calls[at].ended_s for at in after if all(decided[at : at + IN_A_ROW])), inf)
        next_s = following.begun_s if following is not None else inf
        found.append((fault, min(first_s, next_s) - fault.ended_s))
    return found


class Window(NamedTuple):
    """Admissions of one limit in one window, and the maximum."""

    kind: LoadKind
    admitted: int
    limits: int  # multiples of the limit: one for Redis, and one for each reset or local period


def windows(record: Record) -> list[Window]:
    """Return the windows of audited limits. Calls at a window boundary, which may belong to either, are left out."""
    admitted: Counter[tuple[LoadKind, int, int]] = Counter()
    for call in record.calls:
        number = int(call.begun_s // WINDOW_S)
        if call.kind.audited and call.outcome == Code.OK and int(call.ended_s // WINDOW_S) == number:
            admitted[call.kind, call.value, number] += 1
    return [Window(kind, count, _limits(record, number)) for (kind, _, number), count in admitted.items()]


def _limits(record: Record, number: int) -> int:
    begun_s, ended_s = number * WINDOW_S, (number + 1) * WINDOW_S
    forgotten = sum(fault.forgets and fault.begun_s < ended_s and begun_s < fault.ended_s for fault in record.faults)
    here = any(first_s < ended_s and begun_s < last_s for first_s, last_s in record.decided_here)
    return 1 + forgotten + here


def violations(record: Record) -> Iterator[str]:
    """Yield all violations; none if the soak passed."""
    calls = record.calls
    if len(calls) != record.begun:
        yield f"{record.begun - len(calls)} calls were lost"
    yield from _unexpected_outcomes(calls)
    for fault in record.faults:
        yield from _unexpected_outcomes_without_redis(calls, fault)
    forgiven_s = 2 * max(record.lags_s)  # for the request and for the response
    forgiven = 3 * sum(lag_s > LAGGING_S for lag_s in record.lags_s) / len(record.lags_s)
    late = sum(unanswered(call) for call in calls)
    if late > (MAX_UNANSWERED + forgiven) * len(calls):
        yield f"{late} of {len(calls)} calls had no answer within their deadline"
    over_s = quantile([call.over_deadline_s for call in calls], 0.999)
    if over_s > MAX_OVER_S + forgiven_s:
        yield f"calls took up to {over_s * 1000:.1f} ms more than their deadlines (99.9 %)"
    for fault, back_s in recoveries(record):
        if back_s > BACK_WITHIN_S + forgiven_s:
            yield f"{fault.name}: Redis decided again only {back_s:.2f} s after it was back"
    for kind, admitted, limits in windows(record):
        if admitted > limits * kind.limit:
            yield f"{kind.name}: {admitted} admitted in a window, and {limits} times the limit is {limits * kind.limit}"
    yield from _different_answers(record)
    yield from (f"{name} is {number} without calls" for name, number in record.left_over.items() if number)
    yield from (f"it has grown: {what}" for what in _growth_violations(record.vitals["warm"], record.vitals["at last"]))


def unanswered(call: CallRecord) -> bool:
    return call.outcome is TIMED_OUT


def _unexpected_outcomes(calls: Sequence[CallRecord]) -> Iterator[str]:
    for policy in OnStoreFailure:
        fine = {*OUTCOME_LABELS}
        if policy is OnStoreFailure.ERROR:
            fine.add(grpc.StatusCode.UNAVAILABLE)
        wrong = Counter(
            (call.kind.name, str(call.outcome), call.details)
            for call in calls
            if call.kind.policy is policy and call.outcome not in fine and not unanswered(call)
        )
        yield from (f"{number} times, where the rules say `{policy.value}`: {what}" for what, number in wrong.items())


def _unexpected_outcomes_without_redis(calls: Sequence[CallRecord], fault: Fault) -> Iterator[str]:
    if fault.away is None:
        return
    down_s, back_s = fault.away
    words: dict[OnStoreFailure, set[Outcome]] = {
        OnStoreFailure.ALLOW: {Code.OK},
        OnStoreFailure.DENY: {Code.OVER_LIMIT},
        OnStoreFailure.LOCAL: {Code.OK, Code.OVER_LIMIT},
        OnStoreFailure.ERROR: {grpc.StatusCode.UNAVAILABLE},
    }
    for call in calls:
        meanwhile = call.begun_s > down_s + AWAY_MARGIN_S and call.ended_s < back_s
        if meanwhile and call.outcome not in words[call.kind.policy] and not unanswered(call):
            yield f"without Redis, {call.kind.name} (`{call.kind.policy.value}`) got {call.outcome}"


def _different_answers(record: Record) -> Iterator[str]:
    """Yield calls whose retry got another response, unless Redis lost its data in between."""
    by_id: dict[str, list[CallRecord]] = {}
    for call in record.calls:
        if call.request_id and isinstance(call.outcome, int):
            by_id.setdefault(call.request_id, []).append(call)
    for attempts in by_id.values():
        begun_s, ended_s = min(call.begun_s for call in attempts), max(call.ended_s for call in attempts)
        forgotten = any(
            fault.forgets and fault.begun_s < ended_s and begun_s < fault.ended_s for fault in record.faults
        )
        if not forgotten and len({(call.outcome, call.remaining) for call in attempts}) > 1:
            yield f"a retry got another response: {[(call.outcome, call.remaining) for call in attempts]}"


def quantile(numbers: Sequence[float], part: float) -> float:
    ordered = sorted(numbers)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


def report(record: Record) -> Iterator[str]:
    calls = record.calls
    yield f"seed {record.seed}: {len(calls):,} calls, {len(record.faults)} faults"
    for policy in OnStoreFailure:
        labels = Counter(_outcome_label(call) for call in calls if call.kind.policy is policy)
        yield f"  {policy.value:6}" + ", ".join(f"{number:,} {what}" for what, number in labels.most_common())
    over_s = [call.over_deadline_s for call in calls]
    waits = [f"{quantile(over_s, part) * 1000:.1f}" for part in (0.5, 0.95, 0.99, 0.999, 1.0)]
    lags = [f"{quantile(record.lags_s, part) * 1000:.1f}" for part in (0.95, 0.99, 0.999, 1.0)]
    yield (
        f"  over their deadlines, in ms: p50 {waits[0]}, p95 {waits[1]}, p99 {waits[2]}, p99.9 {waits[3]}, "
        f"most {waits[4]}"
    )
    yield f"  how late the load itself was: p95 {lags[0]}, p99 {lags[1]}, p99.9 {lags[2]}, most {lags[3]}"
    by_name: dict[str, list[float]] = {}
    for fault, back_s in recoveries(record):
        by_name.setdefault(fault.name, []).append(back_s)
    for name, times_s in by_name.items():
        back = f"Redis decides again after {quantile(times_s, 0.5):.2f} s, at most {max(times_s):.2f} s"
        yield f"  {name:22}{len(times_s):4} times, {back}"
    for kind in KINDS:
        if kind.audited:
            own = [window for window in windows(record) if window.kind is kind]
            plain = [window.admitted for window in own if window.limits == 1]
            without = f"at most {max(plain, default=0)} in {len(plain)} windows without faults"
            most = max(window.admitted for window in own)
            yield f"  {kind.name}: a limit of {kind.limit}, admitted {without}, {most} in any of {len(own)}"
    for when, figures_of_process in record.vitals.items():
        yield f"  {when:9}{figures_of_process}"


def _outcome_label(call: CallRecord) -> str:
    if isinstance(call.outcome, int):
        return OUTCOME_LABELS[call.outcome]
    return call.outcome.name


def print_report(record: Record) -> list[str]:
    """Print the report; return the violations."""
    found = list(violations(record))
    print(*report(record), sep="\n")
    print(*(f"  NOT OK: {trouble}" for trouble in found[:20]), sep="\n", end="\n" if found else "")
    print(f"faults: {f'{len(found)} violations: NOT OK' if found else 'ok'}", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fault_soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="total duration (default: ten minutes)")
    parser.add_argument("--seed", type=int, default=None, help="random seed (default: a new one)")
    parser.add_argument("--cluster", action="store_true", help="use a cluster of three masters")
    chosen = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(2**32) if chosen.seed is None else chosen.seed
    print(f"seed {seed}", flush=True)
    return 1 if print_report(soak(chosen.seconds, seed, cluster=chosen.cluster)) else 0


if __name__ == "__main__":
    sys.exit(main())
