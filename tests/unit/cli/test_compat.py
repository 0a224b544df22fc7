"""`ratelimit`, the command name of envoyproxy/ratelimit."""

from __future__ import annotations

import pytest

from ratelimit_rls import cli
from ratelimit_rls.cli import compat


@pytest.mark.parametrize(
    ("given", "done"),
    [
        ([], ["serve"]),
        (["--quotaAddr=a:1", "-v", "password=secret"], ["serve"]),
        (["check", "--strict", "rules.yaml"], ["check", "--strict", "rules.yaml"]),
        (["--version"], ["--version"]),
    ],
)
def test_ratelimit_command_serves_unless_given_a_verb(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: list[str], done: list[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["ratelimit", *given])
    ran: list[list[str]] = []
    monkeypatch.setattr(cli, "main", lambda arguments: ran.append(arguments) or 0)  # type: ignore[func-returns-value]
    assert compat.main() == 0
    assert ran == [done]
    message = capsys.readouterr().err
    assert ("--quotaAddr -v password" in message) == (len(given) == 3 and done == ["serve"])
    assert "secret" not in message
