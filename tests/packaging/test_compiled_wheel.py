"""The wheel whose hot path is compiled (hatch_build.py): its contents, and the tests of the compiled modules."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from ratelimit_rls import __version__
from tests.support.only_compiled import ROOT, compiled_modules

TESTS = [
    "tests/property",
    "tests/conformance",
    *(f"tests/unit/{folder}" for folder in ("core", "store", "telemetry", "transport")),
]
"""All that import a compiled module without starting a server."""

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(*command: str | Path, paths: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a Python command in the checkout, which is not on its path. Neither are this process's options inherited."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    pins = str(ROOT / "constraints.txt")
    environment |= {"PIP_CONSTRAINT": pins, "PIP_BUILD_CONSTRAINT": pins, "PYTHONPATH": paths, **variables}
    return subprocess.run([sys.executable, "-P", *command], cwd=ROOT, env=environment, capture_output=True, text=True)


def build(out: Path, **variables: str) -> Path:
    """Build a wheel as an operator does who asks for a compiled one."""
    done = run("-m", "build", "--wheel", "--outdir", out, ROOT, RATELIMIT_RLS_COMPILE="1", **variables)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    return directory


@needs_compiler
def test_wheel_has_an_extension_beside_the_source_of_each_hot_module(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    extensions = {str(path.with_suffix(suffix)) for path in compiled_modules()}

    assert {name for name in names if name.endswith(suffix)} == {*extensions, f"ratelimit_rls__mypyc{suffix}"}
    assert {str(path) for path in compiled_modules()} <= names
    assert not wheel.name.endswith("-py3-none-any.whl")


@needs_compiler
def test_compiled_package_says_so(unpacked: Path) -> None:
    done = run("-m", "ratelimit_rls", "--version", paths=str(unpacked))

    assert done.stdout == f"ratelimit-rls {__version__} (compiled)\n", done.stderr


@needs_compiler
def test_compiled_package_passes_the_tests_of_the_hot_path(unpacked: Path) -> None:
    options = ["-q", "-o", "pythonpath=", "-p", "tests.support.only_compiled"]
    done = run("-m", "pytest", *options, *TESTS, paths=f"{unpacked}{os.pathsep}{ROOT}")

    assert done.returncode == 0, f"{done.stdout[-10_000:]}\n{done.stderr}"


def test_wheel_is_pure_python_without_a_compiler(tmp_path: Path) -> None:
    wheel = build(tmp_path, CC="no-such-compiler")

    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
