"""Requests and rules of the benchmark: 1, 2 or 5 descriptors, each with its own rule.

Limits are so high that nothing is denied, except in scenarios that measure denials.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from bench import wire

DOMAIN = "bench"
SUBDIRECTORY = "ratelimit"
LIMITED_BY = ("user", "route", "device", "plan", "region")
MANY_KEYS = 100_000
TENANTS = 100
MIXED_VALUES = 60
"""Known values of each descriptor of mixed requests."""

_SCRAMBLE = 2_654_435_761
_FILLER = "abcdefghijklmnopqrst.0123456789"


PLENTY = 1_000_000_000
RULES_IN_A_FILE = 10_000
MAX_LOG_LENGTH = 10_000
"""Maximum limit of a sliding log; with many callers none reaches it."""


BUCKET_AND_DAY = (
    "limits: [{unit: minute, requests_per_unit: 10, algorithm: token_bucket, burst: 10000},"
    " {unit: day, requests_per_unit: 1000000, calendar: true}]"
)
"""A rate and a daily quota on one descriptor, as in descriptors/limits.yaml. The bucket is so slow that it is not full
again when its caller's next call comes, since a full one has no state, and so large that it is never empty."""


@dataclass(frozen=True, slots=True)
class RuleSet:
    """Rules of a scenario; the defaults are compatible with envoyproxy/ratelimit."""

    algorithm: str = ""  # algorithm of every limit; empty: fixed window
    charge: str = ""  # `charge` of the rules; empty: the default, which includes denied calls
    limit: int = PLENTY  # calls per hour of every limit
    others: int = 0  # additional rules that do not match
    hits_before: int = 0  # hits in every sliding log before it is measured
    lease: str = ""  # duration of leases
    daily: bool = False  # BUCKET_AND_DAY instead
    shard_by: str = ""  # what shares a slot on a cluster: `domain`, or the key of an entry; empty: a descriptor

    @property
    def name(self) -> str:
        """Differences from the default; part of the scenario's name."""
        parts = [self.algorithm, self.charge, "leased" if self.lease else "", "denied" if self.limit == 1 else ""]
        parts += ["and-day" if self.daily else "", f"by-{self.shard_by}" if self.shard_by else ""]
        parts += [f"{self.others}-rules" if self.others else "", f"{self.hits_before}-hits" if self.hits_before else ""]
        return "-".join(part for part in parts if part)


def requests(descriptors: int, keys: int, first: int = 0) -> list[bytes]:
    """Return DATA frames of `keys` different requests; no two share a counter, so each uses `descriptors` keys."""
    return [wire.data(request(number, descriptors)) for number in range(first, first + keys)]


def request(number: int, descriptors: int) -> bytes:
    """Return the RateLimitRequest of one caller: (tenant, user), (tenant, route) and so on."""
    tenant = ("tenant", f"tenant-{number % TENANTS:02}")
    return wire.rate_limit_request(DOMAIN, [(tenant, (key, f"{key}-{number:06}")) for key in LIMITED_BY[:descriptors]])


def cold(numbers: Iterator[int], descriptors: int) -> Iterator[bytes]:
    """Yield a DATA frame for each number, with values that no other has: none has been seen before."""
    for number in numbers:
        tenant = ("tenant", f"tenant-{number % TENANTS:02}")
        values = ((key, varied_text(number + index)) for index, key in enumerate(LIMITED_BY[:descriptors]))
        yield wire.data(wire.rate_limit_request(DOMAIN, [(tenant, value) for value in values]))


def mixed(seed: int, descriptors: int) -> Iterator[bytes]:
    """Yield DATA frames whose descriptors are all known, in combinations that have hardly ever been seen before."""
    tenant = ("tenant", "tenant-00")
    known = [
        [wire.descriptor((tenant, (key, varied_text(number * 7 + index)))) for number in range(MIXED_VALUES)]
        for index, key in enumerate(LIMITED_BY[:descriptors])
    ]
    random = Random(seed)
    while True:
        yield wire.data(wire.encoded_request(DOMAIN, map(random.choice, known)))


def varied_text(number: int) -> str:
    """Return a text that no other number has; lengths vary by 30 characters and do not follow the number."""
    return f"{number:x}-{_FILLER[: (number * _SCRAMBLE & 0xFFFFFFFF) * len(_FILLER) >> 32]}"


DEFAULT_RULES = RuleSet()


def write_rules(root: Path, rules: RuleSet = DEFAULT_RULES) -> None:
    """Write the rules to the path that envoyproxy/ratelimit derives from RUNTIME_ROOT and RUNTIME_SUBDIRECTORY."""
    config = root / SUBDIRECTORY / "config"
    config.mkdir(parents=True, exist_ok=True)
    beside = min(rules.others, RULES_IN_A_FILE)
    (config / "bench.yaml").write_text("\n".join(_lines(DOMAIN, rules, beside)) + "\n")
    for number, first in enumerate(range(beside, rules.others, RULES_IN_A_FILE)):
        lines = _lines(f"other-{number}", rules, min(RULES_IN_A_FILE, rules.others - first))
        (config / f"other-{number}.yaml").write_text("\n".join(lines) + "\n")


def _lines(domain: str, rules: RuleSet, others: int) -> Iterator[str]:
    algorithm = f", algorithm: {rules.algorithm}" if rules.algorithm else ""
    limit = f"rate_limit: {{unit: hour, requests_per_unit: {rules.limit}{algorithm}}}"
    if rules.daily:
        limit = BUCKET_AND_DAY
    terms = [limit, *([f"charge: {rules.charge}"] if rules.charge else [])]
    terms += [f"hot: {{lease: {rules.lease}}}"] if rules.lease else []
    yield f"domain: {domain}"
    if rules.shard_by:
        yield "shard_by: domain" if rules.shard_by == "domain" else f"shard_by: {{key: {rules.shard_by}}}"
    yield from ("descriptors:", "  - key: tenant", "    descriptors:")
    for key in LIMITED_BY:
        yield f"      - {{key: {key}, {', '.join(terms)}}}"
        # Each is a separate rule on the level of the matching rules.
        for number in range(others // len(LIMITED_BY)):
            yield f"      - {{key: {key}, value: other-{number:06}, {limit}}}"
