"""What is measured: every server under every load that says something, by name."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Scenario:
    """One server, one load."""

    server: Server
    descriptors: int = 2
    keys: int = MANY_KEYS
    tls: bool = False

    @property
    def echoes(self) -> bool:
        return self.server in (Server.ECHO_NATIVE, Server.ECHO_GRPCIO)

    @property
    def uses_redis(self) -> bool:
        return self.server in (Server.REDIS, Server.PEER)

    @property
    def name(self) -> str:
        shape = "" if self.echoes else f"-{self.descriptors}"
        return self.server + shape + ("-hot" if self.keys == 1 else "") + ("-tls" if self.tls else "")


ECHO = Scenario(Server.ECHO_NATIVE)  # what every cost is compared with
REDIS_2 = Scenario(Server.REDIS)
EMBEDDED_2 = Scenario(Server.EMBEDDED)
DESCRIPTORS = (1, 2, 5)


def every(peer: bool) -> list[Scenario]:
    """All scenarios, in the order of the table."""
    echoes = [Scenario(server, tls=tls) for server in (Server.ECHO_NATIVE, Server.ECHO_GRPCIO) for tls in (False, True)]
    return (
        echoes
        + _decisions(Server.EMBEDDED, tls=True)
        + _decisions(Server.REDIS, tls=True)
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
