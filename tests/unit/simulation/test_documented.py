"""The examples of docs/testing.md produce the documented output."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ratelimit_rls.cli import main

PAGE = (Path(__file__).parents[3] / "docs" / "testing.md").read_text()
FILES = dict(re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = re.findall(r"```console\n\$ ratelimit-rls (.*?)\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("command", "output"), COMMANDS, ids=[command[:40] for command, _ in COMMANDS])
def test_command_prints_the_documented_output(
    command: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)

    main(shlex.split(command))

    printed = re.sub(r"replayed in .*", "replayed in …", capsys.readouterr().out)
    assert printed == output


def test_page_has_all_examples() -> None:
    assert len(FILES) == 8
    assert len(COMMANDS) == 6
