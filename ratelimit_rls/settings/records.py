"""The variables of what is kept about callers: the database, identity, and the API of administrators."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, Field, SecretStr

from ratelimit_rls.settings.parse import Count, Duration, Float, Port

if TYPE_CHECKING:
    from ratelimit_rls.settings import Settings

DAY = timedelta(days=1)


class RecordsSettings(BaseModel):
    """Database"""

    rls_database_url: SecretStr = Field(
        SecretStr(""),
        description="sqlite:///file or postgresql://user:password@host/name; empty: no database, no admin API.",
    )
    rls_database_poll: Duration = Field(
        timedelta(seconds=30), gt=timedelta(), description="Between two looks for changes nobody told of."
    )
    rls_snapshot_file: str = Field(
        "", description="File that keeps what was last read, to start from when the database is away; empty: none."
    )
    rls_audit_sample: Float = Field(0.01, ge=0, le=1, description="Share of admitted calls that are recorded.")
    rls_audit_buffer: Count = Field(
        100_000, description="Recorded decisions that may wait for the database; the rest is counted as dropped."
    )
    rls_usage_lines: Count = Field(
        10_000, gt=0, description="Callers, rules and endpoints whose usage a process tells apart in a minute."
    )
    rls_region: str = Field("", description="Where this runs, as records tell it.")
    rls_audit_retention: Duration = Field(90 * DAY, description="For how long recorded decisions stay.")
    rls_usage_retention: Duration = Field(30 * DAY, description="For how long usage by the minute stays.")
    rls_usage_total_retention: Duration = Field(365 * DAY, description="For how long usage by hour and day stays.")
    rls_archive: str = Field(
        "", description="Directory or fsspec URL where old records go, as Parquet; empty: they stay where they are."
    )


class IdentitySettings(BaseModel):
    """Identity"""

    rls_key_secret: SecretStr = Field(
        SecretStr(""), description="Secret that hashes of API keys and tokens are keyed with; the same everywhere."
    )
    rls_jwt_issuers: str = Field("", description="File (YAML) with the issuers whose JSON Web Tokens are believed.")


class AdminSettings(BaseModel):
    """Admin API"""

    rls_admin_host: str = Field("127.0.0.1", description="Address of the admin API.")
    rls_admin_port: Port = Field(8082, description="Port of the admin API; 0 takes a free one.")
    rls_admin_auth: Literal["tokens", "none"] = Field(
        "tokens", description="Who may use it: holders of tokens, or (on loopback only) anybody."
    )
    rls_admin_token: SecretStr = Field(
        SecretStr(""), description="A token with the role admin beside those in the database, to begin with."
    )
    rls_limiter_domain: str = Field("", description="Domain of calls to the gRPC RateLimiter that name none.")


def refusals(settings: Settings) -> Iterator[str]:
    if settings.rls_admin_auth == "none" and not is_loopback(settings.rls_admin_host):
        yield (
            f"RLS_ADMIN_AUTH=none is for loopback only, and RLS_ADMIN_HOST is {settings.rls_admin_host!r}; "
            "use RLS_ADMIN_AUTH=tokens, or RLS_ADMIN_HOST=127.0.0.1"
        )
    for name, least in ("rls_key_secret", 16), ("rls_admin_token", 20):
        given = getattr(settings, name).get_secret_value()
        if given and len(given) < least:
            yield f"{name.upper()} is too short; it must have at least {least} characters"


def warnings(settings: Settings) -> Iterator[str]:
    if settings.rls_database_url.get_secret_value():
        return
    for group in RecordsSettings, AdminSettings:
        for name in group.model_fields:
            if name not in ("rls_database_url", "rls_limiter_domain") and settings.given(name):
                yield f"{name.upper()} has no effect without RLS_DATABASE_URL"


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
