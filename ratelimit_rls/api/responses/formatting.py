"""Names of limits and windows, and timestamps, in headers and bodies.

They contain only texts of the rules, never values of a request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

from ratelimit_rls.core.model import Limit, Reading, Rule

MAX_SECONDS = 10**15 - 1
"""Largest number of seconds that is sent: an integer in a Structured Field has at most fifteen digits."""

_MAX_TIMESTAMP_S = int(datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp())
"""Last timestamp that RFC 3339 can express. A huge debt of a yearly limit lasts longer."""

_MAX_UINT32 = 2**32 - 1
"""uint32, as in Envoy's API."""


def seconds(us: int) -> int:
    """Convert to whole seconds, rounded up: a caller that retries a moment too early would be denied again."""
    return min(-(-us // 1_000_000), MAX_SECONDS)


def timestamp(us: int) -> str:
    """Format a time as an RFC 3339 timestamp in UTC, rounded up to whole seconds."""
    return datetime.fromtimestamp(min(-(-us // 1_000_000), _MAX_TIMESTAMP_S), UTC).isoformat()[:-6] + "Z"


def remaining(reading: Reading) -> int:
    return min(max(0, reading.left), _MAX_UINT32)


def until_us(reading: Reading) -> int:
    """Return the time until a denying limit would allow the call, or until an allowing one has fully recovered.

    For a call that can never pass, it is the time until the limit has fully recovered, as in Envoy's
    duration_until_reset (core/decision.py).
    """
    return reading.retry_us if reading.retry_us > 0 else reading.reset_us


def used(limit: Limit, reading: Reading) -> int:
    return max(0, (limit.burst or limit.requests_per_unit) - reading.left)


def window(limit: Limit) -> str:
    """Return the name of the window: `minute`, `5 minutes`, `month`."""
    unit = limit.unit.name.lower()
    return unit if limit.unit_multiplier == 1 else f"{limit.unit_multiplier} {unit}s"


def rule_path(domain: str, rule: Rule) -> str:
    """Return the path of a rule. The path of a limit that came with the request contains values, so it is replaced."""
    return rule.path if rule.position is not None else f"{domain}.(request)"


def window_labels(limits: Sequence[Limit]) -> tuple[str, ...]:
    """Return the suffixes of header names for the limits of a descriptor: `Minute`, `5-Minutes`, `Month`.

    Two limits with the same window are distinguished by their algorithms, `Minute-Token-Bucket`, and if these are
    equal, too, by the time zone of their calendar, `Month-Fixed-Window-Europe-Berlin`.
    """
    choices = []
    for limit in limits:
        short = _header_label(window(limit))
        longer = f"{short}-{_header_label(limit.algorithm.value)}"
        choices.append((short, longer, f"{longer}-{_header_label(limit.timezone)}" if limit.timezone else longer))
    return unique_names(choices, "-")


def limit_names(limits: Sequence[tuple[str, Limit]]) -> tuple[str, ...]:
    """Return the name of each (path, limit) of a call in RateLimit and RateLimit-Policy: unique, printable ASCII.

    It is the name in the rules, otherwise `edge.user:minute`. Equal names get more parts, and finally a number, because
    a call can match one rule twice.
    """
    choices = []
    for path, limit in limits:
        short = f"{path}:{window(limit).replace(' ', '-')}"
        longer = f"{short}:{limit.algorithm.value}"
        named = (limit.name, f"{path}:{limit.name}") if limit.name else ()
        full = (*named, short, longer, f"{longer}:{limit.timezone}" if limit.timezone else longer)
        choices.append(tuple(map(printable, full)))
    return unique_names(choices, "#")


def unique_names(choices: Sequence[tuple[str, ...]], mark: str) -> tuple[str, ...]:
    """Return the first unique choice of each item; if it has none, its first choice with a number."""
    wanted = Counter(choice for own in choices for choice in set(own))
    numbers: Counter[str] = Counter()
    taken: list[str] = []
    for own in choices:
        name = next((choice for choice in own if wanted[choice] == 1), "")
        while not name:
            numbers[own[0]] += 1
            number = numbers[own[0]]
            name = own[0] if number == 1 else f"{own[0]}{mark}{number}"
            if number > 1 and name in wanted:
                name = ""
        taken.append(name)
    return tuple(taken)


def printable(text: str) -> str:
    """Percent-encode everything but printable ASCII, for use in a header value."""
    if text.isascii() and text.isprintable():
        return text
    return "".join([char if char.isascii() and char.isprintable() else _percent(char) for char in text])


def visible(text: str) -> str:
    """Percent-encode everything but printable ASCII without spaces."""
    return printable(text).replace(" ", "%20")


def _percent(char: str) -> str:
    return "".join([f"%{byte:02X}" for byte in char.encode(errors="replace")])


def _header_label(words: str) -> str:
    """Join words with hyphens and capitalise each, as part of a header name."""
    parts = "".join([char if char.isascii() and char.isalnum() else " " for char in words]).split()
    return "-".join([part[0].upper() + part[1:] for part in parts])
