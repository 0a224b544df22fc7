"""Measuring: round after round over all scenarios, so that whatever else the machine does meets all of them alike."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from redis import Redis

from bench import callers, certificate, cpu, wire, workload
from bench.connection import LoadError, Target
from bench.load import Load, Tally
from bench.pace import Latencies, Paced
from bench.scenarios import REDIS_2, Asked, Scenario, Server, Way
from bench.servers import Servers, free_port
from ratelimit_rls.transport.grpc.messages import CheckResponse, RateLimitResponse

SERVICE_CORE, LOAD_CORE = 0, 1
SETTLE_S = 0.3
TOO_MANY_REQUESTS = 429
FIRST_NEW = 10**9  # beyond every number that is sent again and again
REFUSED_WITHIN = 0.01
"""Of all calls: how far the refused ones may be from the share that the rules mean."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how often to measure what."""

    scenarios: Sequence[Scenario]
    seconds: float
    repeats: int
    most_keys: int = workload.MANY_KEYS
    in_flight: int = 128
    peer: Path | None = None


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one scenario did in one round; a share is a part of one core."""

    calls_per_s: float
    service_us: float
    redis_us: float
    load_us: float
    answers_per_read: float
    service_share: float
    load_share: float  # with Redis, which is on the same core
    others_on_service_core: float
    others_on_load_core: float
    redis_commands: Mapping[str, float] = field(default_factory=dict)  # by name, per call; those within scripts, too
    least_worker: float = 1.0  # of what all workers used, the part of the one that used least


@dataclass(frozen=True, slots=True)
class Start:
    """Of a server: how long from exec until it took a connection, and what it holds before the first call."""

    took_s: float
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers."""

    pid: int
    target: Target
    start: Start


