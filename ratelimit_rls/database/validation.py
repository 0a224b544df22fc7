"""Checks of values that one of the databases would reject, with the same errors on both."""

from __future__ import annotations

from ratelimit_rls.core.names import MAX_ID_LENGTH, name_error
from ratelimit_rls.database.column_types import MAX_TIMESTAMP_S
from ratelimit_rls.errors import BadRequest

MAX_TEXT_LENGTH = 10_000
"""Characters of a reason or a description."""

MAX_DOCUMENT_LENGTH = 16 * 2**20
"""Characters of a stored rule: no file of rules may have more bytes (rules/source_document.py), so that each can be
stored."""

_INT_32 = range(-(2**31), 2**31)


def check_name(text: str, what: str, *, may_be_empty: bool = False) -> None:
    """Raise BadRequest unless `text` is a name: one printable line, usable in logs, pages and messages."""
    if not text and not may_be_empty:
        raise BadRequest(f"{what} must not be empty")
    if len(text) > MAX_ID_LENGTH:
        raise BadRequest(f"{what} has {len(text)} characters; it must have at most {MAX_ID_LENGTH}")
    if not text.isprintable():
        raise BadRequest(f"{what} has an unprintable character; use letters, digits, spaces and punctuation")


def check_caller_name(text: str, what: str, *, may_be_empty: bool = False) -> None:
    """Raise BadRequest unless `text` can name a user, tier or organisation: headers carry it (core/names.py)."""
    error = name_error(text) if text or not may_be_empty else None
    if error is not None:
        raise BadRequest(f"{what} {error}")


def check_text(text: str, what: str, max_length: int = MAX_TEXT_LENGTH) -> None:
    if len(text) > max_length:
        raise BadRequest(f"{what} has {len(text)} characters; it must have at most {max_length}")
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise BadRequest(f"{what} must not contain a NUL or a lone surrogate")


def check_timestamp(at_s: float | None, what: str) -> None:
    if at_s is not None and not 0 <= at_s < MAX_TIMESTAMP_S:  # also excludes NaN
        raise BadRequest(f"{what} must be a timestamp between 1970 and 9999")


def check_number(number: int, what: str) -> None:
    if number not in _INT_32:
        raise BadRequest(f"{what} must be between {_INT_32.start} and {_INT_32.stop - 1}")
