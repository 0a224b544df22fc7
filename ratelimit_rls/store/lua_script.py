"""The Lua script, assembled once from the files of lua/: the same for Redis and for the embedded store.

The definitions are the library, the algorithms, the watchers, and the functions that decide a batch. As a Redis
function (Redis 7, Valkey) and in the embedded store they run once; as a script (EVALSHA), with every call.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha1
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from ratelimit_rls.core.model import Algorithm

WATCHERS = ("penalty", "warning")
LIBRARY = (
    "bounds",
    "builtins",
    "jitter",
    "mul_div",
    "needed",
    "number32",
    "place",
    "place_in_calendar",
    "read_spec",
    "ttl_ms",
    "unknown_form",
    "whole_number",
)
DECIDING = ("runs", "short_paths", "states", "records", "watchers", "calls", "decide")


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
    parts += [read_source(name) for name in (*WATCHERS, *DECIDING)]
    return "\n".join(parts)


@cache
def script() -> bytes:
    """Return the script that Redis runs."""
    return f"{definitions()}\nreturn decide(KEYS, ARGV)\n".encode()


@cache
def function_name() -> bytes:
    """Return the name of the Redis function, which is also that of its library.

    Names are global on a server. This one has the digest of the text, so that two releases can share a server.
    """
    return b"ratelimit_rls_" + script_sha()[:16]


@cache
def function_library() -> bytes:
    """Return the script as a library of one Redis function.

    The definitions run with the first call: while a library is loaded, Redis offers it neither `math` nor `string`. On
    a cluster, the keys of a run may belong to several slots of the server.
    """
    name = function_name().decode()
    return f"""#!lua name={name}
local decide_batch
local function load_definitions()
{definitions()}
return decide
end
redis.register_function{{
  function_name = "{name}",
  callback = function(keys, arguments)
    decide_batch = decide_batch or load_definitions()
    return decide_batch(keys, arguments)
  end,
  flags = {{ "allow-cross-slot-keys" }},
}}
""".encode()


@cache
def script_sha() -> bytes:
    """Return the name of the script in Redis. SHA-1 is Redis's choice; our security does not depend on it."""
    return sha1(script(), usedforsecurity=False).hexdigest().encode()
