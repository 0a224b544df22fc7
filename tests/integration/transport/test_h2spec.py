"""h2spec, the conformance test of RFC 9113 and RFC 7541, against the gRPC port of a service process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.service_process import UNRESTRICTIVE_RULES, ServiceProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # go downloads and compiles it once

VERSION = "v2.6.0"
MODULE = f"github.com/summerwind/h2spec/cmd/h2spec@{VERSION}"
DIRECTORY = Path(__file__).parents[3] / "build" / f"h2spec-{VERSION}"
MIN_TESTS = 145
"""Tests that must have run: v2.6.0 has 147 with --strict, other versions on PATH a few less or more."""

_SUMMARY = re.compile(r"^(\d+) tests, (\d+) passed, (\d+) skipped, (\d+) failed$", re.MULTILINE)


@pytest.fixture(scope="module")
def h2spec() -> Path:
    """Return the program: installed by an earlier run, on PATH, or installed now by `go install`."""
    installed = DIRECTORY / "h2spec"
    if installed.exists():
        return installed
    if on_path := shutil.which("h2spec"):
        return Path(on_path)
    go = shutil.which("go")
    if go is None:
        pytest.skip("neither h2spec nor go, which could install it, is on PATH")
    result = subprocess.run(
        [go, "install", MODULE], env={**os.environ, "GOBIN": str(DIRECTORY)}, capture_output=True, text=True
    )
    if result.returncode:
        pytest.skip(f"`go install {MODULE}` failed: {' '.join(result.stderr.split())[-300:]}")
    return installed


def test_all_of_h2spec_passes(h2spec: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(UNRESTRICTIVE_RULES)
    with ServiceProcess({"RLS_RULES": rules}) as service:
        # Its own timeout of 2 s for each frame is too short for a busy machine.
        command = [str(h2spec), "--strict", "--timeout", "10", "--host", "127.0.0.1", "--port", str(service.grpc_port)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=500)

    summary = _SUMMARY.search(result.stdout)
    assert summary is not None, result.stdout + result.stderr
    tests, passed, skipped, failed = map(int, summary.groups())
    assert (passed, skipped, failed) == (tests, 0, 0), result.stdout
    assert tests >= MIN_TESTS
    assert result.returncode == 0
