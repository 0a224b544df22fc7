"""What is asked and under which rules: requests with 1, 2 or 5 descriptors, each descriptor with a rule of its own.

The limits are so high that nothing is refused, unless that is what is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import wire

DOMAIN = "bench"
SUBDIRECTORY = "ratelimit"
LIMITED_BY = ("user", "route", "device", "plan", "region")
MANY_KEYS = 100_000
TENANTS = 100


PLENTY = 1_000_000_000
RULES_IN_A_FILE = 10_000
LONGEST_LOG = 10_000
"""What a sliding log may remember; callers of whom there are many do not come to that many calls."""


@dataclass(frozen=True, slots=True)
class RuleSet:
    """The rules of a scenario; by default those that the reference can read, too."""

    algorithm: str = ""  # of every limit; empty: a fixed window
    charge: str = ""  # who pays; empty: as the reference has it, refused calls, too
    most: int = PLENTY  # calls an hour, of every limit
    others: int = 0  # rules beside those that are met
    hits_held: int = 0  # of every sliding log, before it is measured
    lease: str = ""  # how long a part of a limit may be kept in the process

    @property
    def name(self) -> str:
        """What tells it from the default; a part of the scenario's name."""
        parts = [self.algorithm, self.charge, "leased" if self.lease else "", "refused" if self.most == 1 else ""]
        parts += [f"{self.others}-rules" if self.others else "", f"{self.hits_held}-hits" if self.hits_held else ""]
        return "-".join(part for part in parts if part)


def requests(descriptors: int, keys: int, first: int = 0) -> list[bytes]:
    """DATA frames of `keys` different requests: no two share a counter, so each touches `descriptors` keys."""
    return [wire.data(request(number, descriptors)) for number in range(first, first + keys)]


def request(number: int, descriptors: int) -> bytes:
    """The RateLimitRequest of one caller: (tenant, user), (tenant, route) and so on."""
    tenant = ("tenant", f"tenant-{number % TENANTS:02}")
    return wire.rate_limit_request(DOMAIN, [(tenant, (key, f"{key}-{number:06}")) for key in LIMITED_BY[:descriptors]])


AS_THE_REFERENCE = RuleSet()


def write_rules(root: Path, rules: RuleSet = AS_THE_REFERENCE) -> None:
    """Write the rules where RUNTIME_ROOT and RUNTIME_SUBDIRECTORY make the reference look for them."""
    config = root / SUBDIRECTORY / "config"
    config.mkdir(parents=True, exist_ok=True)
    beside = min(rules.others, RULES_IN_A_FILE)
    (config / "bench.yaml").write_text("\n".join(_lines(DOMAIN, rules, beside)) + "\n")
    for number, first in enumerate(range(beside, rules.others, RULES_IN_A_FILE)):
        lines = _lines(f"other-{number}", rules, min(RULES_IN_A_FILE, rules.others - first))
        (config / f"other-{number}.yaml").write_text("\n".join(lines) + "\n")


def _lines(domain: str, rules: RuleSet, others: int) -> Iterator[str]:
    algorithm = f", algorithm: {rules.algorithm}" if rules.algorithm else ""
    limit = f"rate_limit: {{unit: hour, requests_per_unit: {rules.most}{algorithm}}}"
    terms = [limit, *([f"charge: {rules.charge}"] if rules.charge else [])]
    terms += [f"hot: {{lease: {rules.lease}}}"] if rules.lease else []
    yield from (f"domain: {domain}", "descriptors:", "  - key: tenant", "    descriptors:")
    for key in LIMITED_BY:
        yield f"      - {{key: {key}, {', '.join(terms)}}}"
        # Each is a rule of its own on the level at which requests look for theirs.
        for number in range(others // len(LIMITED_BY)):
            yield f"      - {{key: {key}, value: other-{number:06}, {limit}}}"
