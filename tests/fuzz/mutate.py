"""Mutation of inputs from a corpus, tokens of the format, and a seed."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

MAX_BYTES = 20_000
MAX_CORPUS = 500
NUMBERS = (0, 1, 2, 4, 5, 8, 9, 10, 16, 32, 62, 63, 64, 100, 126, 127, 128, 129, 130, 192, 224, 254, 255)
"""Boundary values of formats: tags, lengths, prefixes and their limits."""


class Mutator:
    """Generates inputs without end. The same seed, corpus and calls of `keep` give the same inputs."""

    def __init__(self, corpus: Sequence[bytes], words: Sequence[bytes], seed: int) -> None:
        self._corpus = list(corpus)
        self._seeds = len(corpus)
        self._words = list(words)
        self._chance = Random(seed)

    def next(self) -> bytes:
        chance = self._chance
        data = bytearray(chance.choice(self._corpus))
        for _ in range(chance.choice((0, 1, 1, 1, 2, 2, 3, 5, 8))):
            self._change(data)
        return bytes(data[:MAX_BYTES])

    def keep(self, data: bytes) -> None:
        """Add an input with a new outcome to the corpus."""
        if len(self._corpus) >= MAX_CORPUS:
            del self._corpus[self._chance.randrange(self._seeds, MAX_CORPUS)]
        self._corpus.append(data)

    def _change(self, data: bytearray) -> None:
        chance = self._chance
        at = chance.randrange(len(data) + 1)
        end = min(len(data), at + chance.choice((1, 1, 1, 2, 4, 9, 50)))
        kind = chance.randrange(9)
        if kind == 0:
            data[at:end] = b""
        elif kind == 1:
            data[at:at] = data[at:end] * chance.choice((1, 1, 2, 10))
        elif kind == 2:
            data[at:at] = chance.choice(self._words)
        elif kind == 3:
            data[at:end] = chance.choice(self._words)
        elif kind == 4:
            other = chance.choice(self._corpus)
            there = chance.randrange(len(other) + 1)
            data[at:] = other[there:]
        elif kind == 5:
            data[at:at] = chance.randbytes(chance.randrange(1, 5))
        elif data and kind == 6:
            data[at % len(data)] ^= 1 << chance.randrange(8)
        elif data and kind == 7:
            data[at % len(data)] = chance.choice(NUMBERS)
        elif data:
            place = at % len(data)
            data[place] = (data[place] + chance.choice((-1, 1))) % 256
