"""Parsers of variables, with the syntax of envoyproxy/ratelimit: Go's booleans, integers, floats and durations,
comma-separated lists, and key:value maps.

A value that is not text (a default, or one set by a test) is returned unchanged. Every parser raises ValueError with
the second half of a sentence; the first half, the variable and its value, is added by the caller. No parser quotes the
value, since it may be a secret.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated

from pydantic import BeforeValidator, Field, JsonValue

from ratelimit_rls.core.duration import format_duration_us, parse_duration_us

UNSET = "unset"
"""Key of `json_schema_extra` for what applies if a setting is not set (`applies_unset`)."""

_DAY = timedelta(days=1)

_TRUE = frozenset({"1", "t", "T", "TRUE", "true", "True"})
_FALSE = frozenset({"0", "f", "F", "FALSE", "false", "False"})

# "017" is octal in Go and an error in Python, hence a separate alternative.
_WHOLE = re.compile(r"([+-]?)(?:0([0-7_]+)|(0[xX][0-9a-fA-F_]+|0[oO][0-7_]+|0[bB][01_]+|[1-9][0-9_]*|0))")
_MODE = re.compile(r"0?[0-7]{3}")
_FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def parse_bool(text: object) -> object:
    if not isinstance(text, str):
        return text
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise ValueError("is not a boolean; use true or false")


def parse_int(text: object) -> object:
    if not isinstance(text, str):
        return text
    found = _WHOLE.fullmatch(text)
    try:
        if found is None:
            raise ValueError
        sign, octal, other = found.groups()
        number = int(octal, 8) if octal else int(other, 0)
    except ValueError:
        raise ValueError("is not a whole number; use digits such as 8081") from None
    return -number if sign == "-" else number


def parse_float(text: object) -> object:
    if not isinstance(text, str):
        return text
    if _FLOAT.fullmatch(text):
        return float(text)
    raise ValueError("is not a number; use digits such as 0.8")


def parse_file_mode(text: object) -> object:
    if not isinstance(text, str) or not text or _MODE.fullmatch(text):
        return text
    raise ValueError("is not a file's mode; use octal digits such as 0660")


def parse_duration(text: object) -> object:
    """Return a timedelta, rounded up to a whole microsecond."""
    if not isinstance(text, str):
        return text
    return timedelta(microseconds=parse_duration_us(text))


def parse_list(text: object) -> object:
    if not isinstance(text, str):
        return text
    return tuple(text.split(",")) if text.strip() else ()


def parse_map(text: object) -> object:
    if not isinstance(text, str):
        return text
    pairs = [pair.split(":") for pair in text.split(",")] if text.strip() else []
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError("is not a map; use key:value,key:value, with no other colons")
    return dict(pairs)


def format_duration(value: timedelta) -> str:
    """Return the shortest exact text that parses back to the same duration, in one unit; two days and more in days."""
    if value > _DAY and not value % _DAY:
        return f"{value // _DAY}d"
    return format_duration_us(value // timedelta(microseconds=1))


def applies_unset(meaning: str) -> dict[str, JsonValue]:
    """Return the `json_schema_extra` of a setting that, if it is not set, has another effect than with its default."""
    return {UNSET: meaning}


FileMode = Annotated[str, BeforeValidator(parse_file_mode)]
Bool = Annotated[bool, BeforeValidator(parse_bool)]
Int = Annotated[int, BeforeValidator(parse_int)]
Count = Annotated[int, Field(ge=0), BeforeValidator(parse_int)]
Positive = Annotated[int, Field(ge=1), BeforeValidator(parse_int)]
Port = Annotated[int, Field(ge=0, le=65_535), BeforeValidator(parse_int)]
Float = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(parse_float)]
Duration = Annotated[timedelta, Field(ge=timedelta()), BeforeValidator(parse_duration)]
TextList = Annotated[tuple[str, ...], BeforeValidator(parse_list)]
TextMap = Annotated[dict[str, str], BeforeValidator(parse_map)]
