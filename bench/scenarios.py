"""What is measured: every server under every load that says something, by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase

from bench.workload import AS_THE_REFERENCE, LONGEST_LOG, MANY_KEYS, PLENTY, RuleSet


class Server(StrEnum):
    """Which program answers."""

    ECHO_NATIVE = "echo-native"
    ECHO_GRPCIO = "echo-grpcio"
    EMBEDDED = "embedded"
    REDIS = "redis"
    PEER = "peer"
    ENVOY = "envoy"  # alone, without a rate limiter


class Asked(StrEnum):
    """What callers send. The value is a part of the scenario's name."""

    DESCRIPTORS = ""  # everything passes
    CALLERS = "callers"  # as many descriptors, of callers of whom some are refused
    CHECKS = "checks"  # the same callers through ext_authz, by a header or by their API keys


class Way(StrEnum):
    """How callers reach the server. The value is a part of the scenario's name."""

    PLAIN = ""
    TLS = "tls"
    MTLS = "mtls"  # callers show a certificate, too
    UNIX = "unix"
    ENVOY = "envoy"  # plain HTTP requests to an Envoy, whose filter asks the server


@dataclass(frozen=True, slots=True)
class Scenario:
    """One server, one load."""

    server: Server
    descriptors: int = 2
    keys: int = MANY_KEYS
    way: Way = Way.PLAIN
    asked: Asked = Asked.DESCRIPTORS
    records: bool = False  # with a database, which knows every caller and takes the record
    telemetry: bool = False  # some calls are traced, and metrics are scraped
    rules: RuleSet = AS_THE_REFERENCE
    new: bool = False  # no request comes twice
    connections: int = 4
    workers: int = 1

    @property
    def all_are_refused(self) -> bool:
        return self.rules.most == 1

    @property
    def some_are_refused(self) -> bool:
        return self.all_are_refused or self.asked is not Asked.DESCRIPTORS

    @property
    def first_caller(self) -> int:
        """Logs that are filled are nobody else's."""
        return MANY_KEYS if self.rules.hits_held else 0

    @property
    def echoes(self) -> bool:
        return self.server in (Server.ECHO_NATIVE, Server.ECHO_GRPCIO)

    @property
    def decides(self) -> bool:
        """Whether there is a rate limiter."""
        return not self.echoes and self.server is not Server.ENVOY

    @property
    def has_envoy(self) -> bool:
        return self.server is Server.ENVOY or self.way is Way.ENVOY

    @property
    def uses_redis(self) -> bool:
        return self.server in (Server.REDIS, Server.PEER)

    @property
    def name(self) -> str:
        parts = [self.server, str(self.descriptors) if self.decides else "", "hot" if self.keys == 1 else ""]
        parts += [self.asked, self.rules.name, "new" if self.new else "", self.way, "records" if self.records else ""]
        parts += [
            "telemetry" if self.telemetry else "",
            f"{self.connections}-connections" if self.connections > 4 else "",
        ]
        parts += [f"{self.workers}-workers" if self.workers > 1 else ""]
        return "-".join(part for part in parts if part)


ECHO = Scenario(Server.ECHO_NATIVE)  # what every cost is compared with
REDIS_2 = Scenario(Server.REDIS)
EMBEDDED_2 = Scenario(Server.EMBEDDED)
CALLERS = Scenario(Server.REDIS, asked=Asked.CALLERS)
CHECKS = Scenario(
    Server.REDIS, keys=10_000, asked=Asked.CHECKS
)  # as many as the door's share of the cache has room for
DESCRIPTORS = (1, 2, 5)

FIXED_WINDOW = replace(REDIS_2, rules=RuleSet(charge="admitted"))
"""What the other algorithms are compared with: all of ours charge whom they admit."""

ALGORITHMS = [
    replace(REDIS_2, rules=RuleSet(algorithm, "admitted", LONGEST_LOG if algorithm == "sliding_log" else PLENTY))
    for algorithm in ("sliding_window", "sliding_log", "token_bucket", "leaky_bucket", "gcra")
]
FEW_KEYS = 4_000
ROOM_IN_LOGS = 100
"""For the calls of a measurement, so that all of them pass."""

