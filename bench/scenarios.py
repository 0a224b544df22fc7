"""What is measured: every server under every load that says something, by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase

from bench.workload import MANY_KEYS


class Server(StrEnum):
    """Which program answers."""

    ECHO_NATIVE = "echo-native"
    ECHO_GRPCIO = "echo-grpcio"
    EMBEDDED = "embedded"
    REDIS = "redis"
    PEER = "peer"


class Asked(StrEnum):
    """What callers send. The value is a part of the scenario's name."""

    DESCRIPTORS = ""  # everything passes
    CALLERS = "callers"  # as many descriptors, of callers of whom some are refused
    CHECKS = "checks"  # the same callers through ext_authz, by a header or by their API keys


@dataclass(frozen=True, slots=True)
class Scenario:
    """One server, one load."""

    server: Server
    descriptors: int = 2
    keys: int = MANY_KEYS
    tls: bool = False
    asked: Asked = Asked.DESCRIPTORS
    records: bool = False  # with a database, which knows every caller and takes the record

    @property
    def some_are_refused(self) -> bool:
        return self.asked is not Asked.DESCRIPTORS

    @property
    def echoes(self) -> bool:
        return self.server in (Server.ECHO_NATIVE, Server.ECHO_GRPCIO)

    @property
    def uses_redis(self) -> bool:
        return self.server in (Server.REDIS, Server.PEER)

    @property
    def name(self) -> str:
        shape = "" if self.echoes else f"-{self.descriptors}"
        load = ("-hot" if self.keys == 1 else "") + (f"-{self.asked}" if self.asked else "")
        return self.server + shape + load + ("-tls" if self.tls else "") + ("-records" if self.records else "")


ECHO = Scenario(Server.ECHO_NATIVE)  # what every cost is compared with
REDIS_2 = Scenario(Server.REDIS)
EMBEDDED_2 = Scenario(Server.EMBEDDED)
CALLERS = Scenario(Server.REDIS, asked=Asked.CALLERS)
CHECKS = Scenario(
    Server.REDIS, keys=10_000, asked=Asked.CHECKS
)  # as many as the door's share of the cache has room for
DESCRIPTORS = (1, 2, 5)


def every(peer: bool) -> list[Scenario]:
    """All scenarios, in the order of the table."""
    echoes = [Scenario(server, tls=tls) for server in (Server.ECHO_NATIVE, Server.ECHO_GRPCIO) for tls in (False, True)]
    return (
        echoes
        + _decisions(Server.EMBEDDED, tls=True)
        + _decisions(Server.REDIS, tls=True)
        + [replace(one, records=records) for one in (CALLERS, CHECKS) for records in (False, True)]
        + (_decisions(Server.PEER, tls=False) if peer else [])
    )


def quick(peer: bool) -> list[Scenario]:
    """The few that a few seconds suffice for."""
    return [ECHO, EMBEDDED_2, REDIS_2, *([Scenario(Server.PEER)] if peer else [])]


def chosen(scenarios: list[Scenario], patterns: list[str]) -> list[Scenario]:
    """Those whose name fits one of the patterns, all of them if there are none."""
    return [one for one in scenarios if not patterns or any(fnmatchcase(one.name, pattern) for pattern in patterns)]


def _decisions(server: Server, tls: bool) -> list[Scenario]:
    spread = [Scenario(server, descriptors) for descriptors in DESCRIPTORS]
    hot = [Scenario(server, descriptors, keys=1) for descriptors in DESCRIPTORS]
    return spread + hot + ([Scenario(server, tls=True)] if tls else [])
