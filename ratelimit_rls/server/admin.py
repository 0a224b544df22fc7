"""The admin API of a process, with all it needs of the process around it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ratelimit_rls.core.plan import Policy
from ratelimit_rls.rules.snapshot import Rules
from ratelimit_rls.server.records import Records
from ratelimit_rls.server.rules_source import RulesSide
from ratelimit_rls.server.stores import Stores
from ratelimit_rls.service import RateLimiter
from ratelimit_rls.settings import Settings
from ratelimit_rls.settings.xds import XDS
from ratelimit_rls.transport.http.admin.app import admin_app
from ratelimit_rls.transport.http.admin.backend import AdminBackend, SourceState

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ratelimit_rls.identity.verifier import Callers


def new_admin_app(
    settings: Settings,
    records: Records,
    rules: Rules,
    limiter: RateLimiter,
    policy: Policy,
    stores: Stores,
    rules_side: RulesSide,
    callers: Callers | None,
) -> FastAPI:
    assert rules_side.check is not None
    return admin_app(
        AdminBackend(
            desk=records.desk,
            database=records.database,
            directory=records.directory,
            rules=rules,
            limiter=limiter,
            store=stores.store,
            counters=stores.counters,
            policy=policy,
            check_rules=rules_side.check,
            sources=partial(_sources, settings, records, rules),
            verifier=callers,
            key_secret=records.key_secret,
            first_token=settings.rls_admin_token.get_secret_value(),
            needs_tokens=settings.rls_admin_auth == "tokens",
        )
    )


def _sources(settings: Settings, records: Records, rules: Rules) -> Sequence[SourceState]:
    """Rules are in force together or not at all, whatever source they are of: the record of updates is everybody's."""
    loaded = rules.current
    of_rules = SourceState(
        name="xds" if settings.config_type == XDS else "files",
        version=loaded.version if loaded else None,
        digest=loaded.digest if loaded else None,
        changed_s=loaded.loaded_at.timestamp() if loaded else None,
        failures=rules.failures,
        last_error=str(rules.last_error) if rules.last_error else None,
    )
    state = records.follower.state
    of_database = SourceState(
        name="database",
        connected=state.is_connected,
        sequence=state.sequence,
        loaded_from=state.origin,
        changed_s=state.last_change_s,
        last_error=state.last_error or None,
    )
    return of_rules, of_database
