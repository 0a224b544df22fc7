"""Masking of callers' values: equal values have equal digests, and a digest does not reveal its value."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

SECRET_BYTES = 32
DIGITS = 8

_FILE = "mask"


class Mask:
    def __init__(self, shared_directory: Path | None = None) -> None:
        """Workers that share a directory with a secret show the same digests. Without one it lasts for the process."""
        self._secret = os.urandom(SECRET_BYTES) if shared_directory is None else (shared_directory / _FILE).read_bytes()

    def __call__(self, value: str) -> str:
        # Keyed: plain digests of names and addresses could be looked up.
        return "#" + hmac.new(self._secret, value.encode(errors="replace"), hashlib.sha256).hexdigest()[:DIGITS]


def share_mask_secret(directory: Path) -> None:
    """Create the secret, before the workers start."""
    (directory / _FILE).write_bytes(os.urandom(SECRET_BYTES))
