"""Construction of the administration of the gRPC port: the tokens, rate limits and audit log of the admin API."""

from __future__ import annotations

import time

from ratelimit_rls.admin.auth import AccessControl
from ratelimit_rls.admin.counters import ResetAdministration
from ratelimit_rls.admin.rate_limits import AdminRateLimits
from ratelimit_rls.server.database import DatabaseServices
from ratelimit_rls.server.stores import Stores
from ratelimit_rls.settings import Settings


def new_reset_administration(
    settings: Settings, database_services: DatabaseServices, stores: Stores
) -> ResetAdministration:
    access = AccessControl(
        database_services.repository,
        database_services.key_secret,
        settings.rls_admin_token.get_secret_value(),
        AdminRateLimits(stores.store, settings.cache_key_prefix),
        time.time,
    )
    return ResetAdministration(access, database_services.repository, stores.counters)
