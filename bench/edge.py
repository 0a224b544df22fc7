"""Traffic of an edge: four descriptors per call, nested rules, values of many lengths, and a million users.

Users differ in activity like those of most services: the rates of their calls have a Pareto distribution, so that a
fifth of them make three quarters of the calls, and most call rarely. Whole requests are hardly ever repeated, since
paths and addresses vary, too. envoyproxy/ratelimit accepts the rules, unless they are those of a database.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

from bench import wire
from bench.workload import PLENTY, SUBDIRECTORY, varied_text

DOMAIN = "edge"
DESCRIPTORS = 4
USERS, PATHS, USERS_PER_ORGANISATION = 1_000_000, 5_000, 200
KNOWN_USERS = 10_000
"""Users in the database, if there is one: the most active ones, who make almost half of the calls."""

METHODS = ("GET",) * 16 + ("POST",) * 2 + ("PUT", "DELETE")

_PARETO_SHAPE = 1.16
"""Shape of the 80/20 rule. The rate of the user of rank r is proportional to (r + _HEAD) ** (-1 / shape)."""

_HEAD = 10
"""Flattens the start of the distribution: the most active user makes 0.3 % of the calls instead of 2 %."""

_EXPONENT = 1 - 1 / _PARETO_SHAPE


def write_rules(root: Path, *, of_database: bool) -> None:
    """Write the rules. With `of_database`, users in the database have their own limits."""
    config = root / SUBDIRECTORY / "config"
    config.mkdir(parents=True, exist_ok=True)
    minute, hour = (f"rate_limit: {{unit: {unit}, requests_per_unit: {PLENTY}}}" for unit in ("minute", "hour"))
    limits_of = "limits_of: user, " if of_database else ""
    lines = [f"domain: {DOMAIN}", "descriptors:"]
    for plan, limit in (("free", minute), ("pro", hour)):
        lines += [f"  - key: plan\n    value: {plan}\n    descriptors: [{{key: user, {limits_of}{limit}}}]"]
    for value in ("    value: /v1/*\n", ""):
        lines += [f"  - key: path\n{value}    descriptors: [{{key: method, {minute}}}]"]
    lines += [f"  - {{key: remote_address, {minute}}}"]
    lines += [f"  - key: org\n    descriptors: [{{key: user, {hour}}}]"]
    (config / f"{DOMAIN}.yaml").write_text("\n".join(lines) + "\n")


def calls(seed: int) -> Iterator[bytes]:
    """Yield DATA frames without end. Equal seeds yield equal calls."""
    random = Random(seed)
    while True:
        user, path = drawn_rank(random.random(), USERS), drawn_rank(random.random(), PATHS)
        yield wire.data(request(user, path, METHODS[random.randrange(len(METHODS))], random.randrange(4)))


def request(user: int, path: int, method: str, place: int) -> bytes:
    """Return the RateLimitRequest of the user of this rank, from one of several places."""
    name = user_name(user)
    address = user * 7 + place * place  # most calls of a user come from few addresses
    return wire.rate_limit_request(
        DOMAIN,
        (
            (("plan", "free" if user % 10 else "pro"), ("user", name)),
            (("path", path_name(path)), ("method", method)),
            (("remote_address", f"{10 + (address >> 24)}.{address >> 16 & 255}.{address >> 8 & 255}.{address & 255}"),),
            (("org", varied_text(user // USERS_PER_ORGANISATION)), ("user", name)),
        ),
    )


def user_name(rank: int) -> str:
    return varied_text(rank)


def path_name(number: int) -> str:
    """Return one of many paths, half of which match the wildcard /v1/*."""
    return f"/{'v1' if number % 2 else 'assets'}/{varied_text(number)}"


def drawn_rank(uniform: float, count: int) -> int:
    """Return the rank, from 0, of a user that is drawn by a uniformly distributed number from 0 to 1."""
    first, last = _HEAD**_EXPONENT, (count + _HEAD) ** _EXPONENT
    return min(count - 1, int((first + uniform * (last - first)) ** (1 / _EXPONENT) - _HEAD))
