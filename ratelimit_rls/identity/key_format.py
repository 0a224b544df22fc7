"""Format of API keys (`rlk_<id>_<secret>`) and admin tokens (`rla_<id>_<secret>`).

The id is public: it is used to look up a key and to name it in logs, the database and responses. The whole text is
shown once and never stored. Its HMAC is stored, keyed with RLS_KEY_SECRET, so that a stolen database alone can neither
be used to authenticate nor be searched for a key found elsewhere. A slow password hash would add no security, since the
secret has 256 random bits, but would cost time on every call.
"""

from __future__ import annotations

import base64
import hmac
import re
import secrets
from dataclasses import dataclass, field
from typing import Literal

SecretKind = Literal["rlk", "rla"]

SECRET_BYTES = 32
ID_CHARACTERS = 12
"""60 random bits: the probability of a collision among a million ids is 4e-7."""

_ID_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_SECRET_CHARACTERS = 43  # base64url of SECRET_BYTES without padding
KEY_LENGTH = len("rlk_") + ID_CHARACTERS + len("_") + _SECRET_CHARACTERS
_SHAPE = re.compile(f"(rlk|rla)_([a-z2-7]{{{ID_CHARACTERS}}})_[A-Za-z0-9_-]{{{_SECRET_CHARACTERS}}}")

_ID = re.compile(f"[a-z2-7]{{{ID_CHARACTERS}}}")

_DUMMY_DIGEST = bytes(32)
"""Digest that unknown keys are compared with. No text with this digest is known."""


@dataclass(frozen=True, slots=True)
class NewSecret:
    """A new key or token with its secret, which is shown only once."""

    public_id: str
    text: str = field(repr=False)


def new_secret(kind: SecretKind) -> NewSecret:
    public_id = "".join(secrets.choice(_ID_ALPHABET) for _ in range(ID_CHARACTERS))
    secret = base64.urlsafe_b64encode(secrets.token_bytes(SECRET_BYTES)).rstrip(b"=").decode()
    return NewSecret(public_id, f"{kind}_{public_id}_{secret}")


def public_id(text: str, kind: SecretKind) -> str | None:
    """Return the id in a key or token of that kind; None if the text does not have that format."""
    if len(text) != KEY_LENGTH:
        return None
    found = _SHAPE.fullmatch(text)
    return found[2] if found is not None and found[1] == kind else None


def is_public_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def contains_secret(text: str) -> bool:
    """Return whether a text contains a key or token anywhere, e.g. `Bearer rlk_…`."""
    return _SHAPE.search(text) is not None


def digest(key_secret: bytes, text: str) -> bytes:
    """Return the digest that is stored of a key or token."""
    # Every text must have a digest: header values may contain lone surrogates, which UTF-8 cannot encode.
    return hmac.digest(key_secret, text.encode("utf-8", "surrogatepass"), "sha256")


def matches(key_secret: bytes, text: str, expected: bytes | None) -> bool:
    """Return whether `expected` is the digest of `text`, in constant time. None (unknown id) takes equally long."""
    is_equal = hmac.compare_digest(digest(key_secret, text), _DUMMY_DIGEST if expected is None else expected)
    return is_equal and expected is not None
