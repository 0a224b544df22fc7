"""Who may come in, and what for: bearer tokens with roles, or anybody where only this machine can reach the port."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from starlette.requests import Request

from ratelimit_rls.core.accounts import Role
from ratelimit_rls.errors import NotFound, RecordsError
from ratelimit_rls.identity.secrets import digest, matches, public_id
from ratelimit_rls.transport.http.admin.known_tokens import KnownTokens
from ratelimit_rls.transport.http.admin.own_limits import OwnLimits
from ratelimit_rls.transport.http.admin.problems import Fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from ratelimit_rls.core.accounts import AdminToken
    from ratelimit_rls.records.desk import Desk

TOUCH_S = 60
"""How exactly a token's last use is known."""

FIRST_TOKEN = "RLS_ADMIN_TOKEN"  # noqa: S105 - the name of a variable
"""What the token of the settings is called where others have an id."""

_RANKS = {role: rank for rank, role in enumerate(Role)}

_CHALLENGE = 'Bearer realm="ratelimit-rls"'


class Caller(NamedTuple):
    name: str
    token_id: str
    role: Role


ANYBODY = Caller("anybody", "none", Role.ADMIN)
"""Whoever can reach a port that asks for no token."""


class Access:
    def __init__(
        self, desk: Desk, key_secret: bytes, first_token: str, limits: OwnLimits, clock: Callable[[], float]
    ) -> None:
        self._desk = desk
        self._key_secret = key_secret
        self._first = digest(key_secret, first_token) if first_token else None
        self._limits = limits
        self._clock = clock
        self._known = KnownTokens(clock)

    async def caller(self, token: str, address: str) -> Caller:
        """Raises a Fault: 401, or 429 where too many from this address have failed.

        They keep out those who guess, and neither RLS_ADMIN_TOKEN nor tokens that were good a moment ago: an address is
        often that of a proxy, and anybody behind it could lock everybody out. Of all others the database is not asked.
        """
        if not token:
            raise _missing()
        if self._first is not None and matches(self._key_secret, token, self._first):
            return Caller(FIRST_TOKEN, FIRST_TOKEN, Role.ADMIN)
        given = digest(self._key_secret, token)
        if given not in self._known:
            _let_try(await self._limits.may_log_in(address))
        try:
            caller = await self._of_token(token)
        except Fault:
            self._known.discard(given)
            _let_try(await self._limits.login_failed(address))
            raise
        self._known.add(given)
        return caller

    async def _of_token(self, text: str) -> Caller:
        """Whose token it is. Raises a Fault (401) if it is nobody's, or not any more."""
        token_id = public_id(text, "rla")
        token = await self._token(token_id) if token_id is not None else None
        # Also where there is none: how long it takes must not tell which ids there are.
        if not matches(self._key_secret, text, token.digest if token else None) or token is None:
            raise _unauthorized("the token is not one of ours")
        now_s = self._clock()
        if token.revoked_s is not None:
            raise _unauthorized("the token has been revoked")
        if token.expires_s is not None and token.expires_s <= now_s:
            raise _unauthorized("the token has expired")
        await self._touch(token, now_s)
        return Caller(token.name or token.token_id, token.token_id, token.role)

    async def _touch(self, token: AdminToken, now_s: float) -> None:
        """To the minute, so that not every read is a write. Nobody is kept out because it cannot be written."""
        if token.last_used_s is None or token.last_used_s <= now_s - TOUCH_S:
            with suppress(RecordsError):
                await self._desk.touch_tokens({token.token_id: now_s})

    async def _token(self, token_id: str) -> AdminToken | None:
        """From the database each time: who is revoked is out at once."""
        async with self._desk.reading() as reader:
            try:
                return await reader.token(token_id)
            except NotFound:
                return None


async def allow(caller: Caller, role: Role, limits: OwnLimits) -> None:
    """What a caller asks for is counted, whether it may do it or not. Raises a Fault: 403 or 429."""
    is_write = role is not Role.READ
    wait_s = await limits.count(caller.token_id, is_write=is_write)
    if wait_s is not None:
        raise too_many(wait_s, f"too many {'changes' if is_write else 'reads'} with this token")
    if _RANKS[caller.role] < _RANKS[role]:
        detail = f"this needs a token with the role {role.value}; yours has {caller.role.value}"
        raise Fault(403, "forbidden", detail)


def too_many(wait_s: int, detail: str) -> Fault:
    return Fault(429, "too-many-requests", f"{detail}; come back in {wait_s} s", headers={"Retry-After": str(wait_s)})


def bearer(request: Request) -> str:
    """The token; empty if there is none."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip(" ") if scheme.lower() == "bearer" else ""


def _let_try(wait_s: int | None) -> None:
    if wait_s is not None:
        raise too_many(wait_s, "too many logins from this address have failed")


def _missing() -> Fault:
    challenge = {"WWW-Authenticate": _CHALLENGE}
    return Fault(401, "unauthorized", "send a token: Authorization: Bearer rla_…", headers=challenge)


def _unauthorized(detail: str) -> Fault:
    challenge = f'{_CHALLENGE}, error="invalid_token"'
    return Fault(401, "unauthorized", detail, headers={"WWW-Authenticate": challenge})
