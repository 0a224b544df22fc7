"""Fuzz tests of everything that parses client input, with a fixed seed; `make soak` uses new seeds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fuzz.fuzz import Found, fuzz, shrunk
from tests.fuzz.mutate import Mutator
from tests.fuzz.targets import TARGETS, Target

SEED = 17
INPUTS = {
    "frames": 30_000,
    "header blocks": 40_000,
    "heads": 150_000,
    "RateLimitRequest": 15_000,
    "compiled reader": 60_000,
    "CheckRequest": 100_000,
    "JSON": 8_000,
}
"""Number of inputs for about ten seconds per target."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("target", TARGETS, ids=[target.name for target in TARGETS])
def test_fuzz_target(target: Target) -> None:
    assert fuzz(target, SEED, inputs=INPUTS[target.name]) == INPUTS[target.name]


def test_same_seed_gives_the_same_inputs() -> None:
    first, second = (Mutator([b"a", b"bc"], [b"word"], SEED) for _ in range(2))
    inputs = [first.next() for _ in range(200)]
    assert inputs == [second.next() for _ in range(200)]
    assert len(set(inputs)) > 100


def test_failure_is_found_and_minimised() -> None:
    def check(data: bytes) -> str:
        assert b"word" not in data
        return ""

    with pytest.raises(Found, match=r"a check, seed 17: AssertionError.* with b'word'$"):
        fuzz(Target("a check", [b"abc" * 10], [b"word"], check), SEED, inputs=1000)


def test_unexpected_error_is_found() -> None:
    def check(data: bytes) -> str:
        raise IndexError if len(data) > 5 else ValueError

    with pytest.raises(Found, match=r"IndexError.* with b'......'$"):
        fuzz(Target("a check", [b"abcdefghi"], [], check), SEED, inputs=1)


def test_shrinking_removes_irrelevant_bytes() -> None:
    assert shrunk(b"...a......b..", lambda data: b"a" in data and b"b" in data) == b"ab"


@pytest.mark.parametrize("target", TARGETS, ids=[target.name for target in TARGETS])
def test_corpus_inputs_pass(target: Target) -> None:
    assert fuzz(replace(target, words=[b""]), SEED, inputs=20) == 20
