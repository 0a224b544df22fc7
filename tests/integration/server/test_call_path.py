"""The number of files that a reader of the path of a call has to know (tools/call_path.py)."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

MAX_FILES = 22
MAX_TYPES = 4


@pytest.mark.slow
def test_path_of_a_warm_call_does_not_grow() -> None:
    command = [sys.executable, "-m", "tools.call_path", "--store", "embedded"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    found = re.search(r"^embedded: (\d+) files, \d+ functions, (\d+) types constructed$", output, re.MULTILINE)
    assert found is not None, output
    files, types = map(int, found.groups())
    assert "  pipeline/pipeline.py: " in output
    assert "core.model.StoreResult" in output  # which is the decision of a call that passes
    assert files <= MAX_FILES, output
    assert types <= MAX_TYPES, output
