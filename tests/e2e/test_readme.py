"""What README shows of identity happens, line by line, with the service and Envoy as the Makefile starts them."""

from __future__ import annotations

import re
import shutil
import subprocess
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.admin import TOKEN, Recorded
from tests.servers import SANDBOXES, EnvoyServer, Upstream

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
_SESSION = re.compile(r"<!-- run -->\n```console\n(.*?)```", re.DOTALL)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not on PATH, and the commands are written for it")
def test_the_commands_answer_as_shown(tmp_path: Path, upstream: Upstream) -> None:
    (session,) = _SESSION.findall((ROOT / "README.md").read_text())
    commands = [line.removeprefix("$ ") for line in session.splitlines() if line.startswith("$ ")]
    wanted = [line for line in session.splitlines() if not line.startswith("$ ")]
    (tmp_path / ".run").mkdir()
    (tmp_path / ".run" / "admin-token").write_text(TOKEN)
    with (
        Recorded(f"sqlite:///{tmp_path}/records.db", {"RLS_RULES": ROOT / "descriptors"}) as service,
        EnvoyServer(SANDBOXES / "api-keys" / "envoy.yaml", {8000: upstream.port, 8081: service.grpc_port}) as envoy,
    ):
        script = "\n".join(commands)
        script = script.replace("localhost:8082", f"127.0.0.1:{service.admin_port}")
        script = script.replace("http://", "").replace("localhost:10000", envoy.url)
        done = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    told = done.stdout.splitlines()
    assert len(told) == len(wanted), done
    for seen, shown in zip(told, wanted, strict=True):
        assert fnmatchcase(seen, shown.replace("[", "[[]").replace("…", "*")), (seen, shown)
