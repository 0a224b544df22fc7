"""Administrators at the gRPC port: the same tokens, the same limits and the same record as at the admin API."""

from __future__ import annotations

import time

from ratelimit_rls.core.accounts import Role
from ratelimit_rls.core.model import Request
from ratelimit_rls.records.desk import Actor, Desk
from ratelimit_rls.server.records import Records
from ratelimit_rls.settings import Settings
from ratelimit_rls.store.base import Store
from ratelimit_rls.transport.grpc.limiter_reset import Administrator, Asking, Forget, NotAdmitted, Why
from ratelimit_rls.transport.http.admin.access import Access, allow
from ratelimit_rls.transport.http.admin.noted import note_reset
from ratelimit_rls.transport.http.admin.own_limits import OwnLimits
from ratelimit_rls.transport.http.admin.problems import Fault

_REASONS = {401: Why.NOBODY, 403: Why.FORBIDDEN, 429: Why.TOO_MANY}


class Administrators:
    def __init__(self, settings: Settings, records: Records, store: Store) -> None:
        self._desk: Desk = records.desk
        first_token = settings.rls_admin_token.get_secret_value()
        self._limits = OwnLimits(store, settings.cache_key_prefix)
        self._access = Access(records.desk, records.key_secret, first_token, self._limits, time.time)

    async def admit(self, asking: Asking) -> Administrator:
        try:
            caller = await self._access.caller(asking.token, asking.address)
            await allow(caller, Role.WRITE, self._limits)
        except Fault as fault:
            raise NotAdmitted(_REASONS[fault.status_code], str(fault.detail)) from None
        return Administrator(caller.name, caller.token_id)

    async def reset(self, who: Administrator, asking: Asking, request: Request, forget: Forget) -> int:
        """In the transaction that records it: a database that is away is found out before anything is forgotten."""
        async with self._desk.change(Actor(who.name, who.token_id, asking.address, asking.request_id)) as change:
            forgotten = await forget()
            await note_reset(change, request, forgotten)
        return forgotten
