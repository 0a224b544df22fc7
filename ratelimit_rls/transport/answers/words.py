"""What limits, windows and moments are called in headers and bodies.

Only what the rules say is repeated, never a value that a request brought.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

from ratelimit_rls.core.model import Limit, Reading, Rule

LONGEST_S = 10**15 - 1
"""The largest number of seconds that is told: a Structured Field's integer has fifteen digits."""

_LAST_MOMENT_S = int(datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp())
"""The largest that RFC 3339 can write. A huge debt of a yearly limit lasts longer."""

_MOST_TOLD = 2**32 - 1
"""uint32, as in Envoy's API."""


def seconds(us: int) -> int:
    """Rounded up: who comes back a moment too early is refused again."""
    return min(-(-us // 1_000_000), LONGEST_S)


def moment(us: int) -> str:
    """As RFC 3339 writes it, in UTC, rounded up to whole seconds."""
    return datetime.fromtimestamp(min(-(-us // 1_000_000), _LAST_MOMENT_S), UTC).isoformat()[:-6] + "Z"


def remaining(reading: Reading) -> int:
    return min(max(0, reading.left), _MOST_TOLD)


def until_us(reading: Reading) -> int:
    """Until a limit that refuses would not, or until one that allows is whole again.

    What can never pass is told when the limit is whole again, as in Envoy's duration_until_reset (core/decide.py).
    """
    return reading.retry_us if reading.retry_us > 0 else reading.reset_us


def used(limit: Limit, reading: Reading) -> int:
    return max(0, (limit.burst or limit.requests_per_unit) - reading.left)


def window(limit: Limit) -> str:
    """`minute`, `5 minutes`, `month`."""
    unit = limit.unit.name.lower()
    return unit if limit.unit_multiplier == 1 else f"{limit.unit_multiplier} {unit}s"


def rule_path(domain: str, rule: Rule) -> str:
    """The path the rules give it. A limit that came with the request has a path made of its values: it is not told."""
    return rule.path if rule.position is not None else f"{domain}.(request)"


def window_labels(limits: Sequence[Limit]) -> tuple[str, ...]:
    """`Minute`, `5-Minutes`, `Month`: how the headers of each of a descriptor's limits end.

    Two limits of one window are told apart by their algorithms, `Minute-Token-Bucket`, and where these are the same,
    too, by the place of their calendar, `Month-Fixed-Window-Europe-Berlin`.
    """
    choices = []
    for limit in limits:
        short = _label(window(limit))
        longer = f"{short}-{_label(limit.algorithm.value)}"
        choices.append((short, longer, f"{longer}-{_label(limit.timezone)}" if limit.timezone else longer))
    return distinct(choices, "-")


def limit_names(limits: Sequence[tuple[str, Limit]]) -> tuple[str, ...]:
    """What each (path, limit) of a call is called in RateLimit and RateLimit-Policy: printable ASCII, no two the same.

    The name that the rules give it, else `edge.user:minute`. If another has the same, more is said, and at last a
    number: one rule can be met twice in a call.
    """
    choices = []
    for path, limit in limits:
        short = f"{path}:{window(limit).replace(' ', '-')}"
        longer = f"{short}:{limit.algorithm.value}"
        named = (limit.name, f"{path}:{limit.name}") if limit.name else ()
        full = (*named, short, longer, f"{longer}:{limit.timezone}" if limit.timezone else longer)
        choices.append(tuple(map(printable, full)))
    return distinct(choices, "#")


def distinct(choices: Sequence[tuple[str, ...]], mark: str) -> tuple[str, ...]:
    """Of each one's choices the first that is nobody else's; where there is none, its first one with a number."""
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
    """Printable ASCII, as a header's value may hold; everything else is percent-encoded."""
    if text.isascii() and text.isprintable():
        return text
    return "".join([char if char.isascii() and char.isprintable() else _percent(char) for char in text])


def visible(text: str) -> str:
    """The same without spaces, so that it is one word."""
    return printable(text).replace(" ", "%20")


def _percent(char: str) -> str:
    return "".join([f"%{byte:02X}" for byte in char.encode(errors="replace")])


def _label(words: str) -> str:
    """Words joined with hyphens, each with a capital: part of a header's name."""
    parts = "".join([char if char.isascii() and char.isalnum() else " " for char in words]).split()
    return "-".join([part[0].upper() + part[1:] for part in parts])
