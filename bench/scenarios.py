"""Benchmark scenarios: every server under every relevant load, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Protocol, TypeVar

from bench import edge
from bench.workload import DEFAULT_RULES, MANY_KEYS, MAX_LOG_LENGTH, PLENTY, RuleSet


class Server(StrEnum):
    """Program that serves the calls."""

    ECHO_NATIVE = "echo-native"
    ECHO_GRPCIO = "echo-grpcio"
    EMBEDDED = "embedded"
    REDIS = "redis"
    PEER = "peer"  # envoyproxy/ratelimit
    LIMITADOR = "limitador"  # with its counters in memory
    ENVOY = "envoy"  # alone, without a rate limiter


class RequestKind(StrEnum):
    """Requests of the callers. The value is part of the scenario's name."""

    DESCRIPTORS = ""  # the same requests in turn, all of which are admitted
    COLD = "cold"  # like these, but never seen before, with values of many lengths
    MIXED = "mixed"  # known descriptors, in combinations that have hardly ever been seen before
    EDGE = "edge"  # what an edge sends (bench/edge.py)
    CALLERS = "callers"  # the same number of descriptors, from callers some of which are denied
    CHECKS = "checks"  # the same callers through ext_authz, by a header or by their API keys


class ClientRoute(StrEnum):
    """Route from the callers to the server. The value is part of the scenario's name."""

    PLAIN = ""
    TLS = "tls"
    MTLS = "mtls"  # with client certificates
    UNIX = "unix"
    ENVOY = "envoy"  # HTTP requests to an Envoy, whose filter calls the server


CONNECTIONS = 4


@dataclass(frozen=True, slots=True)
class Scenario:
    """One server under one load."""

    server: Server
    descriptors: int = 2
    keys: int = MANY_KEYS
    route: ClientRoute = ClientRoute.PLAIN
    request_kind: RequestKind = RequestKind.DESCRIPTORS
    records: bool = False  # with a database that contains every caller and records decisions
    telemetry: bool = False  # some calls are traced, and metrics are scraped
    rules: RuleSet = DEFAULT_RULES
    traced: bool = False  # every call has a new traceparent
    connections: int = CONNECTIONS  # to each process
    workers: int = 1
    in_flight: int = 0  # calls in flight to each process; 0: those of the run
    per_s: int = 0  # calls per second, due at fixed times; 0: each response is followed by the next call
    replicas: int = 1  # processes of the server, each with its own connections
    masters: int = 0  # of a Redis Cluster; 0: a single Redis
    window_us: int = 0  # RLS_BATCH_WINDOW

    @property
    def all_are_denied(self) -> bool:
        return self.rules.limit == 1

    @property
    def some_are_denied(self) -> bool:
        return self.all_are_denied or self.request_kind in (RequestKind.CALLERS, RequestKind.CHECKS)

    @property
    def repeats_requests(self) -> bool:
        """True if the same requests are sent in turn; otherwise hardly any is ever repeated."""
        return self.request_kind not in (RequestKind.COLD, RequestKind.MIXED, RequestKind.EDGE)

    @property
    def first_caller(self) -> int:
        """Return the first caller; prefilled logs have their own callers."""
        return MANY_KEYS if self.rules.hits_before else 0

    @property
    def echoes(self) -> bool:
        return self.server in (Server.ECHO_NATIVE, Server.ECHO_GRPCIO)

    @property
    def decides(self) -> bool:
        """True if the server is a rate limiter."""
        return not self.echoes and self.server is not Server.ENVOY

    @property
    def has_envoy(self) -> bool:
        return self.server is Server.ENVOY or self.route is ClientRoute.ENVOY

    @property
    def uses_redis(self) -> bool:
        return self.server in (Server.REDIS, Server.PEER)

    @property
    def is_timed(self) -> bool:
        """True if latencies are measured: few calls are in flight, so that they hardly wait for each other."""
        return self.replicas > 1 or self.in_flight == 1 or self.per_s > 0

    @property
    def deployment(self) -> Scenario:
        """Return the scenario without the amount of its load: timed scenarios share the processes of others."""
        return replace(self, in_flight=0, per_s=0, connections=CONNECTIONS) if self.is_timed else self

    @property
    def name(self) -> str:
        parts = [self.server, str(self.descriptors) if self.decides else "", "hot" if self.keys == 1 else ""]
        parts += [
            self.request_kind,
            self.rules.name,
            "traced" if self.traced else "",
            self.route,
            "records" if self.records else "",
        ]
        parts += [
            "telemetry" if self.telemetry else "",
            f"{self.connections}-connections" if self.connections > CONNECTIONS else "",
        ]
        parts += [f"{self.workers}-workers" if self.workers > 1 else "", "cluster" if self.masters else ""]
        parts += ["fleet" if self.replicas > 1 else "", f"{self.in_flight}-in-flight" if self.in_flight else ""]
        parts += [f"{self.per_s}-per-s" if self.per_s else "", f"window-{self.window_us}us" if self.window_us else ""]
        return "-".join(part for part in parts if part)


