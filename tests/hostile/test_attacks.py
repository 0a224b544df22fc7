"""Each attack on a real server with a well-behaved client: bounded memory and waits, a closed connection, a metric.

The limits on waits are for a busy machine; `python -m tests.hostile` has those for a quiet one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hostile.attacks import ATTACKS, Attack
from tests.hostile.harness import MIB, Outcome, UnderAttack, attacked, well_behaved_client
from tests.hostile.well_behaved_client import WellBehavedClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

MAX_GROWTH_MIB = 64
MAX_WAIT_MS = 1000
"""Excludes the time in which the server or the client had no core."""

AT_ONCE = [attack for attack in ATTACKS if not attack.waits]
WAITING = [attack for attack in ATTACKS if attack.waits]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UnderAttack]:
    """One server for all attacks, so that damage by one affects the next."""
    with UnderAttack(tmp_path_factory.mktemp("attacked")) as running:
        yield running
        assert "Traceback" not in running.log()


@pytest.fixture(scope="module")
def calls(service: UnderAttack) -> Iterator[WellBehavedClient]:
    with well_behaved_client(service) as client:
        yield client


def withstands(service: UnderAttack, outcome: Outcome) -> None:
    print(outcome.line())
    assert service.running
    assert outcome.waits.calls
    assert not outcome.waits.failed, outcome.waits.faults
    assert outcome.waits.longest_fair_ms < MAX_WAIT_MS
    assert outcome.grown_bytes < MAX_GROWTH_MIB * MIB
    assert not outcome.not_ended
    assert not outcome.not_named, outcome.counted


@pytest.mark.parametrize("attack", AT_ONCE, ids=[attack.name for attack in AT_ONCE])
def test_server_withstands_attack(service: UnderAttack, calls: WellBehavedClient, attack: Attack) -> None:
    withstands(service, attacked(service, calls, attack))


def test_unfinished_input_times_out(service: UnderAttack, calls: WellBehavedClient) -> None:
    """All slow attacks at once, because they take as long as the longest timeout."""
    withstands(service, attacked(service, calls, *WAITING))


def test_attacker_loses_its_connection_but_may_reconnect(service: UnderAttack, calls: WellBehavedClient) -> None:
    """It may reconnect, and is closed again."""
    (attack,) = [attack for attack in ATTACKS if attack.name == "rapid reset"]
    for _ in range(3):
        withstands(service, attacked(service, calls, attack))
