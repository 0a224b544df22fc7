"""Every test there is, as `make test` runs them: two processes at a time, since most wait for servers most of the time.

Those that measure how a server that is killed or paused is borne come last, and alone.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

SLOW = "(slow or e2e) and not chaos"
BESIDE = ["tests/e2e", "tests/packaging", "tests/integration/server", "tests/integration/transport"]
BESIDE += sorted(map(str, Path("tests/integration").glob("test_*.py")))
"""About half of the slow ones."""


def pytest(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", *arguments]


def main() -> int:
    with tempfile.TemporaryFile("w+") as log:
        # Not by a shell's &, which would have every server under test ignore Ctrl-C.
        others = subprocess.Popen(pytest("-m", SLOW, *BESIDE), stdout=log, stderr=log)
        codes = [
            subprocess.call(pytest()),
            subprocess.call(pytest("-m", SLOW, *(f"--ignore={path}" for path in BESIDE))),
            others.wait(),
        ]
        log.seek(0)
        print(f"\nBeside these:\n{log.read()}", flush=True)
    codes.append(subprocess.call(pytest("-m", "chaos")))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
