"""What a caller costs a Redis, in every kind of state: as docs/operations.md says, and gone when its time is over.

`python -m bench.keys_soak`, a part of `make soak`, does the same with a million callers, and prints the table.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.keys_soak import KINDS, SERVERS, Kind, Measured, soak, table

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CALLERS = 10_000
MOST_OFF = 0.25
"""Memory comes in pieces of 16 bytes and tables in powers of two: a digit more or a key fewer may be another piece."""

MOST_LATE_S = 5.0

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"


def documented(server: str, kind: Kind) -> int:
    (table,) = re.findall(r"^\| state \|.*\n(?:\|.*\n)+", OPERATIONS.read_text(), re.MULTILINE)
    header, _, *rows = table.splitlines()
    (row,) = (row for row in rows if row.startswith(f"| {kind.name} |"))
    cells = dict(zip(header.split("|"), row.split("|"), strict=True))
    return int(cells[f" {server} "])


@pytest.fixture(scope="module")
def figures() -> list[Measured]:
    """On all servers at once, since most of the time goes by until the last states expire."""
    return list(soak(CALLERS, SERVERS, KINDS, at_once=len(SERVERS) * len(KINDS)))


@pytest.mark.parametrize("server", SERVERS)
def test_every_kind_of_state_takes_what_is_documented_and_expires(server: str, figures: list[Measured]) -> None:
    figures = [measured for measured in figures if measured.server == server]
    print("", *table(figures), *figures, sep="\n")

    for kind, measured in zip(KINDS, figures, strict=True):
        assert measured.bytes_each == pytest.approx(documented(server, kind), rel=MOST_OFF), kind.name
        assert measured.late_s < MOST_LATE_S, measured
