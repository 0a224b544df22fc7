"""Fuzzing loop: run inputs against a target, and minimise a failing input."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf

from tests.fuzz.mutate import Mutator
from tests.fuzz.targets import Target

MAX_SHRINKS = 2000


class Found(AssertionError):
    """Raised for an input that the target handles incorrectly."""


def fuzz(target: Target, seed: int, *, inputs: float = inf, seconds: float = inf) -> int:
    """Run the target. Return the number of inputs. Raises Found."""
    mutator = Mutator(target.corpus, target.words, seed)
    fates: set[str] = set()
    until_s = time.monotonic() + seconds
    for data in target.corpus:
        _tried(target, data, seed)
    count = 0
    while count < inputs and (count % 100 or time.monotonic() < until_s):
        data = mutator.next()
        fate = _tried(target, data, seed)
        count += 1
        if fate not in fates:
            fates.add(fate)
            mutator.keep(data)
    return count


def _tried(target: Target, data: bytes, seed: int) -> str:
    try:
        return target.check(data)
    except Exception as error:
        kind = type(error)
        small = shrunk(data, lambda less: _fails_as(target, less, kind))
        raise Found(f"{target.name}, seed {seed}: {error!r} with {small!r}") from error


def _fails_as(target: Target, data: bytes, kind: type[Exception]) -> bool:
    try:
        target.check(data)
    except Exception as other:
        return type(other) is kind
    return False


def shrunk(data: bytes, fails: Callable[[bytes], bool]) -> bytes:
    """Return a minimal part of an input that fails in the same way."""
    size, tries = len(data), 0
    while size and tries < MAX_SHRINKS:
        at = 0
        while at < len(data) and tries < MAX_SHRINKS:
            less = data[:at] + data[at + size :]
            tries += 1
            if fails(less):
                data = less
            else:
                at += size
        size //= 2
    return data
