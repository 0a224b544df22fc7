"""The Lua text, put together once from the files of lua/: the same for Redis and for the embedded store.

The definitions are the library, the algorithms and the watchers, decide.lua is the script proper. Redis runs one after
the other with every call; the embedded store runs the definitions once and keeps the rest as a function.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha1
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from ratelimit_rls.core.model import Algorithm

WATCHERS = ("penalty", "warning")
LIBRARY = ("bounds", "mul_div", "needed", "place", "place_in_calendar", "read_spec", "ttl_ms", "whole_number")


def script_dir() -> Traversable:
    """In a wheel the scripts are inside the package; in a checkout they are beside it."""
    packaged = files("ratelimit_rls") / "lua"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parents[2] / "lua"


def read(name: str) -> str:
    return (script_dir() / f"{name}.lua").read_text("utf-8")


@cache
def definitions() -> str:
    parts = [read(f"lib/{name}") for name in LIBRARY]
    parts.append("local algorithms = {}\n")
    parts += [read(algorithm.value) for algorithm in Algorithm]
    parts += [read(watcher) for watcher in WATCHERS]
    return "\n".join(parts)


@cache
def script() -> bytes:
    """What Redis runs."""
    return f"{definitions()}\n{read('decide')}".encode()


@cache
def script_sha() -> bytes:
    """The name under which Redis knows the script: SHA-1 is its choice, not a safeguard of ours."""
    return sha1(script(), usedforsecurity=False).hexdigest().encode()
