"""What a request says in its header block, checked as RFC 9113, §8 demands."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ratelimit_rls.transport.http2.frames import ErrorCode, StreamFault

Fields = list[tuple[bytes, bytes]]

_PSEUDO = frozenset({b":method", b":scheme", b":path", b":authority"})
_NEEDED = (b":method", b":scheme", b":path")
_OF_A_CONNECTION = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"})
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_NOT_IN_VALUES = re.compile(rb"[\0\r\n]")


def checked_request(fields: Fields) -> dict[bytes, bytes]:
    """The pseudo-header fields of a request. Raises StreamFault if the block is malformed."""
    pseudo: dict[bytes, bytes] = {}
    number = 0
    for name, value in fields:
        if not name.startswith(b":"):
            break
        if name not in _PSEUDO or name in pseudo:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR)
        pseudo[name] = value
        number += 1
    if not all(map(pseudo.get, _NEEDED)):
        raise StreamFault(ErrorCode.PROTOCOL_ERROR)
    check_fields(fields[number:])
    return pseudo


def check_fields(fields: Iterable[tuple[bytes, bytes]]) -> None:
    """Of ordinary fields, as trailers have no others. Raises StreamFault."""
    for name, value in fields:
        if (
            not _NAME.fullmatch(name)
            or name in _OF_A_CONNECTION
            or (name == b"te" and value != b"trailers")
            or _NOT_IN_VALUES.search(value)
        ):
            raise StreamFault(ErrorCode.PROTOCOL_ERROR)


def content_length(fields: Fields) -> int | None:
    """What the request says its body has. Raises StreamFault if that is no number, or several."""
    said = {value for name, value in fields if name == b"content-length"}
    if not said:
        return None
    if len(said) > 1 or not (text := said.pop()).isdigit() or len(text) > 18:
        raise StreamFault(ErrorCode.PROTOCOL_ERROR)
    return int(text)
