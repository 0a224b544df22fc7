"""What of a request has come, where that was not one message in one frame."""

from __future__ import annotations

from ratelimit_rls.transport.grpc import reply
from ratelimit_rls.transport.grpc.door import Failure, FailureCode
from ratelimit_rls.transport.grpc.head import Head, NotGrpc, decompressed, too_large

_NOT_ONE = Failure(FailureCode.INTERNAL, "the call has to have exactly one message")


MOST_TURNED_AWAY_BYTES = 65_536
"""Of a request that is not gRPC: it is let finish, but not for ever."""


class Arriving:
    """A call with one message."""

    __slots__ = ("_data", "head")
    has_begun = False  # to be answered

    def __init__(self, head: Head) -> None:
        self.head = head
        self._data = bytearray()

    @property
    def held_bytes(self) -> int:
        return len(self._data)

    @property
    def is_as_long_as_said(self) -> bool:
        return self.head.content_length in (None, len(self._data))

    def take(self, data: bytes, most_bytes: int) -> Failure | None:
        """More of it; a failure, if that is already more than can be."""
        self._data += data
        if len(self._data) >= reply.PREFIX_BYTES:
            _, length = reply.PREFIX.unpack_from(self._data)
            if length > most_bytes:
                return too_large(most_bytes)
            if length < len(self._data) - reply.PREFIX_BYTES:
                return _NOT_ONE
        return None

    def cancel(self) -> None:
        """Nobody works on it yet."""

    def message(self, most_bytes: int) -> bytes | Failure:
        """All of it."""
        if len(self._data) < reply.PREFIX_BYTES:
            return _NOT_ONE
        is_compressed, length = reply.PREFIX.unpack_from(self._data)
        message = bytes(self._data[reply.PREFIX_BYTES :])
        if len(message) != length:
            return _NOT_ONE
        return decompressed(message, self.head.encoding, most_bytes) if is_compressed else message


class TurnedAway:
    """A request that is something else. It is told so at its end, as by any other server."""

    __slots__ = ("_taken_bytes", "told")
    held_bytes = 0
    has_begun = False

    def __init__(self, told: NotGrpc) -> None:
        self.told = told
        self._taken_bytes = 0

    @property
    def is_as_long_as_said(self) -> bool:
        return self.told.content_length in (None, self._taken_bytes)

    def take(self, data: bytes, most_bytes: int) -> NotGrpc | None:
        """What it is told before its end, if that does not come."""
        self._taken_bytes += len(data)
        return self.told if self._taken_bytes > MOST_TURNED_AWAY_BYTES else None

    def cancel(self) -> None:
        """Nobody works on it."""