class Bench:
    def __init__(self, plan: Plan, directory: Path, progress: Callable[[str], None]) -> None:
        self._plan = plan
        self._progress = progress
        self._certificate = certificate.make(directory)
        self._directory = directory
        self._servers = Servers(directory, SERVICE_CORE, LOAD_CORE)
        self._redis: tuple[int, str] | None = None
        self._running: dict[Scenario, Running] = {}
        self._calls: dict[tuple[Asked, int, int], list[bytes]] = {}
        self._new = count()  # of requests that were never sent before
        self.latencies: dict[Scenario, Latencies] = {}  # when everything else is measured

    @property
    def starts(self) -> dict[Scenario, Start]:
        return {scenario: running.start for scenario, running in self._running.items()}

    def run(self) -> dict[Scenario, list[Measurement]]:
        """Every measurement of every scenario, in the order of the rounds."""
        os.sched_setaffinity(0, {LOAD_CORE})
        results: dict[Scenario, list[Measurement]] = {scenario: [] for scenario in self._plan.scenarios}
        try:
            for round_number in range(1, self._plan.repeats + 1):
                for scenario in self._plan.scenarios:
                    self._progress(f"round {round_number} of {self._plan.repeats}: {scenario.name}")
                    results[scenario].append(self._measure_or_say_why(scenario))
            self._measure_latencies(results)
        finally:
            self._servers.close()
        return results

    def _measure_latencies(self, results: Mapping[Scenario, Sequence[Measurement]]) -> None:
        """Of ours and, if it is there, the reference, at the same pace: half of what the slower of them can do."""
        both = [scenario for scenario in (REDIS_2, replace(REDIS_2, server=Server.PEER)) if scenario in results]
        if not both:
            return
        per_s = min(median(one.calls_per_s for one in results[scenario]) for scenario in both) / 2
        for scenario in both:
            self._progress(f"latencies at {per_s:,.0f} calls a second: {scenario.name}")
            calls = self._requests(scenario)
            assert isinstance(calls, Sequence)
            running = self._running[scenario]
            with _awake(running.pid), Paced(running.target, calls, scenario.connections) as load:
                load.run(per_s, SETTLE_S)
                self.latencies[scenario] = load.run(per_s, self._plan.seconds * self._plan.repeats)

    def _measure_or_say_why(self, scenario: Scenario) -> Measurement:
        try:
            return self._measure(scenario)
        except (LoadError, OSError) as error:
            raise LoadError(f"{scenario.name}: {error}\n{self._servers.log(scenario.name)}") from error

    def _measure(self, scenario: Scenario) -> Measurement:
        is_new = scenario not in self._running
        running = self._start(scenario)
        calls = self._requests(scenario)
        redis_pid = self._redis[0] if self._redis and scenario.uses_redis else None
        refused = scenario.some_are_refused
        with (
            _awake(running.pid) as family,
            Load(running.target, calls, self._plan.in_flight, scenario.connections, some_are_refused=refused) as load,
        ):
            # A service that was just started has seen every request once before it is measured: every counter exists,
            # and what is kept per request is kept, as far as the service's cache reaches.
            warms_up = is_new and not scenario.echoes
            load.run(SETTLE_S, at_least_calls=len(calls) if warms_up and isinstance(calls, Sequence) else 0)
            commands_before = self._redis_commands(scenario)
            before = cpu.read(family, redis_pid, SERVICE_CORE, LOAD_CORE)
            tally = load.run(self._plan.seconds)
            spent = cpu.read(family, redis_pid, SERVICE_CORE, LOAD_CORE) - before
            commands = self._redis_commands(scenario) - commands_before
            load.drain()
            _check(scenario, load.samples)
        share = 1 if scenario.all_are_refused else callers.REFUSED_SHARE if refused else 0
        if abs(tally.refused / tally.calls - share) > REFUSED_WITHIN:
            raise LoadError(f"{tally.refused} of {tally.calls} calls were refused; about {share:.0%} were to be")
        return _measurement(tally, spent, commands, scenario.workers)

    def _redis_commands(self, scenario: Scenario) -> Counter[str]:
        """How often Redis ran each command so far."""
        if self._redis is None or not scenario.uses_redis:
            return Counter()
        with Redis.from_url(f"redis://{self._redis[1]}") as client:
            told = client.info("commandstats")
        ran = {name.removeprefix("cmdstat_"): of_it["calls"] for name, of_it in told.items()}
        return Counter({name: calls for name, calls in ran.items() if name not in OUR_COMMANDS})

    def _requests(self, scenario: Scenario) -> Sequence[bytes] | Iterator[bytes]:
        if scenario.new:
            numbers = map(FIRST_NEW.__add__, self._new)
            return (wire.data(workload.request(number, scenario.descriptors)) for number in numbers)
        keys = self._keys(scenario)
        shape = (scenario.asked, scenario.descriptors, keys)
        if shape not in self._calls:
            if scenario.asked is Asked.CALLERS:
                self._calls[shape] = callers.requests(keys)
            elif scenario.asked is Asked.CHECKS:
                self._calls[shape] = callers.checks(keys)
            else:
                self._calls[shape] = workload.requests(scenario.descriptors, keys)
        return self._calls[shape]

    def _keys(self, scenario: Scenario) -> int:
        return min(scenario.keys, self._plan.most_keys)

    def _start(self, scenario: Scenario) -> Running:
        """The scenario's server: one process for each, so that no scenario works with what another left behind."""
        if scenario in self._running:
            return self._running[scenario]
        if scenario.uses_redis and self._redis is None:
            self._redis = self._servers.redis()
        redis = self._redis[1] if self._redis and scenario.uses_redis else None
        if scenario.echoes:
            tls = self._certificate if scenario.way is Way.TLS else None
            started = self._servers.echo(scenario.name, scenario.server.removeprefix("echo-"), tls)
        elif scenario.server is Server.PEER:
            assert self._plan.peer is not None
            assert redis is not None
            started = self._servers.peer(scenario.name, self._plan.peer, self._rules(scenario), redis)
        else:
            started = self._servers.service(scenario.name, self._rules(scenario), redis, self._variables(scenario))
        has_tls, shows_it = scenario.way in (Way.TLS, Way.MTLS), scenario.way is Way.MTLS
        method = wire.CHECK if scenario.asked is Asked.CHECKS else wire.SHOULD_RATE_LIMIT
        target = Target(started.address, self._certificate.client(shows_it=shows_it) if has_tls else None, method)
        start = Start(started.took_s, cpu.resident_bytes(started.pid))
        self._running[scenario] = Running(started.pid, target, start)
        return self._running[scenario]

    def _rules(self, scenario: Scenario) -> Path:
        """Where the scenario's rules are, apart from all others: the reference must be able to read its own."""
        if scenario.asked is Asked.DESCRIPTORS:
            root = self._directory / f"rules {scenario.rules.name}"
            workload.write_rules(root, scenario.rules)
        else:
            root = self._directory / f"rules of callers, {scenario.records}"
            callers.write_rules(root, of_database=scenario.records)
        return root

    def _variables(self, scenario: Scenario) -> dict[str, str]:
        """What the scenario asks of the service, beside what every rate limiter is told."""
        told: dict[str, str] = {}
        if scenario.workers > 1:
            told["RLS_WORKERS"] = str(scenario.workers)
        if scenario.way is Way.UNIX:
            told["GRPC_UDS"] = str(self._directory / "grpc.sock")
        if scenario.way in (Way.TLS, Way.MTLS):
            told["GRPC_SERVER_USE_TLS"] = "true"
            told["GRPC_SERVER_TLS_CERT"] = str(self._certificate.certificate)
            told["GRPC_SERVER_TLS_KEY"] = str(self._certificate.key)
        if scenario.way is Way.MTLS:
            told["GRPC_CLIENT_TLS_CACERT"] = str(self._certificate.certificate)
        if scenario.records:
            told["RLS_DATABASE_URL"] = f"sqlite:///{self._directory / scenario.name}.db"
            told["RLS_KEY_SECRET"] = callers.KEY_SECRET
            told["RLS_ADMIN_PORT"] = str(free_port())
            callers.fill_now(told["RLS_DATABASE_URL"], self._keys(scenario))
        return told


