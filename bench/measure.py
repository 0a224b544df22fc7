"""Measurement in rounds over all scenarios, so that other load on the machine affects all of them equally."""

from __future__ import annotations

import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from statistics import median
from typing import Any, Self

from redis import Redis

from bench import answers, callers, cpu, edge, envoy, logs, workload
from bench.capacity import CapacityCase, MemoryCase
from bench.connection import LoadError
from bench.fleet import LOAD_CORE, SERVICE_CORE, Fleet, Running, Start
from bench.latency import Latencies
from bench.load import Load, Tally
from bench.pace import PacedLoad
from bench.redis_instructions import SCRIPT_RUNS, InstructionCase
from bench.scenarios import (
    ENVOY_ALONE,
    FLEET,
    REDIS_2,
    THROUGH_ENVOY,
    ClientRoute,
    RequestKind,
    Scenario,
    of_peer,
)
from bench.servers import StartedRedis

SETTLE_S = 0.3
FIRST_COLD = 10**9  # above every number of repeated requests
EDGE_SEED, MIXED_SEED = 1, 2
BUILT_PER_S, BUILT_RESERVE = 20_000, 1.5
"""Calls that are built before the first measurement of a scenario, per second, and for each call of its last one."""

DENIED_SHARE_TOLERANCE = 0.01
"""Maximum deviation of the share of denied calls from the expected one."""

WARM_UP_IN_FLIGHT = 64
PACES = {
    (REDIS_2, of_peer(REDIS_2)): 0.5,
    (ENVOY_ALONE, THROUGH_ENVOY): 0.1,
    **{(one, of_peer(one)): 0.5 for one in FLEET if one.in_flight == 1},
}
"""Share of the maximum throughput at which latencies are measured. A single call costs several times one in a batch.
Envoy shares its core with Redis and the load: at a quarter of its throughput that core is nearly saturated. For a fleet
it is half of the throughput of lone calls."""


IN_FLIGHT = 256
"""With 128 calls in flight, a service that works in batches is idle a fifth of the time, and its throughput is not
reached; envoyproxy/ratelimit saturates its core with either."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Scenarios and other cases, and number and duration of the measurements."""

    scenarios: Sequence[Scenario]
    seconds: float
    repeats: int
    max_keys: int = workload.MANY_KEYS
    in_flight: int = IN_FLIGHT
    peer: Path | None = None
    limitador: Path | None = None
    counted: Sequence[InstructionCase] = ()
    capacity: Sequence[CapacityCase | MemoryCase] = ()
    callers_s: float = 0.0  # time for a million distinct callers; 0: they are not measured
    readme: bool = False  # the table of README.md is printed


@dataclass(frozen=True, slots=True)
class Measurement:
    """Result of one scenario in one round; shares are fractions of a core."""

    calls_per_s: float
    service_us: float
    redis_us: float
    load_us: float
    answers_per_read: float
    service_share: float
    load_share: float  # including Redis and Envoy, which are on the same core
    others_on_service_core: float
    others_on_load_core: float
    redis_commands: Mapping[str, float] = field(default_factory=dict)  # per call, including those within scripts
    envoy_us: float = 0.0
    log_bytes: int = 0  # size of each prefilled sliding log in Redis
    least_worker: float = 1.0  # smallest share of a worker in the CPU of all workers
    busiest_redis_us: float = 0.0  # part of redis_us in the busiest master of a cluster
    redis_reads: float = 0.0  # per call: how often Redis read from a connection
    latencies: Latencies | None = None  # of a closed loop

    @property
    def calls_per_command(self) -> float:
        """Return the calls that share a command: the mean batch size. Commands within scripts are not counted."""
        runs = sum(self.redis_commands.get(name, 0.0) for name in SCRIPT_RUNS)
        commands = runs or sum(self.redis_commands.values())
        return 1 / commands if commands else 0.0


class PrebuiltCalls(Iterator[bytes]):
    """Calls of which some are built before a measurement, so that the load only copies them."""

    def __init__(self, calls: Iterator[bytes]) -> None:
        self._calls = calls
        self._built: deque[bytes] = deque()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        return self._built.popleft() if self._built else next(self._calls)

    def build(self, number: int) -> None:
        """Have at least this number of calls ready."""
        self._built.extend(islice(self._calls, max(0, number - len(self._built))))


