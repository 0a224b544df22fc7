"""Field types and base classes of request and response bodies, and types of path and query parameters."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from enum import Enum
from typing import Annotated, Any
from urllib.parse import unquote

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from ratelimit_rls.core.duration import PATTERN, parse_lifetime_s
from ratelimit_rls.core.model import Limit
from ratelimit_rls.core.names import MAX_ID_LENGTH
from ratelimit_rls.identity.accounts import limit_fields

MAX_TEXT_LENGTH = 2000
MAX_VALUE_LENGTH = 4096

MAX_UNKNOWN_FIELDS = 20
"""Unknown fields that are reported one by one. A body with more is rejected as a whole."""

NAME_PATTERN = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]+$"
# Names of users, tiers and organisations have no space at either end: HTTP headers lose it (core/names.py).
CALLER_NAME_PATTERN = (
    r"^[^\x00-\x20\x7f-\x9f\u2028\u2029]([^\x00-\x1f\x7f-\x9f\u2028\u2029]*[^\x00-\x20\x7f-\x9f\u2028\u2029])?$"
)
TEXT_PATTERN = r"^[^\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]*$"  # may have several lines
PUBLIC_ID_PATTERN = "^[a-z2-7]{12}$"
RULE_ID_PATTERN = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"

_RFC_3339 = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2}[Tt][0-9]{2}:[0-9]{2}:[0-9]{2})(\.[0-9]{1,9})?([Zz]|[+-][0-9]{2}:[0-9]{2})"
)
_INVALID_TIMESTAMP = "must be an RFC 3339 timestamp between 1970 and 9999, e.g. 2030-01-31T12:00:00Z"
_MAX_TIMESTAMP_S = datetime(9999, 1, 1, tzinfo=UTC).timestamp()


class RequestBody(BaseModel):
    """Base of all request bodies: strict, and without unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _check_field_count(cls, value: Any) -> Any:
        """Bound the number of fields: each unknown one is reported, and a body has room for a hundred thousand."""
        if isinstance(value, dict) and len(value) > len(cls.model_fields) + MAX_UNKNOWN_FIELDS:
            raise ValueError(f"has {len(value)} fields, but only these are allowed: {', '.join(cls.model_fields)}")
        return value


class ResponseBody(BaseModel):
    """Base of all response bodies. They are read from the attributes of values of core and database."""

    model_config = ConfigDict(frozen=True, from_attributes=True, validate_by_name=True)


