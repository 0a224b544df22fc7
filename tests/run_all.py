"""Runs all tests for `make test`: the quick ones, the slow ones, then those with killed or paused servers.

The last ones run one after the other, and the fault soak alone at the end: they count calls that miss their deadlines,
which also happens on a busy machine.
"""

from __future__ import annotations

import subprocess
import sys

FAULT_SOAK = "tests/chaos/test_fault_soak.py"
RUNS = [
    ["--hypothesis-profile=many"],
    ["-m", "(slow or e2e) and not chaos"],
    ["-m", "chaos", "-n", "0", f"--ignore={FAULT_SOAK}"],
    ["-m", "chaos", FAULT_SOAK],
]


def main() -> int:
    """Run all of them, even if one fails, and return the worst exit code."""
    return max([subprocess.call([sys.executable, "-m", "pytest", "-q", *arguments]) for arguments in RUNS])


if __name__ == "__main__":
    sys.exit(main())