class Bench:
    def __init__(self, plan: Plan, directory: Path, progress: Callable[[str], None]) -> None:
        self._plan = plan
        self._progress = progress
        self._fleet = Fleet(directory, plan.max_keys, plan.peer, plan.limitador)
        self._calls: dict[tuple[bool, RequestKind, int, int, int], list[bytes]] = {}
        self._call_counts: Counter[Scenario] = Counter()  # calls so far
        self._streams: dict[Scenario, PrebuiltCalls] = {}  # requests that are not repeated, by deployment
        self._rates: dict[Scenario, float] = {}  # calls per second of the last measurement
        self._cold = count(FIRST_COLD)  # numbers of requests that were never seen before
        self.latencies: dict[Scenario, Latencies] = {}  # measured at the end

    @property
    def starts(self) -> dict[Scenario, Start]:
        return self._fleet.starts

    def run(self) -> dict[Scenario, list[Measurement]]:
        """Return all measurements of all scenarios, in the order of the rounds."""
        os.sched_setaffinity(0, {LOAD_CORE})
        results: dict[Scenario, list[Measurement]] = {scenario: [] for scenario in self._plan.scenarios}
        try:
            for round_number in range(1, self._plan.repeats + 1):
                for scenario in self._plan.scenarios:
                    self._progress(f"round {round_number} of {self._plan.repeats}: {scenario.name}")
                    results[scenario].append(self._measure_or_say_why(scenario))
            self._measure_latencies(results)
        finally:
            self._fleet.close()
        return results

    def _measure_latencies(self, results: Mapping[Scenario, Sequence[Measurement]]) -> None:
        """Measure latencies of compared scenarios at the same rate: a share of the slower one's throughput."""
        for compared, part in PACES.items():
            measured = [scenario for scenario in compared if scenario in results]
            paces = [median(one.calls_per_s for one in results[scenario]) * part for scenario in measured]
            for scenario in measured:
                self._measure_latency(scenario, min(paces))

    def _measure_latency(self, scenario: Scenario, per_s: float) -> None:
        self._progress(f"latencies at {per_s:,.0f} calls a second: {scenario.name}")
        calls = self._requests(scenario)
        assert isinstance(calls, Sequence)
        running = self._fleet.running(scenario)
        connections = scenario.connections * scenario.replicas
        with _only_running(running), PacedLoad(running.targets, calls, connections) as load:
            load.run(per_s, SETTLE_S)
            self.latencies[scenario.deployment] = load.run(per_s, self._plan.seconds * self._plan.repeats)

    def _measure_or_say_why(self, scenario: Scenario) -> Measurement:
        try:
            return self._measure(scenario)
        except (LoadError, OSError) as error:
            raise LoadError(f"{scenario.name}: {error}\n{self._fleet.log(scenario)}") from error

    def _measure(self, scenario: Scenario) -> Measurement:
        is_new = scenario not in self._fleet
        running = self._fleet.running(scenario)
        calls = self._requests(scenario)
        redis = self._fleet.redis(scenario)
        redis_pids, envoy_pid = redis.pids if redis else (), running.envoy.pid if running.envoy else None
        log_bytes = self._fill_logs(scenario)
        with _only_running(running) as family:
            warm_up_calls = self._warm_up_calls(scenario, calls) if is_new else 0
            if warm_up_calls and (scenario.is_timed or not scenario.repeats_requests):
                self._call_counts[scenario] += _warm_up(running, calls, warm_up_calls)
                warm_up_calls = 0
            self._build(scenario, calls)
            with self._load(scenario, running, calls) as load:
                _run(load, scenario, SETTLE_S, warm_up_calls)
                commands_before, reads_before = _commands_of(redis), _reads_of(redis)
                before = cpu.read(family, redis_pids, envoy_pid, SERVICE_CORE, LOAD_CORE)
                tally = _run(load, scenario, self._plan.seconds)
                spent = cpu.read(family, redis_pids, envoy_pid, SERVICE_CORE, LOAD_CORE) - before
                reads, commands = _reads_of(redis) - reads_before, _commands_of(redis) - commands_before
                self._call_counts[scenario] += load.drain() if isinstance(load, Load) else load.answered
                self._check(scenario, running, load.samples)
        share = 1 if scenario.all_are_denied else callers.DENIED_SHARE if scenario.some_are_denied else 0
        if abs(tally.denied / tally.calls - share) > DENIED_SHARE_TOLERANCE:
            raise LoadError(f"{tally.denied} of {tally.calls} calls were denied; about {share:.0%} were to be")
        self._rates[scenario] = tally.calls / tally.seconds
        measured = _measurement(tally, spent, commands, scenario.workers)
        return replace(measured, log_bytes=log_bytes, redis_reads=reads / tally.calls)

    def _load(self, scenario: Scenario, running: Running, calls: Sequence[bytes] | Iterator[bytes]) -> Load | PacedLoad:
        """Connect the load of a scenario."""
        denied, connections = scenario.some_are_denied, scenario.connections * scenario.replicas
        if scenario.per_s:
            return PacedLoad(running.targets, calls, connections, some_are_denied=denied)
        in_flight = (scenario.in_flight or self._plan.in_flight) * scenario.workers * scenario.replicas
        timed = scenario.is_timed
        return Load(running.targets, calls, in_flight, connections, some_are_denied=denied, timed=timed)

    def _warm_up_calls(self, scenario: Scenario, calls: Sequence[bytes] | Iterator[bytes]) -> int:
        """Return the number of calls before a new server is measured.

        It gets every request once, so that every counter exists and the request cache is filled; of requests that are
        not repeated, as many. With several workers a request reaches a random one, so it is repeated until hardly any
        is new to a worker. A denial is cached after two requests.
        """
        if not scenario.decides:
            return 0
        rounds = 2 if scenario.all_are_denied else 1 if scenario.workers == 1 else 4 * scenario.workers
        return rounds * (len(calls) if isinstance(calls, Sequence) else self._plan.max_keys)

    def _build(self, scenario: Scenario, calls: Sequence[bytes] | Iterator[bytes]) -> None:
        """Build calls that are not repeated before a measurement, as many as it is expected to make."""
        if isinstance(calls, PrebuiltCalls):
            per_s = self._rates.get(scenario, BUILT_PER_S) * BUILT_RESERVE
            calls.build(round(per_s * (SETTLE_S + self._plan.seconds)))

    def _fill_logs(self, scenario: Scenario) -> int:
        redis, hits = self._fleet.redis(scenario), scenario.rules.hits_before
        return logs.fill(redis.url, self._log_keys(scenario), hits) if redis and hits else 0

    def _log_keys(self, scenario: Scenario) -> list[bytes]:
        first = scenario.first_caller
        return [logs.key(number) for number in range(first, first + self._fleet.keys(scenario))]

    def _check(self, scenario: Scenario, running: Running, samples: list[bytes]) -> None:
        if not scenario.has_envoy:
            answers.check_samples(scenario, samples)
        if scenario.route is ClientRoute.ENVOY:
            assert running.envoy is not None
            answers.check_allowed(running.envoy.admin_port, self._call_counts[scenario])
        redis, hits = self._fleet.redis(scenario), scenario.rules.hits_before
        if redis and hits:
            logs.check(redis.url, self._log_keys(scenario), hits)
        if running.collector is not None:
            answers.check_exported(running.collector, self._call_counts[scenario])

    def _requests(self, scenario: Scenario) -> Sequence[bytes] | Iterator[bytes]:
        if not scenario.repeats_requests:
            deployment = scenario.deployment
            if deployment not in self._streams:
                self._streams[deployment] = PrebuiltCalls(self._stream(scenario))
            return self._streams[deployment]
        keys = self._fleet.keys(scenario)
        shape = (scenario.has_envoy, scenario.request_kind, scenario.descriptors, scenario.first_caller, keys)
        if shape not in self._calls:
            if scenario.has_envoy:
                self._calls[shape] = envoy.requests(keys)
            elif scenario.request_kind is RequestKind.CALLERS:
                self._calls[shape] = callers.requests(keys)
            elif scenario.request_kind is RequestKind.CHECKS:
                self._calls[shape] = callers.checks(keys)
            else:
                self._calls[shape] = workload.requests(scenario.descriptors, keys, scenario.first_caller)
        return self._calls[shape]

    def _stream(self, scenario: Scenario) -> Iterator[bytes]:
        """Return requests that are not repeated. Edge and mixed ones are the same for every server."""
        if scenario.request_kind is RequestKind.EDGE:
            return edge.calls(EDGE_SEED)
        if scenario.request_kind is RequestKind.MIXED:
            return workload.mixed(MIXED_SEED, scenario.descriptors)
        return workload.cold(self._cold, scenario.descriptors)


