"""Keys and tokens that this service makes: `rlk_<id>_<secret>` for callers, `rla_<id>_<secret>` for administrators.

The id is public: it is what a key is found by, and what it is called in logs, records and answers. The whole text is
shown once and kept nowhere; what is kept is its HMAC, keyed with RLS_KEY_SECRET, so that a stolen database alone can
neither be used to call nor be searched for a key that was found elsewhere. A slow password hash would add nothing,
since the secret has 256 random bits, and would be paid for with every call.
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
"""60 bits: among a million keys, two of one id come up once in two million years of making a key a second."""

_ID_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_SECRET_CHARACTERS = 43  # base64url of SECRET_BYTES without padding
LENGTH = len("rlk_") + ID_CHARACTERS + len("_") + _SECRET_CHARACTERS
_SHAPE = re.compile(f"(rlk|rla)_([a-z2-7]{{{ID_CHARACTERS}}})_[A-Za-z0-9_-]{{{_SECRET_CHARACTERS}}}")

_ID = re.compile(f"[a-z2-7]{{{ID_CHARACTERS}}}")

_NOBODY = bytes(32)
"""What an unknown key is compared with: no text is known that has this digest."""


@dataclass(frozen=True, slots=True)
class NewSecret:
    """A key or token at the one moment at which it may be seen."""

    public_id: str
    text: str = field(repr=False)


def new_secret(kind: SecretKind) -> NewSecret:
    public_id = "".join(secrets.choice(_ID_ALPHABET) for _ in range(ID_CHARACTERS))
    secret = base64.urlsafe_b64encode(secrets.token_bytes(SECRET_BYTES)).rstrip(b"=").decode()
    return NewSecret(public_id, f"{kind}_{public_id}_{secret}")


def public_id(text: str, kind: SecretKind) -> str | None:
    """The id in a key or token of that kind; None if it has not the shape of one, however long it is."""
    if len(text) != LENGTH:
        return None
    found = _SHAPE.fullmatch(text)
    return found[2] if found is not None and found[1] == kind else None


def is_public_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def is_within(text: str) -> bool:
    """Whether a key or token stands anywhere in it: `Bearer rlk_…`, or with a space before it."""
    return _SHAPE.search(text) is not None


def digest(key_secret: bytes, text: str) -> bytes:
    """What is kept of a key or token."""
    # Any text has a digest: one from a header may hold what UTF-8 has no bytes for.
    return hmac.digest(key_secret, text.encode("utf-8", "surrogatepass"), "sha256")


def matches(key_secret: bytes, text: str, expected: bytes | None) -> bool:
    """Whether `expected` was made from `text`. None, where nobody has that id, takes as long as any other."""
    is_equal = hmac.compare_digest(digest(key_secret, text), _NOBODY if expected is None else expected)
    return is_equal and expected is not None
