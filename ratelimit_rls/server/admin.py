"""Construction of the admin API from the components of the process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ratelimit_rls.admin.backend import AdminBackend, SourceState
from ratelimit_rls.admin.http.app import admin_app
from ratelimit_rls.core.plan import Policy
from ratelimit_rls.pipeline.limiter import RateLimiter
from ratelimit_rls.rules.active_rules import ActiveRules
from ratelimit_rls.server.database import DatabaseServices
from ratelimit_rls.server.rules_source import RulesComponents
from ratelimit_rls.server.stores import Stores
from ratelimit_rls.settings import Settings
from ratelimit_rls.settings.xds import XDS
from ratelimit_rls.telemetry.abuse import AbuseLog

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ratelimit_rls.identity.verifier import CredentialVerifier


def new_admin_app(
    settings: Settings,
    database_services: DatabaseServices,
    rules: ActiveRules,
    limiter: RateLimiter,
    policy: Policy,
    stores: Stores,
    rules_components: RulesComponents,
    verifier: CredentialVerifier | None,
    abuse: AbuseLog,
) -> FastAPI:
    assert rules_components.check is not None
    return admin_app(
        AdminBackend(
            repository=database_services.repository,
            database=database_services.database,
            directory=database_services.directory,
            rules=rules,
            limiter=limiter,
            store=stores.store,
            counters=stores.counters,
            policy=policy,
            compile_rules=rules_components.compile,
            check_rules=rules_components.check,
            sources=partial(_sources, settings, database_services, rules),
            verifier=verifier,
            key_secret=database_services.key_secret,
            bootstrap_token=settings.rls_admin_token.get_secret_value(),
            needs_tokens=settings.rls_admin_auth == "tokens",
        ),
        abuse=abuse,
    )


def _sources(settings: Settings, database_services: DatabaseServices, rules: ActiveRules) -> Sequence[SourceState]:
    """Return the state of each source.

    Rules of all sources take effect together or not at all, so failures and the last error are those of all sources.
    """
    loaded = rules.current
    rules_state = SourceState(
        name="xds" if settings.config_type == XDS else "files",
        version=loaded.version if loaded else None,
        digest=loaded.digest if loaded else None,
        changed_s=loaded.loaded_at.timestamp() if loaded else None,
        failures=rules.failures,
        last_error=str(rules.last_error) if rules.last_error else None,
    )
    state = database_services.follower.state
    database_state = SourceState(
        name="database",
        connected=state.is_connected,
        sequence=state.sequence,
        loaded_from=state.origin,
        changed_s=state.last_change_s,
        last_error=state.last_error or None,
        writable=database_services.database.write_health.writes_succeed,
        write_error=database_services.database.write_health.error or None,
    )
    return rules_state, database_state
