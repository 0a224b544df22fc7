"""Every test file of descriptors/, replayed on every store."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratelimit_rls.trial.play import play
from ratelimit_rls.trial.suite import find_files, read_suite
from tests.stores import StoreUnderTest

FILES = find_files([Path(__file__).parents[2] / "descriptors"])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.partition(".")[0])
def test_the_rules_do_what_their_test_file_says(store: StoreUnderTest, file: Path) -> None:
    suite = read_suite(file)

    def turn(now_us: int) -> None:
        store.now_us = now_us

    before_us = store.now_us
    try:
        outcomes = [store.run(play(suite.tree, case, store.store, turn)) for case in suite.cases]
    finally:
        store.now_us = before_us
    assert [difference for outcome in outcomes for difference in outcome.differences] == []


def test_there_is_a_test_file_for_every_rules_file() -> None:
    rules = {file.name.partition(".")[0] for file in FILES[0].parent.glob("*.yaml") if ".test." not in file.name}
    assert {file.name.partition(".")[0] for file in FILES} == rules
