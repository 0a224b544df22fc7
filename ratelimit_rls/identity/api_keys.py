"""Verification of API keys: looked up by public id in the directory, compared by digest, never stored.

Results are cached until the directory changes, under another digest that is faster to compute and keyed with a secret
of this process.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from secrets import token_bytes
from typing import NamedTuple

from ratelimit_rls.common.bounded_cache import BoundedCache
from ratelimit_rls.core.identity import Identity
from ratelimit_rls.identity import key_format
from ratelimit_rls.identity.directory import Directory
from ratelimit_rls.identity.precedence import key_end_s


class KeyUsage(NamedTuple):
    calls: int
    at_s: float  # last use, in whole seconds: times that differ for every key take twice as long to write


MAX_CACHED_KEYS = 20_000
"""Maximum cached keys, and maximum keys whose usage is not collected yet."""


class _CachedKey:
    """Cached identity of a key, with its usage since the last `take_usage`. Counting here saves a lookup per call."""

    __slots__ = ("calls", "identity", "last_s", "until_s")

    def __init__(self, identity: Identity, until_s: float) -> None:
        self.identity = identity
        self.until_s = until_s
        self.calls = 0
        self.last_s = 0.0


class ApiKeyVerifier:
    def __init__(self, directory: Directory, key_secret: bytes) -> None:
        self._directory = directory
        self._key_secret = key_secret
        self._used: dict[str, KeyUsage] = {}
        self._cache = BoundedCache[bytes, _CachedKey](MAX_CACHED_KEYS)
        self._in_use: list[_CachedKey] = []  # keys with uncollected calls
        # Copied for each key, which is cheaper than creating one.
        self._digest = blake2b(digest_size=16, key=token_bytes(32))
        self._version = directory.version

    def identify(self, text: str, now_s: float) -> Identity | None:
        """Return the identity of a key; None if it is unknown, expired or revoked.

        The key of a blocked user is valid: authentication and entitlements are separate questions.
        """
        if len(text) > key_format.KEY_LENGTH:
            return None
        if self._version != self._directory.version:
            self._clear_cache()
        digest = self._digest.copy()
        digest.update(text.encode("utf-8", "surrogatepass"))
        cache_key = digest.digest()
        found = self._cache.get(cache_key)
        if found is None:
            found = self._look_up(text, now_s)
            if found is None:
                return None
            self._cache.put(cache_key, found)
        if now_s >= found.until_s:
            return None
        if not found.calls:
            if len(self._in_use) >= MAX_CACHED_KEYS:  # more than are cached: some have been evicted since
                self._collect_usage()
            self._in_use.append(found)
        found.calls += 1
        found.last_s = now_s
        return found.identity

    def _clear_cache(self) -> None:
        """Clear the cached identities, but keep the usage counts."""
        self._collect_usage()
        self._cache.clear()
        self._version = self._directory.version

    def _look_up(self, text: str, now_s: float) -> _CachedKey | None:
        key_id = key_format.public_id(text, "rlk")
        if key_id is None:
            return None
        key = self._directory.key(key_id)
        # Compare before any other check, so that the response time does not reveal whether the key exists.
        if not key_format.matches(self._key_secret, text, key.digest if key is not None else None):
            return None
        if key is None or now_s >= key_end_s(key):
            return None
        user = self._directory.user(key.user_id)
        if user is None:
            return _CachedKey(Identity(key.user_id, key.tier, api_key=key_id), key_end_s(key))
        return _CachedKey(Identity(key.user_id, key.tier or user.tier, user.org, key_id), key_end_s(key))

    def take_usage(self) -> dict[str, KeyUsage]:
        """Return and reset the usage by key id since the last call. At most as many entries as there are keys."""
        self._collect_usage()
        used, self._used = self._used, {}
        return used

    def put_back(self, used: Mapping[str, KeyUsage]) -> None:
        """Restore usage that was taken but could not be written."""
        for key_id, (calls, at_s) in used.items():
            since = self._used.get(key_id)
            self._used[key_id] = KeyUsage(calls, at_s) if since is None else KeyUsage(calls + since.calls, since.at_s)

    def _collect_usage(self) -> None:
        for one in self._in_use:
            key_id = one.identity.api_key
            before = self._used.get(key_id)
            calls = one.calls + (before.calls if before is not None else 0)
            self._used[key_id] = KeyUsage(calls, float(int(one.last_s)))
            one.calls = 0
        self._in_use.clear()
