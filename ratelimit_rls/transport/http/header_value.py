"""Text of headers of the HTTP ports."""

from __future__ import annotations

MAX_LENGTH = 512


def header_value(text: str) -> str:
    """Return the text as one line of printable ASCII of limited length, safe as an HTTP header value."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    if len(line) > MAX_LENGTH:
        line = line[: MAX_LENGTH - 3] + "..."
    return line.encode("ascii", "replace").decode()
