"""Build hook: compiles the modules of the hot path to C with mypyc, for a wheel built with RATELIMIT_RLS_COMPILE=1.

    pip wheel . ─► pure Python, for every platform (the default)
    RATELIMIT_RLS_COMPILE=1 pip wheel . ─► the same sources, and beside those in `modules` an extension each

Python imports an extension in preference to the source beside it. Without the variable nothing is compiled, and
neither a compiler nor mypy is needed. Without a compiler the wheel is pure Python, too; `ratelimit-rls --version` says
which it is. The list `modules` is in pyproject.toml, and docs/adr/0035 says why it is short.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "RATELIMIT_RLS_COMPILE"

# The build has none of the libraries that the package imports: their types are unknown to it. `make check` knows them.
_MYPY_OPTIONS = ("--config-file=", "--ignore-missing-imports", "--follow-imports=silent")


class CompileHook(BuildHookInterface):  # type: ignore[misc, unused-ignore]  # hatchling is there while it builds
    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        return ["mypy[mypyc]"] if os.environ.get(VARIABLE) == "1" else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        # An editable installation reads the sources of a checkout, which would no longer be what runs.
        if os.environ.get(VARIABLE) != "1" or version == "editable":
            return
        if not _has_compiler():
            self.app.display_warning(f"{VARIABLE}=1, but there is no C compiler: the wheel is pure Python")
            return
        self._out = Path(tempfile.mkdtemp(prefix="ratelimit-rls-"))
        compile_modules(self.config["modules"], self._out)
        libraries = self._out / "lib"
        build_data["force_include"] |= {
            str(path): str(path.relative_to(libraries)) for path in sorted(libraries.rglob("*.so"))
        }
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if not build_data["pure_python"]:
            shutil.rmtree(self._out)


def compile_modules(paths: Sequence[str], out: Path) -> None:
    """Compile modules, given by their paths in the working directory, to extensions below `out / "lib"`.

    They become one library and an extension per module that refers to it, so that they call each other directly.
    """
    from mypyc.build import mypycify
    from setuptools import Distribution

    options = [*_MYPY_OPTIONS, f"--cache-dir={out / 'mypy'}", *paths]
    extensions = mypycify(
        options, opt_level="2", debug_level="0", target_dir=str(out / "c"), group_name="ratelimit_rls"
    )
    command = Distribution({"ext_modules": extensions}).get_command_obj("build_ext")
    command.build_lib, command.build_temp = str(out / "lib"), str(out / "objects")
    command.ensure_finalized()
    command.run()


def _has_compiler() -> bool:
    command = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    return shutil.which(shlex.split(command)[0]) is not None
