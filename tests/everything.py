"""Every test there is, as `make test` runs them: two processes at a time, since most wait for servers most of the time.

Those that measure how a server that is killed or paused is borne come last: nothing that takes all of a core is there
then, only the soak with faults, which takes half of one.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

SLOW = "(slow or e2e) and not chaos"
BESIDE = ["tests/e2e", "tests/packaging", "tests/integration/server", "tests/integration/transport"]
BESIDE += sorted({*map(str, Path("tests/integration").glob("test_*.py"))} - {"tests/integration/test_once.py"})
"""About half of the slow ones, by the time they take."""

SOAK = "tests/chaos/test_fault_soak.py"


def pytest(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", *arguments]


def pytest_but(paths: list[str], *arguments: str) -> list[str]:
    return pytest(*arguments, *(f"--ignore={path}" for path in paths))


def together(commands: list[list[str]], beside: list[str]) -> list[int]:
    """Exit codes of commands that run one after the other, and of one beside them, which is shown when all are over."""
    with tempfile.TemporaryFile("w+") as log:
        # Not by a shell's &, which would have every server under test ignore Ctrl-C.
        other = subprocess.Popen(beside, stdout=log, stderr=log)
        codes = [*map(subprocess.call, commands), other.wait()]
        log.seek(0)
        print(f"\nBeside these:\n{log.read()}", flush=True)
    return codes


def main() -> int:
    quick = pytest("--hypothesis-profile=many")
    codes = together([quick, pytest_but(BESIDE, "-m", SLOW)], beside=pytest("-m", SLOW, *BESIDE))
    codes += together([pytest_but([SOAK], "-m", "chaos")], beside=pytest("-m", "chaos", SOAK))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
