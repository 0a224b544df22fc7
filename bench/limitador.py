"""Limits of the benchmark in the format of Limitador, and proof that its server applies them.

Its responses have neither statuses of descriptors nor, by default, headers, so that a response without limits looks
like any other. Hence its counters are read before it is measured.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from bench.connection import Address, Connection, LoadError, Target
from bench.workload import DOMAIN, LIMITED_BY, PLENTY, requests

HOUR_S = 3600


def write_limits(directory: Path) -> Path:
    """Write the limits of the default rules, one per descriptor; return the path of the file."""
    path = directory / "limitador.yaml"
    path.write_text("".join(_limit(index, key) for index, key in enumerate(LIMITED_BY)))
    return path


def _limit(index: int, key: str) -> str:
    place = f"descriptors[{index}]"
    return (
        f"- namespace: {DOMAIN}\n  max_value: {PLENTY}\n  seconds: {HOUR_S}\n"
        f"  conditions: []\n  variables: [\"{place}['tenant']\", \"{place}['{key}']\"]\n"
    )


def check_counters(address: Address, http_port: int, descriptors: int) -> None:
    """Call a new server once, and check that it counted the call for every descriptor. Raises LoadError."""
    connection = Connection(Target(address))
    try:
        connection.prime(iter(requests(descriptors, 2)), 1)
    finally:
        connection.close()
    counters = _counters(http_port)
    if len(counters) != 2 * descriptors:
        raise LoadError(f"expected {2 * descriptors} counters of two calls in Limitador, got: {counters}")


def _counters(http_port: int) -> list[Any]:
    with urlopen(f"http://127.0.0.1:{http_port}/counters/{DOMAIN}") as answer:
        counters = json.load(answer)
    assert isinstance(counters, list)
    return counters
