"""JSON from strangers: one meaning or none.

A key that is written twice means one thing to one reader and another to the next; NaN and numbers beyond what a float
holds are no JSON at all. All of it is refused, with a ValueError that repeats nothing of the text.
"""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

MOST_DIGITS = 30
"""Of a whole number: no moment and no id is longer."""


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
        raise ValueError("is not JSON, or not of one meaning") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError
    return found


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError
    return int(digits)


def _number(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError
    return number


def _constant(_: str) -> Any:
    raise ValueError
