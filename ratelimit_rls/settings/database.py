"""Variables of the database, of identity, and of the admin API."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from pydantic import BaseModel, Field, SecretStr

from ratelimit_rls.settings.parse import Count, Duration, Float, Port

DAY = timedelta(days=1)


class DatabaseSettings(BaseModel):
    """Database"""

    rls_database_url: SecretStr = Field(
        SecretStr(""),
        description="sqlite:///file or postgresql://user:password@host/name; empty: no database, no admin API.",
    )
    rls_database_poll: Duration = Field(
        timedelta(seconds=30), gt=timedelta(), description="Polling interval for missed change notifications."
    )
    rls_snapshot_file: str = Field(
        "", description="File with the last known accounts, for starts without the database; empty: none."
    )
    rls_audit_sample: Float = Field(0.01, ge=0, le=1, description="Fraction of admitted calls to record.")
    rls_audit_buffer: Count = Field(
        100_000, description="Maximum recorded decisions waiting for the database; more are dropped and counted."
    )
    rls_audit_refusals_per_minute: Count = Field(
        1000,
        description="Maximum denials recorded per minute and process; one with 160 bytes of text or more counts as "
        "several. Others are only counted. 0: no bound.",
    )
    rls_usage_lines: Count = Field(
        10_000, gt=0, description="Maximum distinct callers, rules and endpoints in the usage per minute and process."
    )
    rls_region: str = Field("", description="Region of this process, stored with recorded decisions.")
    rls_audit_retention: Duration = Field(
        90 * DAY,
        description="Age at which RLS_ARCHIVE, or `db retain`, archives and drops recorded decisions; otherwise they "
        "are kept.",
    )
    rls_usage_retention: Duration = Field(
        30 * DAY,
        description="Age at which RLS_ARCHIVE, or `db retain`, archives and drops usage per minute; otherwise it is "
        "kept.",
    )
    rls_usage_total_retention: Duration = Field(
        365 * DAY,
        description="Age at which RLS_ARCHIVE, or `db retain`, archives and drops usage per hour and day; otherwise it "
        "is kept.",
    )
    rls_archive: str = Field(
        "",
        description="Directory or fsspec URL to archive old decisions and usage to, as Parquet; empty: nothing is "
        "archived or dropped.",
    )


class IdentitySettings(BaseModel):
    """Identity"""

    rls_key_secret: SecretStr = Field(
        SecretStr(""), description="Secret for hashing API keys and tokens; the same in all processes."
    )
    rls_jwt_issuers: str = Field("", description="YAML file with the trusted issuers of JSON Web Tokens.")


class AdminSettings(BaseModel):
    """Admin API"""

    rls_admin_host: str = Field("127.0.0.1", description="Address of the admin API.")
    rls_admin_port: Port = Field(8082, description="Port of the admin API; 0 takes a free one.")
    rls_admin_auth: Literal["tokens", "none"] = Field(
        "tokens", description="Authentication of the admin API: tokens, or none (on loopback only)."
    )
    rls_admin_token: SecretStr = Field(
        SecretStr(""), description="Bootstrap token with the role admin, besides those in the database."
    )
