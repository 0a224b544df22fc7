"""`action: throttle` behind a real Envoy: a burst is smoothed, and Envoy's deadline is respected."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.grpc_client import Http
from tests.support.servers import SANDBOXES, EnvoyServer, Service, Upstream

pytestmark = pytest.mark.e2e

BURST = 50
SLOT_S = 0.01
CLOCKS_DIFFER_S = 0.002

# The bucket holds one: the second request waits.
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
    """Envoy in which a late call becomes a 500, so that it is detected."""
    where = {8000: upstream.port, 8081: service.grpc_port}
    values = {"timeout": timeout, "failure_mode_deny": True}
    return EnvoyServer(SANDBOXES / "rls-http" / "envoy.yaml", where, values)


def burst(url: str, path: str) -> list[Arrival]:
    """Send requests at once, each on its own connection; return the responses in order of arrival.

    Arrivals are measured from when the last client was ready, which is before any of the requests.
    """
    begun_s: list[float] = []
    ready = threading.Barrier(BURST, action=lambda: begun_s.append(time.monotonic()))

    def ask() -> Arrival:
        with Http(url) as client:
            client.get("/warm")
            ready.wait(20)
            status = client.get(path).status
            return Arrival(time.monotonic() - begun_s[0], status)

    with ThreadPoolExecutor(BURST) as threads:
        return sorted(future.result() for future in [threads.submit(ask) for _ in range(BURST)])


def test_burst_is_smoothed(upstream: Upstream, rules: Path) -> None:
    with (
        Service({"RLS_RULES": rules}) as service,
        envoy(service, upstream, timeout="5s") as proxy,
    ):
        arrivals = burst(proxy.url, "/even")

    assert [arrival.status for arrival in arrivals] == [200] * BURST
    print(f"{BURST} answers, the last after {arrivals[-1].at_s:.3f} s")
    # No response is sent before its slot. How late one is depends on the machine, within Envoy's timeout.
    early = [number for number, arrival in enumerate(arrivals) if arrival.at_s < number * SLOT_S - CLOCKS_DIFFER_S]
    assert not early, arrivals


def test_wait_beyond_envoys_timeout_is_denied_at_once(upstream: Upstream, rules: Path) -> None:
    with (
        Service({"RLS_RULES": rules}) as service,
        envoy(service, upstream, timeout="0.02s") as proxy,
        Http(proxy.url) as client,
    ):
        client.get("/warm")
        statuses = [client.get("/slow").status for _ in range(21)]

    # If they were delayed, all but the first would be 500. A busy machine may miss 20 ms occasionally.
    assert statuses.count(429) >= 15
    assert statuses.count(200) <= 1
