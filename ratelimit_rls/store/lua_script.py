"""The Lua script, assembled once from the files of lua/: the same for Redis and for the embedded store.

The definitions are the library, the algorithms and the watchers; decide.lua is the script proper. Redis runs both with
every call; the embedded store runs the definitions once and keeps the rest as a function.
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
    """Return the folder of the scripts: inside the package in a wheel, beside it in a checkout."""
    packaged = files("ratelimit_rls") / "lua"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parents[2] / "lua"


def read_source(name: str) -> str:
    return (script_dir() / f"{name}.lua").read_text("utf-8")


@cache
def definitions() -> str:
    parts = [read_source(f"lib/{name}") for name in LIBRARY]
    parts.append("local algorithms = {}\n")
    parts += [read_source(algorithm.value) for algorithm in Algorithm]
    parts += [read_source(watcher) for watcher in WATCHERS]
    return "\n".join(parts)


@cache
def script() -> bytes:
    """Return the script that Redis runs."""
    return f"{definitions()}\n{read_source('decide')}".encode()


@cache
def script_sha() -> bytes:
    """Return the name of the script in Redis. SHA-1 is Redis's choice; our security does not depend on it."""
    return sha1(script(), usedforsecurity=False).hexdigest().encode()
