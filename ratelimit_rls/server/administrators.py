"""Administrators at the gRPC port: the same tokens and the same record as at the admin API."""

from __future__ import annotations

import time

from ratelimit_rls.core.accounts import Role
from ratelimit_rls.core.model import Request
from ratelimit_rls.records.desk import Actor, Desk
from ratelimit_rls.server.records import Records
from ratelimit_rls.settings import Settings
from ratelimit_rls.store.base import Store
from ratelimit_rls.transport.grpc.limiter_reset import Administrator
from ratelimit_rls.transport.http.admin.access import Access
from ratelimit_rls.transport.http.admin.own_limits import OwnLimits
from ratelimit_rls.transport.http.admin.problems import Fault


class Administrators:
    def __init__(self, settings: Settings, records: Records, store: Store) -> None:
        self._desk: Desk = records.desk
        first_token = settings.rls_admin_token.get_secret_value()
        limits = OwnLimits(store, settings.cache_key_prefix)
        self._access = Access(records.desk, records.key_secret, first_token, limits, time.time)

    async def administrator(self, token: str) -> Administrator | None:
        try:
            caller = await self._access.of_token(token)
        except Fault:
            return None
        return Administrator(caller.name, caller.role is not Role.READ)

    async def was_reset(self, who: Administrator, request: Request, counters: int) -> None:
        async with self._desk.change(Actor(who.name)) as change:
            entries = [dict(descriptor.entries) for descriptor in request.descriptors]
            await change.note("reset", "counters", request.domain, {"descriptors": entries, "forgotten": counters})
