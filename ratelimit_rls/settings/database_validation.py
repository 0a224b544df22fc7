"""Validation of the settings of the database, of identity, and of the admin API."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address

from ratelimit_rls.settings.database import AdminSettings, DatabaseSettings
from ratelimit_rls.settings.values import SettingsValues


def errors(settings: SettingsValues) -> Iterator[str]:
    if settings.rls_admin_auth == "none" and not is_loopback(settings.rls_admin_host):
        yield (
            f"RLS_ADMIN_AUTH=none is for loopback only, and RLS_ADMIN_HOST is {settings.rls_admin_host!r}; "
            "use RLS_ADMIN_AUTH=tokens, or RLS_ADMIN_HOST=127.0.0.1"
        )
    for name, min_length in ("rls_key_secret", 16), ("rls_admin_token", 20):
        secret = getattr(settings, name).get_secret_value()
        if secret and len(secret) < min_length:
            yield f"{name.upper()} is too short; it must have at least {min_length} characters"


def warnings(settings: SettingsValues) -> Iterator[str]:
    if settings.rls_database_url.get_secret_value():
        return
    for group in DatabaseSettings, AdminSettings:
        for name in group.model_fields:
            if name not in ("rls_database_url", "rls_limiter_domain") and settings.given(name):
                yield f"{name.upper()} has no effect without RLS_DATABASE_URL"


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
