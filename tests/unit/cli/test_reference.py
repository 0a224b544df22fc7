"""The command under the reference's name."""

from __future__ import annotations

import pytest

from ratelimit_rls import cli
from ratelimit_rls.cli import reference


@pytest.mark.parametrize(
    ("given", "done"),
    [
        ([], ["serve"]),
        (["--quotaAddr=a:1", "-v", "password=secret"], ["serve"]),
        (["check", "--strict", "rules.yaml"], ["check", "--strict", "rules.yaml"]),
        (["--version"], ["--version"]),
    ],
)
def test_it_serves_unless_told_one_of_our_verbs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: list[str], done: list[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["ratelimit", *given])
    ran: list[list[str]] = []
    monkeypatch.setattr(cli, "main", lambda arguments: ran.append(arguments) or 0)
    assert reference.main() == 0
    assert ran == [done]
    said = capsys.readouterr().err
    assert ("--quotaAddr -v password" in said) == (len(given) == 3 and done == ["serve"])
    assert "secret" not in said
