"""`python -m bench.series_soak`: metrics after a million different descriptor values.

The rule has `detailed_metric`, every call has new values, and every tenth call an unknown domain and a limit in the
request. The scrape and the memory must stop growing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
from prometheus_client.parser import text_string_to_metric_families

from bench.cpu import resident_bytes
from ratelimit_rls.protos.messages import SHOULD_RATE_LIMIT, RateLimitRequest
from ratelimit_rls.telemetry.metrics import MAX_PATHS
from tests.support.grpc_client import get
from tests.support.ports import free_port
from tests.support.servers import Service

VALUES = 1_000_000
PER_CALL = 250
HOUR = 3

RULES = """\
domain: edge
descriptors:
  - {key: path, detailed_metric: true, rate_limit: {unit: minute, requests_per_unit: 5}}
"""


class Scrape(NamedTuple):
    after: int  # values
    max_samples: int  # of one metric
    samples: int
    hits: float
    seconds: float
    resident_bytes: int


def soak(values: int, steps: int = 10) -> Iterator[Scrape]:
    """Yield a scrape after every tenth of the values."""
    with tempfile.TemporaryDirectory() as directory:
        rules = Path(directory, "rules.yaml")
        rules.write_text(RULES)
        port = free_port()
        variables = {"RLS_RULES": rules, "USE_PROMETHEUS": "true", "PROMETHEUS_ADDR": f"127.0.0.1:{port}"}
        with Service(variables) as service, grpc.insecure_channel(service.grpc_address) as channel:
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(SHOULD_RATE_LIMIT)
            for step in range(steps):
                for first in range(values * step // steps, values * (step + 1) // steps, PER_CALL):
                    for message in _messages(first):
                        call(message, timeout=30)
                yield _scrape(port, values * (step + 1) // steps, service.pid)


def _messages(first: int) -> Iterator[bytes]:
    request = RateLimitRequest(domain="edge")
    for number in range(first, first + PER_CALL):
        request.descriptors.add().entries.add(key="path", value=f"/{number}")
    yield request.SerializeToString()
    if first % (10 * PER_CALL) == 0:
        yield RateLimitRequest(domain=f"nowhere-{first}", descriptors=request.descriptors[:1]).SerializeToString()
        own = RateLimitRequest(domain="edge", descriptors=request.descriptors[:1])
        own.descriptors[0].limit.requests_per_unit = first + 1
        own.descriptors[0].limit.unit = HOUR
        yield own.SerializeToString()


def _scrape(port: int, after: int, pid: int) -> Scrape:
    begun_s = time.monotonic()
    text = get(f"http://127.0.0.1:{port}", "/metrics").body
    seconds = time.monotonic() - begun_s
    families = list(text_string_to_metric_families(text))
    hits = sum(
        sample.value
        for family in families
        if family.name == "ratelimit_service_rate_limit_total_hits"
        for sample in family.samples
    )
    counts = [len(family.samples) for family in families]
    return Scrape(after, max(counts), sum(counts), hits, seconds, resident_bytes(pid))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--values", type=int, default=VALUES)
    scrapes = []
    for scrape in soak(parser.parse_args().values):
        scrapes.append(scrape)
        print(
            f"{scrape.after:>9,} values: {scrape.samples:,} samples, {scrape.max_samples:,} of one metric at most, "
            f"scraped in {scrape.seconds:.2f} s, {scrape.resident_bytes / 2**20:.0f} MiB",
            flush=True,
        )
    last = scrapes[-1]
    bounded = last.max_samples <= MAX_PATHS + 2 and last.hits >= last.after
    print("bounded, and no hit is missing" if bounded else "NOT bounded, or hits are missing")
    return 0 if bounded else 1


if __name__ == "__main__":
    sys.exit(main())
