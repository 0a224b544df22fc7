"""The Lua files: their headers, the commands they use, and mul_div, on which exactness depends."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lupa.luajit21 import LuaRuntime

from ratelimit_rls.core.model import Algorithm
from ratelimit_rls.store.lua_script import (
    DECIDING,
    LIBRARY,
    WATCHERS,
    definitions,
    function_library,
    function_name,
    read_source,
    script,
    script_dir,
    script_sha,
)
from tests.support.servers import RedisServer

HEADER = ("State", "Bounds", "Retry", "Reset", "Cost")


@pytest.mark.parametrize("algorithm", list(Algorithm), ids=lambda algorithm: algorithm.value)
def test_every_algorithm_has_a_contract_header(algorithm: Algorithm) -> None:
    header, body = read_source(algorithm.value).removeprefix("--[[\n").split("]]\n", 1)

    assert header.startswith(f"{algorithm.value}.lua — ")
    assert [word for word in HEADER if not re.search(rf"^{word} +\S", header, re.MULTILINE)] == []
    for function in ("read", "spend", "write"):
        assert f"function {algorithm.value}.{function}(" in body


def test_script_has_every_file_once() -> None:
    found = {path.name for path in script_dir().iterdir() if path.name.endswith(".lua")}
    library = {path.name for path in (script_dir() / "lib").iterdir()}

    decided = {f"{algorithm.value}.lua" for algorithm in Algorithm} | {f"{watcher}.lua" for watcher in WATCHERS}
    assert found == decided | {f"{name}.lua" for name in DECIDING} | {"keyspace.lua"}
    assert library == {f"{name}.lua" for name in LIBRARY}


def test_keyspace_has_exactly_the_commands_used() -> None:
    used = set(re.findall(r'redis\.p?call\("(\w+)"', script().decode()))
    offered = set(re.findall(r"function commands\.(\w+)", read_source("keyspace")))

    # TIME is used in Redis only: the embedded store always passes the time.
    assert used - {"TIME"} == offered


def test_header_documents_all_spec_fields() -> None:
    text = read_source("lib/read_spec")

    assert '"algorithm|limit|window_us|burst|cost|flags"' in text
    assert len(re.findall(r"\(\[\^\|\]\*\)", text)) == 5  # and the last one, (.*)


def test_script_sha_matches_redis(redis_server: RedisServer) -> None:
    assert redis_server.cli("SCRIPT", "LOAD", script()) == script_sha()


def test_function_name_is_that_of_its_text() -> None:
    assert function_library().startswith(b"#!lua name=%s\n" % function_name())
    assert function_name().endswith(script_sha()[:16])


def _mul_div() -> Callable[[int, int, int], tuple[int, int]]:
    lua = LuaRuntime(encoding=None, unpack_returned_tuples=True)
    return lua.execute((definitions() + "\nreturn mul_div").encode())


MUL_DIV = _mul_div()


@settings(max_examples=500, deadline=None, database=None)
@given(st.integers(0, 2**51), st.integers(0, 2**46), st.integers(1, 2**45 - 1))
def test_mul_div_is_exact(a: int, b: int, c: int) -> None:
    quotient, rest = divmod(a * b, c)
    if quotient < 2**53:
        assert tuple(int(number) for number in MUL_DIV(a, b, c)) == (quotient, rest)