def check_unicode(value: str) -> str:
    """Reject strings that cannot be encoded: JSON can contain one half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("must be valid Unicode text") from None
    return value


def _percent_decode(value: Any) -> Any:
    """Decode a path parameter: paths are routed percent-encoded (middleware.py)."""
    try:
        return unquote(value, errors="strict")
    except UnicodeDecodeError:
        raise ValueError("must be percent-encoded UTF-8") from None


def _parse_timestamp(value: Any) -> float:
    found = _RFC_3339.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(_INVALID_TIMESTAMP)
    fraction = f"{found[2] or '.0':0<7}"[:7]  # Python 3.11 accepts exactly six digits
    try:
        at_s = datetime.fromisoformat(f"{found[1]}{fraction}{found[3]}".upper()).timestamp()
    except (ValueError, OverflowError):
        raise ValueError(_INVALID_TIMESTAMP) from None
    if not 0 <= at_s <= _MAX_TIMESTAMP_S:
        raise ValueError(_INVALID_TIMESTAMP)
    return at_s


def _format_timestamp(at_s: Any) -> Any:
    """Format seconds since the epoch to the millisecond in UTC, e.g. 2030-01-31T12:00:00.25Z."""
    if not isinstance(at_s, int | float):
        return at_s
    at = datetime.fromtimestamp(round(at_s, 3), UTC)
    fraction = f".{at.microsecond // 1000:03}".rstrip("0") if at.microsecond >= 1000 else ""
    return f"{at:%Y-%m-%dT%H:%M:%S}{fraction}Z"


def _parse_duration(value: Any) -> float:
    if not isinstance(value, str):
        raise ValueError("must be a duration as text, e.g. 12h or 90d")
    return parse_lifetime_s(value)


def _parse_bool(value: Any) -> Any:
    """Accept only `true` and `false`, not the dozen other spellings that pydantic accepts."""
    if isinstance(value, str):
        if value not in ("true", "false"):
            raise ValueError("must be true or false")
        return value == "true"
    return value


def _enum_value(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _limit_fields(value: Any) -> Any:
    return limit_fields(value) if isinstance(value, Limit) else value


Name = Annotated[
    str, Field(min_length=1, max_length=MAX_ID_LENGTH, pattern=NAME_PATTERN), AfterValidator(check_unicode)
]
"""Name of a rule or a token, or a search term."""

CallerName = Annotated[
    str, Field(min_length=1, max_length=MAX_ID_LENGTH, pattern=CALLER_NAME_PATTERN), AfterValidator(check_unicode)
]
"""Name of a user or a tier."""

OptionalName = Annotated[
    str, Field(max_length=MAX_ID_LENGTH, pattern=NAME_PATTERN.replace("+$", "*$")), AfterValidator(check_unicode)
]
OptionalCallerName = Annotated[
    str, Field(max_length=MAX_ID_LENGTH, pattern=rf"^$|{CALLER_NAME_PATTERN}"), AfterValidator(check_unicode)
]
Text = Annotated[str, Field(max_length=MAX_TEXT_LENGTH, pattern=TEXT_PATTERN), AfterValidator(check_unicode)]

SearchText = Annotated[
    str, Field(min_length=1, max_length=MAX_VALUE_LENGTH, pattern=r"^[^\x00]+$"), AfterValidator(check_unicode)
]
"""Search term for the database. No NUL: PostgreSQL does not accept it."""

UserId = Annotated[Name, BeforeValidator(_percent_decode)]
TierName = Annotated[Name, BeforeValidator(_percent_decode)]
RuleId = Annotated[str, BeforeValidator(_percent_decode), Field(pattern=RULE_ID_PATTERN)]
PublicId = Annotated[str, BeforeValidator(_percent_decode), Field(pattern=PUBLIC_ID_PATTERN)]
"""Path parameters. The name of a new user or tier is checked when it is stored (database/validation.py)."""

QueryBool = Annotated[bool, BeforeValidator(_parse_bool), WithJsonSchema({"type": "boolean"})]

Timestamp = Annotated[
    float,
    BeforeValidator(_parse_timestamp),
    WithJsonSchema({"type": "string", "format": "date-time", "examples": ["2030-01-31T12:00:00Z"]}),
]
"""A timestamp in a request: RFC 3339, read as seconds since the epoch."""

Duration = Annotated[
    float,
    BeforeValidator(_parse_duration),
    WithJsonSchema({"type": "string", "pattern": PATTERN, "examples": ["12h"]}),
]

TimestampText = Annotated[str, BeforeValidator(_format_timestamp), Field(json_schema_extra={"format": "date-time"})]
"""A timestamp in a response: RFC 3339 in UTC, made from seconds since the epoch."""

EnumValue = Annotated[str, BeforeValidator(_enum_value)]
"""The value of an enum member."""

PositionText = Annotated[str, BeforeValidator(str)]
"""Position of a rule: file:line:column, or database:name:line:column."""

OptionalPosition = Annotated[str | None, BeforeValidator(lambda position: str(position) if position else None)]

LimitSource = Annotated[str, BeforeValidator(lambda source: source or "rule")]
"""Source of the limits of a user or key. Internally "" is the rule."""

LimitList = list[Annotated[dict[str, Any], BeforeValidator(_limit_fields)]]
"""Limits, each in the format of `rate_limit` in rules."""
