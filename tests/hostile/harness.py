"""A server under attack, a well-behaved client, and the effects of an attack on both."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.cpu import process_s, resident_bytes
from ratelimit_rls.telemetry.abuse import Abuse
from tests.hostile.attackers import Attackers
from tests.hostile.attacks import MAX_CONNECTIONS_PER_PEER, MESSAGE_TIMEOUT_S, RULES, Attack, Port
from tests.hostile.well_behaved_client import Waits, WellBehavedClient
from tests.support.process import START_TIMEOUT_S
from tests.support.service_process import ServiceProcess

MIB = 2**20
ATTACKER = "127.0.0.2"
"""Address of attackers; well-behaved clients use 127.0.0.1."""

LOOK_S = 0.05
NOT_ENDED = "no"

_ABUSE = re.compile(r'^ratelimit_abuse_total\{[^}]*reason="(\w+)"[^}]*\} (\d+)', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Effects of one attack, or of several at once."""

    attacks: Sequence[Attack]
    grown_bytes: int
    """Maximum during the attack."""

    cpu_s: float
    seconds: float
    waits: Waits
    endings: Mapping[str, Counter[str]]
    """Endings of the connections of each attack, with their number; NOT_ENDED if the server did not close them."""

    counted: Mapping[Abuse, int]

    @property
    def not_ended(self) -> list[str]:
        """Attacks that the server should have closed."""
        return [one.name for one in self.attacks if one.ends and NOT_ENDED in self.endings[one.name]]

    @property
    def not_named(self) -> list[str]:
        """Attacks that no metric reports."""
        return [one.name for one in self.attacks if one.reasons and not one.reasons & self.counted.keys()]

    def line(self) -> str:
        """Format as a line of a table."""
        names = ", ".join(one.name for one in self.attacks)
        endings = sum(self.endings.values(), Counter[str]())
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.counted.items()) or "none"
        return (
            f"{names:38} {self.grown_bytes / MIB:+8.1f} MiB {self.waits.longest_ms:8.0f} ms "
            f"({self.waits.longest_fair_ms:5.0f}) {self.waits.failed:4} failed {self.cpu_s:6.2f} s CPU "
            f"{self.seconds:5.1f} s  ended: {', '.join(sorted(endings)):22} {reasons}"
        )


class UnderAttack(ServiceProcess):
    """The service with rules for `attacks`, on the embedded store."""

    def __init__(self, directory: Path, environment: Mapping[str, object] | None = None) -> None:
        rules = directory / "roomy.yaml"
        rules.write_text(RULES)
        fixed = {
            "RLS_RULES": rules,
            "LOG_LEVEL": "warn",
            "RLS_GRPC_MAX_CONNECTIONS_PER_PEER": MAX_CONNECTIONS_PER_PEER,
            "RLS_GRPC_MESSAGE_TIMEOUT": f"{MESSAGE_TIMEOUT_S}s",
        }
        super().__init__({**fixed, **(environment or {})})

    @property
    def addresses(self) -> dict[Port, tuple[str, int]]:
        return {Port.GRPC: ("127.0.0.1", self.grpc_port), Port.HTTP: ("127.0.0.1", self.http_port)}

    def abuse(self) -> dict[Abuse, int]:
        """Return the abuse counters from /metrics."""
        return {Abuse(reason): int(count) for reason, count in _ABUSE.findall(self.debug("/metrics").body)}


@contextmanager
def well_behaved_client(service: ServiceProcess) -> Iterator[WellBehavedClient]:
    """Yield a well-behaved client that has warmed up."""
    with WellBehavedClient(service.grpc_port, service.pid) as calls:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not (before := calls.report()).calls:
            assert not before.failed, before
            assert time.monotonic() < deadline_s, "no call of the well-behaved client was answered"
            time.sleep(0.2)
        yield calls


def attacked(service: UnderAttack, calls: WellBehavedClient, *attacks: Attack) -> Outcome:
    """Run attacks at once until the server has closed all their connections, or until their time is up."""
    before_bytes, before_s, before = resident_bytes(service.pid), process_s(service.pid), service.abuse()
    max_bytes = before_bytes
    looked_s = begun_s = time.monotonic()

    def look() -> None:
        nonlocal max_bytes, looked_s
        if time.monotonic() - looked_s > LOOK_S:
            looked_s = time.monotonic()
            max_bytes = max(max_bytes, resident_bytes(service.pid))

    calls.report()
    with Attackers(service.addresses, source=ATTACKER) as attackers:
        connected = [attackers.connect(attack) for attack in attacks for _ in range(attack.connections)]
        attackers.play(max(attack.lasts_s + attack.holds_s for attack in attacks), meanwhile=look)
        took_s = time.monotonic() - begun_s
    # Include the time that the server needs to process the remaining input.
    after = service.abuse()
    time.sleep(0.3)
    waits = calls.report()
    look()
    endings: dict[str, Counter[str]] = {attack.name: Counter() for attack in attacks}
    for one in connected:
        endings[one.attack.name][one.ending or NOT_ENDED] += 1
    return Outcome(
        attacks=attacks,
        grown_bytes=max_bytes - before_bytes,
        cpu_s=process_s(service.pid) - before_s,
        seconds=took_s,
        waits=waits,
        endings=endings,
        counted={reason: n - before.get(reason, 0) for reason, n in after.items() if n > before.get(reason, 0)},
    )
