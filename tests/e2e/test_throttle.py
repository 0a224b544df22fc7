"""`action: throttle` behind a real Envoy: a burst leaves as an even stream, and Envoy's own deadline is respected."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

from tests.client import Http
from tests.servers import SANDBOXES, EnvoyServer, Service, Upstream

pytestmark = pytest.mark.e2e

BURST = 50

# The bucket holds one: whoever is second waits.
RULES = """\
domain: edge
descriptors:
  - key: path
    value: /even
    rate_limit: {unit: second, requests_per_unit: 100, algorithm: leaky_bucket, burst: 1}
    action: throttle
    max_delay: 1s
  - key: path
    value: /slow
    rate_limit: {unit: minute, requests_per_unit: 6, algorithm: leaky_bucket, burst: 1}
    action: throttle
    max_delay: 1m
"""


class Arrival(NamedTuple):
    at_s: float
    status: int


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "throttle.yaml"
    path.write_text(RULES)
    return path


def envoy(service: Service, upstream: Upstream, timeout: str) -> EnvoyServer:
    """Where a call that is not answered in time is a 500, so that it is seen."""
    where = {8000: upstream.port, 8081: service.grpc_port}
    values = {"timeout": timeout, "failure_mode_deny": True}
    return EnvoyServer(SANDBOXES / "rls-http" / "envoy.yaml", where, values)


def burst(url: str, path: str) -> list[Arrival]:
    """Requests that are sent at one moment, each on a connection of its own; their answers in the order they came."""
    ready = threading.Barrier(BURST)

    def ask() -> Arrival:
        with Http(url) as client:
            client.get("/warm")
            ready.wait(20)
            status = client.get(path).status
            return Arrival(time.monotonic(), status)

    with ThreadPoolExecutor(BURST) as threads:
        return sorted(future.result() for future in [threads.submit(ask) for _ in range(BURST)])


def test_a_burst_leaves_as_an_even_stream(upstream: Upstream, rules: Path, transport: str) -> None:
    with (
        Service({"RLS_RULES": rules, "RLS_TRANSPORT": transport}) as service,
        envoy(service, upstream, timeout="5s") as proxy,
    ):
        arrivals = burst(proxy.url, "/even")

    assert [arrival.status for arrival in arrivals] == [200] * BURST
    gaps_s = [after.at_s - before.at_s for before, after in pairwise(arrivals)]
    span_s = arrivals[-1].at_s - arrivals[0].at_s
    print(f"{transport}: {BURST} answers in {span_s:.3f} s, {1000 * median(gaps_s):.1f} ms apart (median)")
    assert span_s >= 0.45  # 49 slots of 10 ms, and the first may have been late
    assert 0.005 < median(gaps_s) < 0.020


def test_what_would_wait_longer_than_envoy_does_is_refused_at_once(
    upstream: Upstream, rules: Path, transport: str
) -> None:
    with (
        Service({"RLS_RULES": rules, "RLS_TRANSPORT": transport}) as service,
        envoy(service, upstream, timeout="0.02s") as proxy,
        Http(proxy.url) as client,
    ):
        client.get("/warm")
        statuses = [client.get("/slow").status for _ in range(21)]

    # Held, all but the first would be 500. A busy machine may miss 20 ms now and then by itself.
    assert statuses.count(429) >= 15
    assert statuses.count(200) <= 1
