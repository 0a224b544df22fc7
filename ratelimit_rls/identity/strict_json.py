"""Strict JSON parser for untrusted input.

Parsers disagree about duplicate keys, and NaN and numbers beyond the range of a float are not JSON. All of these raise
a ValueError, whose message never quotes the text.
"""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

MAX_DIGITS = 30
"""Maximum digits of an integer: more than any timestamp or id has."""


def parse(text: bytes) -> Any:
    try:
        return json.loads(
            text.decode(),
            object_pairs_hook=_object,
            parse_int=_whole,
            parse_float=_number,
            parse_constant=_constant,
        )
    except (ValueError, RecursionError):
        raise ValueError("is not JSON, or is ambiguous") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError
    return members


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError
    return int(digits)


def _number(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError
    return number


def _constant(_: str) -> Any:
    raise ValueError