ECHO = Scenario(Server.ECHO_NATIVE)  # baseline of all costs
REDIS_2 = Scenario(Server.REDIS)
EMBEDDED_2 = Scenario(Server.EMBEDDED)
CALLERS = Scenario(Server.REDIS, request_kind=RequestKind.CALLERS)
CHECKS = Scenario(Server.REDIS, keys=10_000, request_kind=RequestKind.CHECKS)  # as many as fit into the request cache
DESCRIPTORS = (1, 2, 5)

FIXED_WINDOW = replace(REDIS_2, rules=RuleSet(charge="admitted"))
"""Baseline of the other algorithms, all of which charge admitted calls only."""

ALGORITHMS = [
    replace(REDIS_2, rules=RuleSet(algorithm, "admitted", MAX_LOG_LENGTH if algorithm == "sliding_log" else PLENTY))
    for algorithm in ("sliding_window", "sliding_log", "token_bucket", "leaky_bucket", "gcra")
]
FEW_KEYS = 4_000
LOG_HEADROOM = 100
"""Headroom of the limit for the calls of a measurement, so that all are admitted."""

FEW_FIXED_WINDOWS = Scenario(Server.REDIS, 1, keys=FEW_KEYS, rules=RuleSet(charge="admitted"))
LONG_LOGS = [
    replace(FEW_FIXED_WINDOWS, rules=RuleSet("sliding_log", "admitted", hits + LOG_HEADROOM, hits_before=hits))
    for hits in (10, 100, 1_000)
]
ALL_DENIED = replace(REDIS_2, keys=8_000, rules=RuleSet(charge="admitted", limit=1))
"""Fewer keys than the 9,500 denials of two limits that the denial cache holds by default. `charge: admitted`, since a
denial that is charged cannot be cached."""

LEASED = Scenario(Server.REDIS, 1, keys=1, rules=RuleSet(charge="admitted", lease="100ms"))
MANY_RULES = [replace(REDIS_2, rules=RuleSet(others=others)) for others in (10, 10_000, 100_000)]

COLD_DESCRIPTORS, MIXED_DESCRIPTORS = (2, 5), 5
LONE_IN_FLIGHT, PACED_PER_S = 1, 4_000
COLD = [Scenario(Server.REDIS, descriptors, request_kind=RequestKind.COLD) for descriptors in COLD_DESCRIPTORS]
MIXED = Scenario(Server.REDIS, MIXED_DESCRIPTORS, request_kind=RequestKind.MIXED)
EDGE = Scenario(Server.REDIS, edge.DESCRIPTORS, request_kind=RequestKind.EDGE)
TRACED = replace(EDGE, traced=True)
LONE = replace(EDGE, in_flight=LONE_IN_FLIGHT, connections=1)
PACED = replace(EDGE, per_s=PACED_PER_S)
UNCACHED = [*COLD, MIXED, EDGE, TRACED, LONE, PACED]
"""Requests as users send them. Each is also measured on the embedded store and with the reference."""

ENVOY_ALONE = Scenario(Server.ENVOY, keys=10_000)
THROUGH_ENVOY = replace(REDIS_2, keys=10_000, route=ClientRoute.ENVOY)
ONE_WORKER = replace(REDIS_2, keys=10_000, connections=8)
TWO_WORKERS = replace(ONE_WORKER, connections=16, workers=2)
"""Two workers share a port, and the kernel distributes connections randomly. Each has as many calls in flight, on about
as many connections, as a single worker."""

FEWER_KEYS = 10_000
TOKEN_BUCKET_AND_DAY = Scenario(Server.REDIS, 1, rules=RuleSet("token_bucket", daily=True))
"""Two limits on one descriptor: the plan of a customer with a rate and a daily quota."""

REPLICAS, FLEET_IN_FLIGHT, FLEET_DESCRIPTORS = 8, (1, 4), (1, 2)
FLEET = [
    Scenario(Server.REDIS, descriptors, keys=FEWER_KEYS, connections=in_flight, in_flight=in_flight, replicas=REPLICAS)
    for descriptors in FLEET_DESCRIPTORS
    for in_flight in FLEET_IN_FLIGHT
]
"""Many processes with hardly any load each and one call on a connection: most calls come alone and share nothing."""

FLEET_WINDOWS = [
    replace(one, window_us=window_us) for window_us in (250, 500, 1000, 2000) for one in FLEET if one.descriptors == 1
]

