"""Authentication and authorization of administrators, on the HTTP and gRPC ports alike: bearer tokens with roles."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from ratelimit_rls.database.administration import Role
from ratelimit_rls.errors import DatabaseError, NotFound, PermissionDenied, TooManyRequests, Unauthenticated
from ratelimit_rls.identity.key_format import digest, matches, public_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from ratelimit_rls.admin.rate_limits import AdminRateLimits
    from ratelimit_rls.database.administration import AdminToken
    from ratelimit_rls.database.repository import Repository

LAST_USED_RESOLUTION_S = 60
"""Resolution of a token's last use: it is written at most once in this time."""

RECENT_S: Final = 15 * 60
MAX_RECENT_TOKENS: Final = 1000

BOOTSTRAP_TOKEN = "RLS_ADMIN_TOKEN"  # noqa: S105 - the name of a variable
"""Name of the token from the settings, where other tokens have an id."""

_RANKS = {role: rank for rank, role in enumerate(Role)}


class Principal(NamedTuple):
    """An authenticated administrator."""

    name: str
    token_id: str
    role: Role


UNRESTRICTED = Principal("anybody", "none", Role.ADMIN)
"""Every caller of a port that requires no token."""


class RecentTokens:
    """A bounded set of digests of recently verified tokens.

    They are exempt from the limit of failed logins of their address. Membership grants no access: a token is verified
    every time.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._verified_s: dict[bytes, float] = {}  # time of the last verification, oldest first

    def __contains__(self, digest: bytes) -> bool:
        verified_s = self._verified_s.get(digest)
        return verified_s is not None and self._clock() < verified_s + RECENT_S

    def add(self, digest: bytes) -> None:
        self._verified_s.pop(digest, None)
        self._verified_s[digest] = self._clock()
        if len(self._verified_s) > MAX_RECENT_TOKENS:
            del self._verified_s[next(iter(self._verified_s))]

    def discard(self, digest: bytes) -> None:
        self._verified_s.pop(digest, None)


class AccessControl:
    """Decides who may administrate: by RLS_ADMIN_TOKEN, the tokens in the database, their roles and rate limits."""

    def __init__(
        self,
        repository: Repository,
        key_secret: bytes,
        bootstrap_token: str,
        limits: AdminRateLimits,
        clock: Callable[[], float],
        *,
        needs_tokens: bool = True,
    ) -> None:
        self._repository = repository
        self._key_secret = key_secret
        self._bootstrap_digest = digest(key_secret, bootstrap_token) if bootstrap_token else None
        self._limits = limits
        self._clock = clock
        self._needs_tokens = needs_tokens
        self._recent = RecentTokens(clock)

    async def admit(self, token: str, address: str, role: Role) -> Principal:
        """Return the administrator, if the token is valid and has at least this role. The request is counted.

        Raises Unauthenticated, PermissionDenied or TooManyRequests; DatabaseError if the token cannot be checked.
        """
        caller = await self._authenticate(token, address) if self._needs_tokens else UNRESTRICTED
        await self._authorize(caller, role)
        return caller

    async def _authenticate(self, token: str, address: str) -> Principal:
        """Return the administrator that a token belongs to.

        The limit of failed logins stops attackers who guess tokens. It applies neither to RLS_ADMIN_TOKEN nor to
        recently verified tokens: an address is often that of a proxy, and one client behind it could lock out all
        others. A token rejected by it causes no database query.
        """
        if not token:
            raise Unauthenticated("send a token: Authorization: Bearer rla_…", is_missing=True)
        if self._bootstrap_digest is not None and matches(self._key_secret, token, self._bootstrap_digest):
            return Principal(BOOTSTRAP_TOKEN, BOOTSTRAP_TOKEN, Role.ADMIN)
        given = digest(self._key_secret, token)
        if given not in self._recent:
            _raise_if_limited(await self._limits.check_login(address))
        try:
            caller = await self._verify_token(token)
        except Unauthenticated:
            self._recent.discard(given)
            _raise_if_limited(await self._limits.record_failed_login(address))
            raise
        self._recent.add(given)
        return caller

    async def _authorize(self, caller: Principal, role: Role) -> None:
        """Count a request and check the caller's role. Rejected requests count, too."""
        is_write = role is not Role.READ
        wait_s = await self._limits.count(caller.token_id, is_write=is_write)
        if wait_s is not None:
            raise _too_many(f"too many {'changes' if is_write else 'reads'} with this token", wait_s)
        if _RANKS[caller.role] < _RANKS[role]:
            raise PermissionDenied(f"this operation needs the role {role.value}; the token has {caller.role.value}")

    async def _verify_token(self, text: str) -> Principal:
        """Return the owner of a token. Raises Unauthenticated if it is unknown, revoked or expired."""
        token_id = public_id(text, "rla")
        token = await self._find_token(token_id) if token_id is not None else None
        # Compare even if there is no such id: the time taken must not reveal which ids exist.
        if not matches(self._key_secret, text, token.digest if token else None) or token is None:
            raise Unauthenticated("unknown token")
        now_s = self._clock()
        if token.revoked_s is not None:
            raise Unauthenticated("the token has been revoked")
        if token.expires_s is not None and token.expires_s <= now_s:
            raise Unauthenticated("the token has expired")
        await self._touch(token, now_s)
        return Principal(token.name or token.token_id, token.token_id, token.role)

    async def _touch(self, token: AdminToken, now_s: float) -> None:
        """Record the last use, to the minute, so that not every read becomes a write. A failed write is ignored."""
        if token.last_used_s is None or token.last_used_s <= now_s - LAST_USED_RESOLUTION_S:
            with suppress(DatabaseError):
                await self._repository.touch_tokens({token.token_id: now_s})

    async def _find_token(self, token_id: str) -> AdminToken | None:
        """Look up a token. Always reads the database, so that a revocation takes effect at once."""
        async with self._repository.reading() as reader:
            try:
                return await reader.token(token_id)
            except NotFound:
                return None


def _raise_if_limited(wait_s: int | None) -> None:
    if wait_s is not None:
        raise _too_many("too many failed logins from this address", wait_s)


def _too_many(message: str, wait_s: int) -> TooManyRequests:
    return TooManyRequests(f"{message}; retry in {wait_s} s", wait_s)
