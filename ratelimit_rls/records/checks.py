"""What no database takes, or not all of them: refused here with a sentence, and alike everywhere."""

from __future__ import annotations

from ratelimit_rls.core.accounts import LONGEST_ID
from ratelimit_rls.errors import BadRequest
from ratelimit_rls.records.types import LAST_S

LONGEST_TEXT = 10_000
"""Characters of a reason or a description."""

LONGEST_DOCUMENT = 16 * 2**20
"""Characters of a stored rule: no file of rules may have more bytes (rules/load.py), so that each can be stored."""

_INT_32 = range(-(2**31), 2**31)


def check_name(text: str, what: str, *, may_be_empty: bool = False) -> None:
    """One line, so that it can stand in a log, a page or a message."""
    if not text and not may_be_empty:
        raise BadRequest(f"{what} must not be empty")
    if len(text) > LONGEST_ID:
        raise BadRequest(f"{what} has {len(text)} characters; {LONGEST_ID} are the most")
    if not text.isprintable():
        raise BadRequest(f"{what} has a character that cannot be printed; letters, digits, spaces and signs are right")


def check_text(text: str, what: str, longest: int = LONGEST_TEXT) -> None:
    if len(text) > longest:
        raise BadRequest(f"{what} has {len(text)} characters; {longest} are the most")
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise BadRequest(f"{what} has a character that cannot be stored: a NUL, or half of a surrogate pair")


def check_moment(moment_s: float | None, what: str) -> None:
    if moment_s is not None and not 0 <= moment_s < LAST_S:  # NaN is not either
        raise BadRequest(f"{what} must be a moment between 1970 and 9999")


def check_number(number: int, what: str) -> None:
    if number not in _INT_32:
        raise BadRequest(f"{what} must be between {_INT_32.start} and {_INT_32.stop - 1}")
