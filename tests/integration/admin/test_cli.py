"""The commands `keys` and `tokens`, which use the database without a server."""

from __future__ import annotations

import asyncio
import json

import pytest

from ratelimit_rls.cli import main
from ratelimit_rls.database.administration import AuditRow
from ratelimit_rls.database.database import Database
from ratelimit_rls.database.repository import Repository
from ratelimit_rls.identity.accounts import ApiKey
from ratelimit_rls.identity.key_format import matches, new_secret

pytestmark = pytest.mark.slow

SECRET = "a secret for the hashes of keys"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, upgraded_url: str) -> None:
    monkeypatch.setenv("RLS_DATABASE_URL", upgraded_url)
    monkeypatch.setenv("RLS_KEY_SECRET", SECRET)
    monkeypatch.setenv("LOGNAME", "jane")


def key_and_audit(url: str, key_id: str) -> tuple[ApiKey, list[AuditRow]]:
    async def read() -> tuple[ApiKey, list[AuditRow]]:
        database = Database(url)
        async with Repository(database).reading() as reader:
            found = await reader.key(key_id), await reader.audit(kind="key")
        await database.close()
        return found

    return asyncio.run(read())


def test_keys_commands(capsys: pytest.CaptureFixture[str], upgraded_url: str) -> None:
    assert main(["keys", "create", "--user", "alice", "--name", "laptop", "--expires", "90d"]) == 0
    printed = capsys.readouterr()
    text = printed.out.strip()
    key_id = text.split("_")[1]
    assert text.startswith("rlk_")
    assert text not in printed.err
    key, (made,) = key_and_audit(upgraded_url, key_id)
    assert (key.user_id, key.name, matches(SECRET.encode(), text, key.digest)) == ("alice", "laptop", True)
    assert (made.actor, made.action) == ("cli:jane", "create")
    assert main(["keys", "list", "--user", "alice", "--format", "json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["key_id"], listed["revoked_s"]) == (key_id, None)
    assert main(["keys", "list", "--user", "bob"]) == 0
    assert capsys.readouterr().out.splitlines() == ["KEY  USER  NAME  TIER  EXPIRES  STATE"]
    assert main(["keys", "revoke", text]) == 0
    assert capsys.readouterr().out == f"{key_id} of user alice is revoked\n"
    assert key_and_audit(upgraded_url, key_id)[0].revoked_s is not None
    assert main(["keys", "revoke", new_secret("rlk").public_id]) == 1
    assert main(["keys", "create", "--user", "alice", "--tier", "none such"]) == 1


@pytest.mark.parametrize("upgraded_url", ["sqlite"], indirect=True)
def test_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokens", "create", "--role", "write", "--name", "ci"]) == 0
    text = capsys.readouterr().out.strip()
    assert text.startswith("rla_")
    assert main(["tokens", "list"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert (head.split()[0], row.split()) == ("TOKEN", [text.split("_")[1], "ci", "write", "never", "never", "active"])
    for wrong in (new_secret("rlk").text, text + "x"):
        assert main(["tokens", "revoke", wrong]) == 2
        assert wrong not in capsys.readouterr().err
    assert main(["tokens", "revoke", text.split("_")[1]]) == 0
    assert main(["tokens", "list", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out.partition("\n")[2])[0]["revoked_s"] is not None


@pytest.mark.parametrize("upgraded_url", ["sqlite"], indirect=True)
def test_missing_settings_are_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLS_DATABASE_URL")
    assert main(["keys", "list"]) == 2
    assert "RLS_DATABASE_URL" in capsys.readouterr().err
    assert main(["tokens", "create", "--role", "owner", "--name", "x"]) == 2
    assert main(["keys", "create", "--user", "a", "--expires", "soon"]) == 2
    assert "90d" in capsys.readouterr().err
