"""The README's identity example works line by line, with the service and Envoy as started by the Makefile."""

from __future__ import annotations

import re
import shutil
import subprocess
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.support.admin import TOKEN, ServiceWithDatabase
from tests.support.servers import SANDBOXES, EnvoyServer, Upstream
from tests.support.windows import HOUR_S, wait_for_time_left

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
_SESSION = re.compile(r"<!-- run -->\n```console\n(.*?)```", re.DOTALL)


@pytest.mark.timeout(120)
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not on PATH, and the commands are written for it")
def test_readme_commands_produce_the_documented_output(tmp_path: Path, upstream: Upstream) -> None:
    (session,) = _SESSION.findall((ROOT / "README.md").read_text())
    commands = [line.removeprefix("$ ") for line in session.splitlines() if line.startswith("$ ")]
    wanted = [line for line in session.splitlines() if not line.startswith("$ ")]
    (tmp_path / ".run").mkdir()
    (tmp_path / ".run" / "admin-token").write_text(TOKEN)
    with (
        ServiceWithDatabase(f"sqlite:///{tmp_path}/records.db", {"RLS_RULES": ROOT / "descriptors"}) as service,
        EnvoyServer(SANDBOXES / "api-keys" / "envoy.yaml", {8000: upstream.port, 8081: service.grpc_port}) as envoy,
    ):
        script = "\n".join(commands)
        script = script.replace("localhost:8082", f"127.0.0.1:{service.admin_port}")
        script = script.replace("http://", "").replace("localhost:10000", envoy.url)
        wait_for_time_left(HOUR_S, min_left_s=30)
        done = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    printed = done.stdout.splitlines()
    assert len(printed) == len(wanted), done
    for seen, documented in zip(printed, wanted, strict=True):
        assert fnmatchcase(seen, documented.replace("[", "[[]").replace("…", "*")), (seen, documented)
