"""Whose API key it is: found by its public id in the directory, compared by its digest, never kept.

What was found is remembered by another digest, keyed with a secret of this process and quicker to make, until something
in the directory changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from secrets import token_bytes
from typing import NamedTuple

from ratelimit_rls.core.identity import Identity
from ratelimit_rls.identity import secrets
from ratelimit_rls.identity.directory import Directory
from ratelimit_rls.identity.order import ends_s


class Used(NamedTuple):
    calls: int
    at_s: float  # the last time, to the second: moments that differ for every key take half the time to write


MOST_REMEMBERED = 20_000
"""Keys whose callers are remembered: all of them are forgotten when there are more, which few minutes see."""


class _Remembered:
    """Whose a key is, and what was made of it since uses were last taken. Counting here saves a look-up a call."""

    __slots__ = ("calls", "identity", "last_s", "until_s")

    def __init__(self, identity: Identity, until_s: float) -> None:
        self.identity = identity
        self.until_s = until_s
        self.calls = 0
        self.last_s = 0.0


class ApiKeys:
    def __init__(self, directory: Directory, key_secret: bytes) -> None:
        self._directory = directory
        self._key_secret = key_secret
        self._used: dict[str, Used] = {}
        self._remembered: dict[bytes, _Remembered] = {}
        self._in_use: list[_Remembered] = []  # those with calls, each once
        self._digest = blake2b(digest_size=16, key=token_bytes(32))  # copied for each key: making one costs more
        self._version = directory.version

    def identify(self, text: str, now_s: float) -> Identity | None:
        """None if it is nobody's, or is expired or revoked.

        That its user is blocked does not make a key invalid: who is calling is known, and how they stand is another
        question.
        """
        if len(text) > secrets.LENGTH:
            return None
        if self._version != self._directory.version or len(self._remembered) > MOST_REMEMBERED:
            self._forget()
        digest = self._digest.copy()
        digest.update(text.encode("utf-8", "surrogatepass"))
        known_by = digest.digest()
        found = self._remembered.get(known_by)
        if found is None:
            found = self._found(text, now_s)
            if found is None:
                return None
            self._remembered[known_by] = found
        if now_s >= found.until_s:
            return None
        if not found.calls:
            self._in_use.append(found)
        found.calls += 1
        found.last_s = now_s
        return found.identity

    def _forget(self) -> None:
        """Whose keys they are, but not that they were used."""
        self._count()
        self._remembered.clear()
        self._version = self._directory.version

    def _found(self, text: str, now_s: float) -> _Remembered | None:
        key_id = secrets.public_id(text, "rlk")
        if key_id is None:
            return None
        key = self._directory.key(key_id)
        # Compared before anything else is looked at: how long it takes does not tell whether there is such a key.
        if not secrets.matches(self._key_secret, text, key.digest if key is not None else None):
            return None
        if key is None or now_s >= ends_s(key):
            return None
        user = self._directory.user(key.user_id)
        if user is None:
            return _Remembered(Identity(key.user_id, key.tier, api_key=key_id), ends_s(key))
        return _Remembered(Identity(key.user_id, key.tier or user.tier, user.org, key_id), ends_s(key))

    def take_used(self) -> dict[str, Used]:
        """Which keys were used since this was last asked. At most as many as there are keys."""
        self._count()
        used, self._used = self._used, {}
        return used

    def put_back(self, used: Mapping[str, Used]) -> None:
        """What was taken and could not be written."""
        for key_id, (calls, at_s) in used.items():
            since = self._used.get(key_id)
            self._used[key_id] = Used(calls, at_s) if since is None else Used(calls + since.calls, since.at_s)

    def _count(self) -> None:
        for one in self._in_use:
            key_id = one.identity.api_key
            before = self._used.get(key_id)
            calls = one.calls + (before.calls if before is not None else 0)
            self._used[key_id] = Used(calls, float(int(one.last_s)))
            one.calls = 0
        self._in_use.clear()
