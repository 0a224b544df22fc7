"""The Lua files as text: their headers, the commands they use, and the one function on which exactness rests."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lupa.luajit21 import LuaRuntime

from ratelimit_rls.core.model import Algorithm
from ratelimit_rls.store.script import LIBRARY, WATCHERS, definitions, read, script, script_dir, script_sha
from tests.servers import RedisServer

HEADER = ("State", "Bounds", "Retry", "Reset", "Cost")


@pytest.mark.parametrize("algorithm", list(Algorithm), ids=lambda algorithm: algorithm.value)
def test_every_algorithm_states_its_contract(algorithm: Algorithm) -> None:
    header, body = read(algorithm.value).removeprefix("--[[\n").split("]]\n", 1)

    assert header.startswith(f"{algorithm.value}.lua — ")
    assert [word for word in HEADER if not re.search(rf"^{word} +\S", header, re.MULTILINE)] == []
    for function in ("read", "spend", "write"):
        assert f"function {algorithm.value}.{function}(" in body


def test_no_file_is_left_out_of_the_script_and_none_is_in_it_twice() -> None:
    found = {path.name for path in script_dir().iterdir() if path.name.endswith(".lua")}
    library = {path.name for path in (script_dir() / "lib").iterdir()}

    decided = {f"{algorithm.value}.lua" for algorithm in Algorithm} | {f"{watcher}.lua" for watcher in WATCHERS}
    assert found == decided | {"decide.lua", "keyspace.lua"}
    assert library == {f"{name}.lua" for name in LIBRARY}


def test_the_keyspace_offers_exactly_the_commands_the_scripts_use() -> None:
    used = set(re.findall(r'redis\.call\("(\w+)"', script().decode()))
    offered = set(re.findall(r"function commands\.(\w+)", read("keyspace")))

    # TIME is for Redis alone: the embedded store is always given the moment.
    assert used - {"TIME"} == offered


def test_the_header_of_decide_names_as_many_spec_fields_as_it_reads() -> None:
    text = read("decide")

    assert "six each: algorithm, limit, window_us, burst, cost, flags" in text
    assert "for i = 4, #ARGV, 6 do" in text


def test_redis_knows_the_script_by_the_name_we_compute(redis_server: RedisServer) -> None:
    assert redis_server.cli("SCRIPT", "LOAD", script()) == script_sha()


def _mul_div() -> Callable[[int, int, int], tuple[int, int]]:
    lua = LuaRuntime(encoding=None, unpack_returned_tuples=True)
    return lua.execute((definitions() + "\nreturn mul_div").encode())  # type: ignore[no-any-return]


MUL_DIV = _mul_div()


@settings(max_examples=500, deadline=None, database=None)
@given(st.integers(0, 2**51), st.integers(0, 2**46), st.integers(1, 2**45 - 1))
def test_mul_div_is_exact_wherever_its_result_is_a_whole_number_of_a_double(a: int, b: int, c: int) -> None:
    quotient, rest = divmod(a * b, c)
    if quotient < 2**53:
        assert tuple(int(number) for number in MUL_DIV(a, b, c)) == (quotient, rest)
