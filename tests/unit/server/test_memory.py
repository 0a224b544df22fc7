"""Large blocks of memory are returned to the system when they are freed."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys
from ratelimit_rls.server.memory import tune_malloc

class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info
assert tune_malloc() is (sys.argv[1] == "tuned")
for _ in range(2):  # glibc's threshold adapts to the first blocks that are freed
    mapped = mallinfo().hblks
    blocks = [b"x" * (200_000 + number) for number in range(100)]
    mapped = mallinfo().hblks - mapped
    del blocks
print(mapped)
"""
"""Prints how many of 100 large blocks have a mapping of their own."""

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="this is not glibc 2.33"
)


def mapped_blocks(kind: str, **environment: str) -> int:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", PROGRAM, kind]
    return int(subprocess.run(command, env={**inherited, **environment}, check=True, capture_output=True).stdout)


def test_large_blocks_are_mapped_and_so_returned() -> None:
    assert mapped_blocks("tuned") == 100


def test_settings_of_the_user_are_respected() -> None:
    assert mapped_blocks("as it was", MALLOC_ARENA_MAX="4") == 0