OUR_COMMANDS = ("info", "hello", "client|setinfo")
"""Of whoever looks at Redis."""


def _check(scenario: Scenario, samples: list[bytes]) -> None:
    """Some answers, taken under load, say OK to every descriptor when read with real protobuf."""
    if not samples:
        raise LoadError("no answer was kept to be looked at")
    if scenario.asked is Asked.CHECKS:
        for sample in samples:
            _look_at_check(CheckResponse.FromString(sample))
        return
    for sample in samples:
        answer = RateLimitResponse.FromString(sample)
        if scenario.some_are_refused and answer.overall_code == RateLimitResponse.OVER_LIMIT:
            continue
        if scenario.all_are_refused:
            raise LoadError(f"expected to be refused, got:\n{answer}")
        codes = [status.code for status in answer.statuses]
        if answer.overall_code != RateLimitResponse.OK or codes != [RateLimitResponse.OK] * scenario.descriptors:
            raise LoadError(f"expected OK for {scenario.descriptors} descriptors, got:\n{answer}")
        if not all(status.HasField("current_limit") for status in answer.statuses):
            raise LoadError(f"a descriptor met no limit, so nothing was decided:\n{answer}")


def _look_at_check(answer: Any) -> None:
    """Passed or refused by a limit, and for no other reason: a key that nobody knows would be quick to deal with."""
    if answer.status.code == 0 and answer.HasField("ok_response"):
        return
    if answer.denied_response.status.code != TOO_MANY_REQUESTS:
        raise LoadError(f"expected a decision about a limit, got:\n{answer}")


@contextmanager
def _awake(pid: int) -> Iterator[list[int]]:
    """The server with all its processes, stopped before and after.

    Forty idle servers take a tenth of their core, and one with records writes what another is charged for.
    """
    family = cpu.family(pid)  # now: workers may have come since it listens
    _signal(family, signal.SIGCONT)
    try:
        yield family
    finally:
        _signal(family, signal.SIGSTOP)


def _signal(family: list[int], number: signal.Signals) -> None:
    for pid in family:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _measurement(tally: Tally, spent: cpu.Reading, commands: Counter[str], workers: int) -> Measurement:
    calls, seconds = tally.calls, tally.seconds

    def us_per_call(cpu_s: float) -> float:
        return cpu_s / calls * 1e6

    return Measurement(
        calls_per_s=calls / seconds,
        service_us=us_per_call(spent.service_s),
        redis_us=us_per_call(spent.redis_s),
        load_us=us_per_call(spent.load_s),
        answers_per_read=calls / tally.reads,
        service_share=spent.service_s / seconds,
        load_share=(spent.load_s + spent.redis_s) / seconds,
        others_on_service_core=max(0.0, spent.service_core_s - spent.service_s) / seconds,
        others_on_load_core=max(0.0, spent.load_core_s - spent.load_s - spent.redis_s) / seconds,
        redis_commands={name: number / calls for name, number in sorted(commands.items()) if number},
        least_worker=sorted(spent.each_s)[-workers] / spent.service_s,
    )