OUR_COMMANDS = ("info", "hello", "client|setinfo")
"""Commands of the benchmark itself, not of the service."""


def _commands_of(redis: StartedRedis | None) -> Counter[str]:
    """Return how often Redis, or all masters of a cluster, have run each command."""
    ran: Counter[str] = Counter()
    for result in _info(redis, "commandstats"):
        ran.update({name.removeprefix("cmdstat_"): of_it["calls"] for name, of_it in result.items()})
    return Counter({name: calls for name, calls in ran.items() if name not in OUR_COMMANDS})


def _reads_of(redis: StartedRedis | None) -> int:
    """Return how often Redis, or all masters of a cluster, have read from a connection."""
    return sum(result["total_reads_processed"] for result in _info(redis, "stats"))


def _info(redis: StartedRedis | None, section: str) -> Iterator[dict[str, Any]]:
    for address in redis.addresses if redis else ():
        with Redis.from_url(f"redis://{address}") as client:
            yield client.info(section)


def _run(load: Load | PacedLoad, scenario: Scenario, seconds: float, at_least_calls: int = 0) -> Tally:
    """Run the load of a scenario: as fast as the server responds, or at its rate."""
    if isinstance(load, Load):
        return load.run(seconds, at_least_calls)
    return load.tally(scenario.per_s, seconds)


