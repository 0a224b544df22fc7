"""gRPC status: the codes, and the error with which a call fails."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from ratelimit_rls.h2.reasons import Reason


class StatusCode(IntEnum):
    """The gRPC status codes that a call can fail with here."""

    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


@dataclass(frozen=True, slots=True)
class RpcError:
    """The error with which a call fails."""

    code: StatusCode
    message: str
    reason: StrEnum | None = None  # a Reason, or one of the application, if a defence rejected the call
    metadata: tuple[tuple[str, str], ...] = ()  # sent in the trailers


def message_too_large(max_bytes: int) -> RpcError:
    message = f"the message is too large; at most {max_bytes} bytes are read"
    return RpcError(StatusCode.RESOURCE_EXHAUSTED, message, Reason.MESSAGE_TOO_LARGE)
