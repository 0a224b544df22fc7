"""Cursors: where a page ended, for whoever wants the next one.

A cursor is what the service said itself and gets back unread, so it is signed: one that was made up, or is of another
list or of other filters, is refused and never reaches the database.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

LONGEST: Final = 2048
"""Characters. The longest id has 255, each of them at most twelve in JSON within base64."""

_SIGNATURE_BYTES = 12


class Cursors:
    def __init__(self, key_secret: bytes) -> None:
        self._key = hmac.digest(key_secret, b"cursors of the admin API", hashlib.sha256)

    def write(self, listing: str, filters: Mapping[str, Any], place: Sequence[str | int]) -> str:
        payload = json.dumps([*place], separators=(",", ":")).encode()
        return base64.urlsafe_b64encode(self._sign(listing, filters, payload) + payload).decode().rstrip("=")

    def read(self, cursor: str, listing: str, filters: Mapping[str, Any]) -> list[str | int]:
        """Raises ValueError with the second half of a sentence."""
        try:
            whole = base64.urlsafe_b64decode(cursor.encode("ascii") + b"=" * (-len(cursor) % 4))
        except (binascii.Error, ValueError):
            whole = b""
        signature, payload = whole[:_SIGNATURE_BYTES], whole[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._sign(listing, filters, payload)):
            raise ValueError("is none that this list gave with these filters; begin again without one")
        place: list[str | int] = json.loads(payload)
        return place

    def _sign(self, listing: str, filters: Mapping[str, Any], payload: bytes) -> bytes:
        asked = json.dumps([listing, sorted(filters.items())]).encode()
        told = b"%d:%b%b" % (len(asked), asked, payload)
        return hmac.digest(self._key, told, hashlib.sha256)[:_SIGNATURE_BYTES]
