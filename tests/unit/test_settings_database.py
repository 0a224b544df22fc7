"""Settings of the database, identity and the admin API: errors and warnings."""

from __future__ import annotations

import pytest

from ratelimit_rls.errors import SettingsError
from tests.unit.conftest import Read


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.9.9.9"])
def test_admin_api_without_auth_may_listen_on_loopback(read: Read, host: str) -> None:
    assert read(RLS_ADMIN_AUTH="none", RLS_ADMIN_HOST=host).rls_admin_host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com"])
def test_admin_api_without_auth_must_listen_on_loopback(read: Read, host: str) -> None:
    with pytest.raises(SettingsError, match="RLS_ADMIN_AUTH=none is for loopback only"):
        read(RLS_ADMIN_AUTH="none", RLS_ADMIN_HOST=host)
    assert read(RLS_ADMIN_HOST=host).rls_admin_auth == "tokens"


@pytest.mark.parametrize(("name", "least"), [("RLS_KEY_SECRET", 16), ("RLS_ADMIN_TOKEN", 20)])
def test_short_secret_is_rejected_and_not_quoted(read: Read, name: str, least: int) -> None:
    with pytest.raises(SettingsError, match=f"{name} is too short; it must have at least {least}") as raised:
        read(**{name: "s" * (least - 1)})
    assert "sss" not in str(raised.value)
    assert read(**{name: "s" * least})


def test_database_settings_without_database_warn(read: Read) -> None:
    assert read(RLS_AUDIT_SAMPLE="0.5").warnings() == ["RLS_AUDIT_SAMPLE has no effect without RLS_DATABASE_URL"]
    assert read(RLS_AUDIT_SAMPLE="0.5", RLS_DATABASE_URL="sqlite:///a.db").warnings() == []


def test_database_url_is_secret(read: Read) -> None:
    assert "hunter2" not in repr(read(RLS_DATABASE_URL="postgresql://u:hunter2@h/d"))
