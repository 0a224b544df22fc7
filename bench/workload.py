"""What is asked and under which rules: requests with 1, 2 or 5 descriptors, each descriptor with a rule of its own.

The limits are so high that nothing is ever refused; what is measured is deciding, not refusing.
"""

from __future__ import annotations

from pathlib import Path

from bench import wire

DOMAIN = "bench"
SUBDIRECTORY = "ratelimit"
LIMITED_BY = ("user", "route", "device", "plan", "region")
MANY_KEYS = 100_000
TENANTS = 100


def requests(descriptors: int, keys: int) -> list[bytes]:
    """DATA frames of `keys` different requests: no two share a counter, so each touches `descriptors` keys."""
    return [wire.data(request(number, descriptors)) for number in range(keys)]


def request(number: int, descriptors: int) -> bytes:
    """The RateLimitRequest of one caller: (tenant, user), (tenant, route) and so on."""
    tenant = ("tenant", f"tenant-{number % TENANTS:02}")
    return wire.rate_limit_request(DOMAIN, [(tenant, (key, f"{key}-{number:06}")) for key in LIMITED_BY[:descriptors]])


def write_rules(root: Path) -> None:
    """Write the rules where RUNTIME_ROOT and RUNTIME_SUBDIRECTORY make the reference look for them."""
    config = root / SUBDIRECTORY / "config"
    config.mkdir(parents=True)
    lines = [f"domain: {DOMAIN}", "descriptors:", "  - key: tenant", "    descriptors:"]
    for key in LIMITED_BY:
        lines += [f"      - key: {key}", "        rate_limit: {unit: hour, requests_per_unit: 1000000000}"]
    (config / "bench.yaml").write_text("\n".join(lines) + "\n")
