"""Moments as JSON has them: RFC 3339, told in UTC. Inside they are seconds since the epoch."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

from ratelimit_rls.transport.http.admin.spans import PATTERN, span_s

_RFC_3339 = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2}[Tt][0-9]{2}:[0-9]{2}:[0-9]{2})(\.[0-9]{1,9})?([Zz]|[+-][0-9]{2}:[0-9]{2})"
)
_WRONG = "it is no moment between 1970 and 9999; use e.g. 2030-01-31T12:00:00Z"
_LAST_S = datetime(9999, 1, 1, tzinfo=UTC).timestamp()


def _moment(value: Any) -> float:
    found = _RFC_3339.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(_WRONG)
    fraction = f"{found[2] or '.0':0<7}"[:7]  # Python 3.11 reads six digits, no more and no less
    try:
        at_s = datetime.fromisoformat(f"{found[1]}{fraction}{found[3]}".upper()).timestamp()
    except (ValueError, OverflowError):
        raise ValueError(_WRONG) from None
    if not 0 <= at_s <= _LAST_S:
        raise ValueError(_WRONG)
    return at_s


def _span(value: Any) -> float:
    if not isinstance(value, str):
        raise ValueError("it is no text; a span of time is written as one, e.g. 12h or 90d")
    try:
        return float(span_s(value))
    except ValueError as fault:
        raise ValueError(f"it {fault}") from None


Moment = Annotated[
    float,
    BeforeValidator(_moment),
    WithJsonSchema({"type": "string", "format": "date-time", "examples": ["2030-01-31T12:00:00Z"]}),
]

Span = Annotated[
    float, BeforeValidator(_span), WithJsonSchema({"type": "string", "pattern": PATTERN, "examples": ["12h"]})
]


def moment_text(at_s: float) -> str:
    """To the millisecond, e.g. 2030-01-31T12:00:00Z or 2030-01-31T12:00:00.25Z."""
    at = datetime.fromtimestamp(round(at_s, 3), UTC)
    fraction = f".{at.microsecond // 1000:03}".rstrip("0") if at.microsecond >= 1000 else ""
    return f"{at:%Y-%m-%dT%H:%M:%S}{fraction}Z"


def optional_moment(at_s: float | None) -> str | None:
    return None if at_s is None else moment_text(at_s)
