"""Validation of request header fields, as required by RFC 9113, section 8."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ratelimit_rls.h2.frames import ErrorCode, Http2StreamError

Fields = list[tuple[bytes, bytes]]

_PSEUDO = frozenset({b":method", b":scheme", b":path", b":authority"})
_REQUIRED = (b":method", b":scheme", b":path")
_CONNECTION_SPECIFIC = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"})
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_FORBIDDEN_IN_VALUES = re.compile(rb"[\0\r\n]")


def validate_request(fields: Fields) -> dict[bytes, bytes]:
    """Validate the fields of a request, and return its pseudo-header fields. Raises Http2StreamError if malformed."""
    pseudo: dict[bytes, bytes] = {}
    number = 0
    for name, value in fields:
        if not name.startswith(b":"):
            break
        if name not in _PSEUDO or name in pseudo:
            raise Http2StreamError(ErrorCode.PROTOCOL_ERROR)
        pseudo[name] = value
        number += 1
    if not all(map(pseudo.get, _REQUIRED)) or _FORBIDDEN_IN_VALUES.search(b"".join(pseudo.values())):
        raise Http2StreamError(ErrorCode.PROTOCOL_ERROR)
    validate_fields(fields[number:])
    return pseudo


def validate_fields(fields: Iterable[tuple[bytes, bytes]]) -> None:
    """Validate regular fields; trailers contain no others. Raises Http2StreamError."""
    for name, value in fields:
        if (
            not _NAME.fullmatch(name)
            or name in _CONNECTION_SPECIFIC
            or (name == b"te" and value != b"trailers")
            or _FORBIDDEN_IN_VALUES.search(value)
        ):
            raise Http2StreamError(ErrorCode.PROTOCOL_ERROR)


def parse_content_length(fields: Fields) -> int | None:
    """Return the Content-Length, or None. Raises Http2StreamError if it is not a number, or if there are several."""
    values = {value for name, value in fields if name == b"content-length"}
    if not values:
        return None
    if len(values) > 1 or not (text := values.pop()).isdigit() or len(text) > 18:
        raise Http2StreamError(ErrorCode.PROTOCOL_ERROR)
    return int(text)
