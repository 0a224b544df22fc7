"""Parts of error messages that quote a file and suggest what was meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from ratelimit_rls.errors import one_line


def unknown_key(key: str, here: Iterable[str], elsewhere: Iterable[str] = ()) -> str:
    """Format the message for an unknown key. `here` are the keys of this mapping, `elsewhere` those of others."""
    here = tuple(here)
    hint = did_you_mean(key, here) or did_you_mean(key, elsewhere)
    if here and not hint:
        hint = f"; allowed here: {', '.join(here)}"
    return f"config error, unknown key '{cut(key)}'{hint}"


def did_you_mean(value: str, known: Iterable[str]) -> str:
    close = get_close_matches(value[:60], list(known), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def cut(text: str) -> str:
    """Return a quotable excerpt of a file's text: at most 60 characters, on one line."""
    return one_line(text if len(text) <= 60 else text[:57] + "...")