MASTERS, CLUSTER_IN_FLIGHT = 3, 128
SINGLE_REDIS = [
    Scenario(Server.REDIS, descriptors, keys=FEWER_KEYS, in_flight=CLUSTER_IN_FLIGHT) for descriptors in DESCRIPTORS
]
CLUSTER = [replace(one, masters=MASTERS) for one in SINGLE_REDIS]
SHARED_BY_DOMAIN = RuleSet(shard_by="domain")
CLUSTER_WINDOWS = [replace(CLUSTER[1], window_us=window_us) for window_us in (500, 2000)]
"""While a batch is being decided, calls of other connections wait to share the next one."""

CLUSTER_BY_DOMAIN = [replace(one, rules=SHARED_BY_DOMAIN) for one in CLUSTER]
"""All counters of a call are on one slot. The domain is the only one, so one master has all of the work."""

SHARED_BY_TENANT = RuleSet(shard_by="tenant")
CLUSTER_BY_TENANT = [replace(one, rules=SHARED_BY_TENANT) for one in CLUSTER]
"""All counters of a call are on one slot. There are as many slots as tenants, so every master has work."""


def of_peer(scenario: Scenario) -> Scenario:
    """Return the scenario with envoyproxy/ratelimit as the server."""
    return replace(scenario, server=Server.PEER)


def embedded(scenario: Scenario) -> Scenario:
    """Return the scenario with the counters in the service."""
    return replace(scenario, server=Server.EMBEDDED)


def of_limitador(scenario: Scenario) -> Scenario:
    """Return the scenario with Limitador as the server."""
    return replace(scenario, server=Server.LIMITADOR)


LIMITADOR = [of_limitador(one) for one in (Scenario(Server.REDIS, MIXED_DESCRIPTORS), COLD[-1], MIXED)]
"""Five descriptors: known requests, new ones, and new combinations. Compared with the embedded store."""


def with_records(scenario: Scenario) -> Scenario:
    """Return the scenario with a database: callers have credentials, and decisions are recorded."""
    return replace(scenario, records=True)


def with_everything(scenario: Scenario) -> Scenario:
    """Return the scenario with all optional features enabled: database, traces and scraped metrics.

    Calls have no parent span, and 1 % are sampled. An unsampled parent would cost each call 0.5 µs more.
    """
    return replace(scenario, records=True, telemetry=True)


def every(*, peer: bool, envoy: bool, limitador: bool = False) -> list[Scenario]:
    """Return all scenarios in the order of the table, optionally with envoyproxy/ratelimit, Envoy and Limitador."""
    both = (ClientRoute.PLAIN, ClientRoute.TLS)
    return [
        *(Scenario(server, route=route) for server in (Server.ECHO_NATIVE, Server.ECHO_GRPCIO) for route in both),
        *_decisions(Server.EMBEDDED),
        replace(EMBEDDED_2, route=ClientRoute.TLS),
        *_decisions(Server.REDIS),
        *(replace(REDIS_2, route=route) for route in (ClientRoute.TLS, ClientRoute.MTLS, ClientRoute.UNIX)),
        *(FIXED_WINDOW, *ALGORITHMS, FEW_FIXED_WINDOWS, *LONG_LOGS),
        *(ALL_DENIED, LEASED, *MANY_RULES, ONE_WORKER, TWO_WORKERS),
        *UNCACHED,
        *map(embedded, UNCACHED),
        with_everything(EDGE),
        *(each for one in (CALLERS, CHECKS) for each in (one, with_records(one), with_everything(one))),
        *(
            TOKEN_BUCKET_AND_DAY,
            *FLEET,
            *FLEET_WINDOWS,
            *SINGLE_REDIS,
            *CLUSTER,
            *CLUSTER_WINDOWS,
            *CLUSTER_BY_DOMAIN,
            *CLUSTER_BY_TENANT,
        ),
        *((ENVOY_ALONE, THROUGH_ENVOY) if envoy else ()),
        *(_decisions(Server.PEER) if peer else []),
        *(map(of_peer, (*UNCACHED, *FLEET, *SINGLE_REDIS, *CLUSTER)) if peer else ()),
        *(LIMITADOR if limitador else ()),
    ]


def quick(*, peer: bool) -> list[Scenario]:
    """Return the scenarios of a run of a few seconds."""
    return [ECHO, EMBEDDED_2, REDIS_2, *([Scenario(Server.PEER)] if peer else [])]


class Named(Protocol):
    """Anything that can be chosen by its name."""

    @property
    def name(self) -> str: ...


AnyNamed = TypeVar("AnyNamed", bound=Named)


def chosen(scenarios: Sequence[AnyNamed], patterns: Sequence[str]) -> list[AnyNamed]:
    """Return the scenarios whose name matches a pattern; all without patterns."""
    return [one for one in scenarios if not patterns or any(fnmatchcase(one.name, pattern) for pattern in patterns)]


def _decisions(server: Server) -> list[Scenario]:
    spread = [Scenario(server, descriptors) for descriptors in DESCRIPTORS]
    return spread + [Scenario(server, descriptors, keys=1) for descriptors in DESCRIPTORS]