def _warm_up(running: Running, calls: Sequence[bytes] | Iterator[bytes], number: int) -> int:
    """Send at least this number of calls to each replica, with many in flight; return how many were sent."""
    sent = 0
    for target in running.targets:
        with Load(target, calls, WARM_UP_IN_FLIGHT, 1) as load:
            load.run(0, at_least_calls=number)
            sent += load.drain()
    return sent


@contextmanager
def _only_running(running: Running) -> Iterator[list[int]]:
    """Resume the server and its Envoy with all their processes, and stop them afterwards.

    Forty idle servers use a tenth of their core, and one that records decisions writes while others are measured.
    """
    # Now: workers may have been started since it listens.
    family = [member for pid in running.pids for member in cpu.family(pid)]
    processes = [*family, running.envoy.pid] if running.envoy is not None else family
    _signal(processes, signal.SIGCONT)
    try:
        yield family
    finally:
        _signal(processes, signal.SIGSTOP)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _measurement(tally: Tally, spent: cpu.CpuSample, commands: Counter[str], workers: int) -> Measurement:
    calls, seconds = tally.calls, tally.seconds
    beside_load_s = spent.redis_s + spent.envoy_s

    def us_per_call(cpu_s: float) -> float:
        return cpu_s / calls * 1e6

    return Measurement(
        calls_per_s=calls / seconds,
        service_us=us_per_call(spent.service_s),
        redis_us=us_per_call(spent.redis_s),
        load_us=us_per_call(spent.load_s),
        answers_per_read=calls / tally.reads,
        service_share=spent.service_s / seconds,
        load_share=(spent.load_s + beside_load_s) / seconds,
        others_on_service_core=max(0.0, spent.service_core_s - spent.service_s) / seconds,
        others_on_load_core=max(0.0, spent.load_core_s - spent.load_s - beside_load_s) / seconds,
        redis_commands={name: number / calls for name, number in sorted(commands.items()) if number},
        envoy_us=us_per_call(spent.envoy_s),
        busiest_redis_us=us_per_call(max(spent.redis_each_s, default=0.0)),
        latencies=tally.latencies,
        least_worker=sorted(spent.each_s)[-workers] / spent.service_s if spent.each_s else 1.0,
    )
