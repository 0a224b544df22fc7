"""The test files of descriptors/, replayed on every store."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratelimit_rls.simulation.runner import run_case
from ratelimit_rls.simulation.suite import find_files, read_suite
from tests.support.stores import StoreUnderTest

FILES = find_files([Path(__file__).parents[2] / "descriptors"])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.partition(".")[0])
def test_rules_pass_their_test_file(store: StoreUnderTest, file: Path) -> None:
    suite = read_suite(file)

    def turn(now_us: int) -> None:
        store.now_us = now_us

    before_us = store.now_us
    try:
        outcomes = [store.run(run_case(suite.tree, case, store.store, turn)) for case in suite.cases]
    finally:
        store.now_us = before_us
    assert [difference for outcome in outcomes for difference in outcome.differences] == []


def test_every_rules_file_has_a_test_file() -> None:
    rules = {file.name.partition(".")[0] for file in FILES[0].parent.glob("*.yaml") if ".test." not in file.name}
    assert {file.name.partition(".")[0] for file in FILES} == rules
