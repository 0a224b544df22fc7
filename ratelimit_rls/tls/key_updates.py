"""Limit on the TLS 1.3 KeyUpdate messages of a connection.

A client may request new keys as often as it likes with 27 bytes, and OpenSSL spends about 25 µs of CPU on each
response. OpenSSL handles everything that was received in one call, which can take hundreds of milliseconds for one read
of the socket, and the protocol above TLS does not notice. So the messages are counted while OpenSSL reads them. Above
the limit the rest of the input is discarded and the connection ends.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from time import monotonic
from typing import Any

MAX_KEY_UPDATES = 32
KEY_UPDATES_PER_SECOND = 1
"""Key updates of a connection: burst and rate. TLS libraries update keys after millions of records, if ever."""

_HANDSHAKE = 22  # content type
_KEY_UPDATE = 24  # message type of a handshake record


def _ignore() -> None:
    """Do nothing."""


class BoundedSslObject(ssl.SSLObject):
    """SSLObject that ends its input when the client sends too many key updates; `on_flood` is then called once."""

    incoming: ssl.MemoryBIO
    on_flood: Callable[[], None] = staticmethod(_ignore)
    _level = 0.0
    _then_s = 0.0

    @classmethod
    def _create(cls, incoming: ssl.MemoryBIO, *others: Any, **named: Any) -> BoundedSslObject:
        made: BoundedSslObject = super()._create(incoming, *others, **named)  # type: ignore[misc]
        made.incoming = incoming
        return made

    def on_key_update(self) -> None:
        now_s = monotonic()
        self._level = max(0.0, self._level - KEY_UPDATES_PER_SECOND * (now_s - self._then_s)) + 1
        self._then_s = now_s
        if self._level > MAX_KEY_UPDATES and not self.incoming.eof:
            self.incoming.read()
            self.incoming.write_eof()
            on_flood, self.on_flood = self.on_flood, _ignore
            on_flood()


def _on_message(
    connection: ssl.SSLObject, direction: str, _version: int, content_type: int, message_type: int, _data: bytes
) -> None:
    """Count key updates. OpenSSL calls this for every record and TLS message, in both directions."""
    if message_type == _KEY_UPDATE and content_type == _HANDSHAKE and direction == "read":
        connection.on_key_update()  # type: ignore[attr-defined]


def bound_key_updates(context: ssl.SSLContext) -> None:
    """Limit the key updates of connections that are created from this context from now on."""
    context.sslobject_class = BoundedSslObject
    # The property of SSLContext converts every argument to an enumeration, for every record. The one of its base class
    # is not documented either; CPython has had both since 3.8.
    ssl.SSLContext.__base__._msg_callback.__set__(context, _on_message)  # type: ignore[union-attr]
