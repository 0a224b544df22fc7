"""The compiled reader prepares what the general one prepares, or leaves it to that one, for any rules and bytes."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.support.readers import RandomRules

RULES = 8 * settings().max_examples  # `make soak` compares more


@pytest.mark.parametrize("part", range(4))
def test_readers_agree(part: int) -> None:
    seeds = range(part * RULES // 4, (part + 1) * RULES // 4)
    applied = sum([RandomRules(seed).compare() for seed in seeds])
    assert applied > 5 * len(seeds), "the rules apply to too few messages"
