"""Memory of each kind of state in Redis: as documented in docs/operations.md, and freed when it expires.

`python -m bench.keys_soak`, a part of `make soak`, measures a million callers, and prints the table.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.keys_soak import KINDS, SERVERS, StateKind, StateMeasurement, soak, table

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CALLERS = 10_000
MAX_OFF = 0.25
"""Memory is allocated in steps of 16 bytes and tables in powers of two: a digit more or a key less may be a step."""

MAX_LATE_S = 5.0

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"


def documented(server: str, kind: StateKind) -> int:
    (table,) = re.findall(r"^\| state \|.*\n(?:\|.*\n)+", OPERATIONS.read_text(), re.MULTILINE)
    header, _, *rows = table.splitlines()
    (row,) = (row for row in rows if row.startswith(f"| {kind.name} |"))
    cells = dict(zip(header.split("|"), row.split("|"), strict=True))
    return int(cells[f" {server} "])


@pytest.fixture(scope="module")
def figures() -> list[StateMeasurement]:
    """Measure all servers in parallel, since most of the time is spent waiting for the last states to expire."""
    return list(soak(CALLERS, SERVERS, KINDS, at_once=len(SERVERS) * len(KINDS)))


@pytest.mark.parametrize("server", SERVERS)
def test_every_kind_of_state_has_the_documented_size_and_expires(server: str, figures: list[StateMeasurement]) -> None:
    figures = [measured for measured in figures if measured.server == server]
    print("", *table(figures), *figures, sep="\n")

    for kind, measured in zip(KINDS, figures, strict=True):
        assert measured.bytes_each == pytest.approx(documented(server, kind), rel=MAX_OFF), kind.name
        assert measured.late_s < MAX_LATE_S, measured
