"""Published packages: sdist, the wheel built from it, and a call in a clean environment."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from ratelimit_rls import __version__
from tests.packaging.dockerfile import Image
from tests.support.grpc_client import ask, rate_limit_request
from tests.support.servers import Service

ROOT = Path(__file__).parents[2]
OK, OVER_LIMIT = 1, 2
RULES = "domain: edge\ndescriptors: [{key: user, rate_limit: {unit: day, requests_per_unit: 1, algorithm: gcra}}]\n"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(*command: str | Path, cwd: Path) -> str:
    pins = str(ROOT / "constraints.txt")
    # Paths of this process are not inherited: the wheel must not find its files in the checkout.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"PIP_CONSTRAINT": pins, "PIP_BUILD_CONSTRAINT": pins}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of the checkout, and the wheel built from it."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", out, ROOT, cwd=out)
    return out


@pytest.fixture(scope="module")
def python(image: Image) -> Path:
    """A clean environment with the wheel and its dependencies: that of the image, since creating one takes 30 s."""
    return image.at("/opt/ratelimit-rls/bin/python")


def test_wheel_from_sdist_equals_wheel_from_checkout(dist: Path, image: Image) -> None:
    (published,), (tried,) = dist.glob("*.whl"), image.root.parent.glob("*/wheels/*.whl")
    contents = [{one.filename: one.CRC for one in zipfile.ZipFile(wheel).infolist()} for wheel in (published, tried)]
    assert contents[0] == contents[1]


def test_wheel_contains_lua_scripts_and_message_descriptors(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"ratelimit_rls/lua/{path.relative_to(ROOT / 'lua')}" for path in (ROOT / "lua").rglob("*.lua")}

    assert expected
    assert expected <= names
    assert any(name.endswith(".binpb") for name in names)
    assert "ratelimit_rls/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "lua/", "bench/"))]


def test_sdist_contains_licence_and_changelog(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}

    assert {"LICENSE", "CHANGELOG.md", "README.md", "pyproject.toml"} <= names


def test_installed_command_prints_its_version(python: Path, tmp_path: Path) -> None:
    assert (
        run(python.with_name("ratelimit-rls"), "--version", cwd=tmp_path)
        == f"ratelimit-rls {__version__} (pure Python)\n"
    )


def test_installed_package_serves_with_its_own_scripts(python: Path, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(RULES)

    class Installed(Service):
        def command(self) -> list[str | Path]:
            return [python, "-I", "-m", "ratelimit_rls", "serve"]

    with Installed({"RLS_RULES": tmp_path / "rules.yaml"}) as service:
        request = rate_limit_request("edge", {"user": "ann"})
        assert [ask(service.grpc_address, request).overall_code for _ in range(2)] == [OK, OVER_LIMIT]
