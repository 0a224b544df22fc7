"""Text that fits where a protocol wants one line."""

from __future__ import annotations

LONGEST = 512


def one_line(text: str) -> str:
    """The text on one bounded line of printable ASCII, safe as the value of an HTTP header."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    if len(line) > LONGEST:
        line = line[: LONGEST - 3] + "..."
    return line.encode("ascii", "replace").decode()
