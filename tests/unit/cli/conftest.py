"""Fixtures that run commands in this process and capture output and exit code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ratelimit_rls.cli import main
from ratelimit_rls.settings.catalogue import VARIABLES

RULES = """\
domain: edge
descriptors:
  - key: plan
    value: free
    descriptors:
      - key: user
        rate_limit: {unit: minute, requests_per_unit: 10, algorithm: gcra, burst: 5}
  - key: path
    value: /v1/*
    shadow_mode: true
    rate_limit: {unit: second, requests_per_unit: 5, name: five}
  - key: plan
    rate_limit: {unit: minute, requests_per_unit: 100, replaces: [{name: five}]}
  - key: staff
    rate_limit: {unlimited: true}
"""


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)

    def run(*arguments: str | Path) -> Ended:
        code = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return Ended(code, printed.out, printed.err)

    return run


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of valid rules, in the current directory."""
    monkeypatch.chdir(tmp_path)
    path = Path("api.yaml")
    path.write_text(RULES)
    return path
