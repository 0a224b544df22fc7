"""Random attacks for some seconds; `make soak` runs ten minutes of them, with limits for a quiet machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from bench.attack_soak import MIB, Changes, Phase, main, violations  # type: ignore[attr-defined]
from tests.hostile.well_behaved_client import Waits

SHORT = ["--minutes", "0.17", "--calm-minutes", "0.05", "--seed", "17"]
GENEROUS = ["--busy", "--max-later-ms", "1000", "--max-growth-mib", "64"]
"""Memory is still growing within seconds."""

FINE = Waits(
    calls=1000,
    failed=0,
    p50_ms=1.0,
    p95_ms=2.0,
    p99_ms=3.0,
    p99_9_ms=10.0,
    longest_ms=20.0,
    fair_p50_ms=1.0,
    fair_p95_ms=1.5,
    fair_p99_ms=2.0,
    fair_p99_9_ms=5.0,
    longest_fair_ms=9.0,
    faults=(),
)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("addresses", ["different", "same"])
def test_well_behaved_clients_are_not_affected(addresses: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main([*SHORT, *GENEROUS, "--addresses", addresses])
    output = capsys.readouterr().out
    print(output)
    assert code == 0
    assert " attacks of " in output
    assert "flood" in output


def phase(name: str = "attacked", *, waits: Waits = FINE, done: int = 10, mib: Sequence[int] = (100,) * 12) -> Phase:
    return Phase(name, 10.0, waits, Changes(done), [one * MIB for one in mib], 1.0)


CALM = phase("calm")
FAULTS = {
    "nothing": (phase(), []),
    "a call failed": (phase(waits=replace(FINE, failed=1)), ["attacked: 1 well-behaved calls failed"]),
    "no call": (phase(waits=replace(FINE, calls=0)), ["attacked: 0 well-behaved calls failed"]),
    "late": (phase(waits=replace(FINE, p99_9_ms=111.0)), ["p99.9 is 101 ms above that of the calm run"]),
    "just in time": (phase(waits=replace(FINE, p99_9_ms=110.0)), []),
    "no change": (phase(done=0), ["attacked: 0 changes failed"]),
    "memory": (phase(mib=[100, 110, 120, 130, 140, 150, 160, 170, 180, 190, 200, 210]), ["memory grew by 60 MiB"]),
    "warm and flat": (phase(mib=[100, 140, 160, 170, 170, 171, 170, 172, 170, 170, 171, 170]), []),
}


@pytest.mark.parametrize(("attacked", "found"), FAULTS.values(), ids=FAULTS.keys())
def test_verdict_reports_violations(attacked: Phase, found: list[str]) -> None:
    assert violations(CALM, attacked) == found


def test_cpu_starvation_is_excluded_from_the_verdict() -> None:
    late = phase(waits=replace(FINE, p99_9_ms=1000.0))
    assert violations(CALM, late, fair=True) == []
    assert violations(CALM, phase(waits=replace(FINE, fair_p99_9_ms=200.0)), fair=True) != []