FEW_FIXED_WINDOWS = Scenario(Server.REDIS, 1, keys=FEW_KEYS, rules=RuleSet(charge="admitted"))
LONG_LOGS = [
    replace(FEW_FIXED_WINDOWS, rules=RuleSet("sliding_log", "admitted", hits + ROOM_IN_LOGS, hits_held=hits))
    for hits in (10, 100, 1_000)
]
ALL_REFUSED = replace(REDIS_2, keys=8_000, rules=RuleSet(charge="admitted", most=1))
"""Fewer keys than the 9,500 refusals of two limits that are remembered by default, and refusals that cost nothing: one
that is charged cannot be remembered."""

LEASED = Scenario(Server.REDIS, 1, keys=1, rules=RuleSet(charge="admitted", lease="100ms"))
MANY_RULES = [replace(REDIS_2, rules=RuleSet(others=others)) for others in (10, 10_000, 100_000)]
NEVER_SEEN = replace(REDIS_2, new=True)
ENVOY_ALONE = Scenario(Server.ENVOY, keys=10_000)
THROUGH_ENVOY = replace(REDIS_2, keys=10_000, way=Way.ENVOY)
ONE_WORKER = replace(REDIS_2, keys=10_000, connections=8)
TWO_WORKERS = replace(ONE_WORKER, connections=16, workers=2)
"""They share a port, and the kernel spreads connections over them by chance. Each has as many calls in flight, on about
as many connections, as one alone."""


def with_records(scenario: Scenario) -> Scenario:
    """A database knows the callers, who prove who they are, and what was decided is recorded."""
    return replace(scenario, records=True)


def with_everything(scenario: Scenario) -> Scenario:
    """All that can be on at once, and is off in the scenario itself but for counting, which is always on.

    Calls come without a parent, and one in a hundred is drawn. A parent that says no would cost each half a µs more.
    """
    return replace(scenario, records=True, telemetry=True)


def every(*, peer: bool, envoy: bool) -> list[Scenario]:
    """All scenarios, in the order of the table; with those that need a binary of the reference, or an Envoy."""
    both = (Way.PLAIN, Way.TLS)
    return [
        *(Scenario(server, way=way) for server in (Server.ECHO_NATIVE, Server.ECHO_GRPCIO) for way in both),
        *_decisions(Server.EMBEDDED),
        replace(EMBEDDED_2, way=Way.TLS),
        *_decisions(Server.REDIS),
        *(replace(REDIS_2, way=way) for way in (Way.TLS, Way.MTLS, Way.UNIX)),
        *(FIXED_WINDOW, *ALGORITHMS, FEW_FIXED_WINDOWS, *LONG_LOGS),
        *(ALL_REFUSED, LEASED, *MANY_RULES, NEVER_SEEN, ONE_WORKER, TWO_WORKERS),
        *(each for one in (CALLERS, CHECKS) for each in (one, with_records(one), with_everything(one))),
        *((ENVOY_ALONE, THROUGH_ENVOY) if envoy else ()),
        *(_decisions(Server.PEER) if peer else []),
    ]


def quick(*, peer: bool) -> list[Scenario]:
    """The few that a few seconds suffice for."""
    return [ECHO, EMBEDDED_2, REDIS_2, *([Scenario(Server.PEER)] if peer else [])]


def chosen(scenarios: list[Scenario], patterns: list[str]) -> list[Scenario]:
    """Those whose name fits one of the patterns, all of them if there are none."""
    return [one for one in scenarios if not patterns or any(fnmatchcase(one.name, pattern) for pattern in patterns)]


def _decisions(server: Server) -> list[Scenario]:
    spread = [Scenario(server, descriptors) for descriptors in DESCRIPTORS]
    return spread + [Scenario(server, descriptors, keys=1) for descriptors in DESCRIPTORS]
