"""docs/algorithms.md is true: every worked clock is played on every store, every picture is as it is drawn today."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ratelimit_rls.core.model import Algorithm, Code, Decision
from ratelimit_rls.core.span import format_span
from ratelimit_rls.trial.play import limiter_on
from tests.stores import StoreUnderTest


def _load() -> ModuleType:
    path = Path(__file__).parents[2] / "docs" / "pictures" / "draw.py"
    spec = importlib.util.spec_from_file_location("algorithms_page", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGE = _load()
SECTIONS = PAGE.sections()


def told(decision: Decision) -> str:
    """In the words of the page."""
    (status,) = decision.statuses
    assert status.reading is not None
    assert status.slot.rule is not None
    if decision.code is Code.OVER_LIMIT:
        words = f"come back in {format_span(status.reading.retry_us)}"
    elif decision.wait_us:
        words = f"held for {format_span(decision.wait_us)}"
    else:
        words = f"as new in {format_span(status.reading.reset_us)}"
    if status.slot.rule.penalty is not None:
        words += f"; {status.violations} violation{'s' if status.violations != 1 else ''}"
    if status.state is not None:
        words += f"; {status.state.name.lower()}"
    return words


def played(section: Any, store: StoreUnderTest) -> list[Any]:
    """The rows as they should be written."""
    limiter = limiter_on(section.tree, store.store)
    call = limiter.prepare(section.request)
    midnight_us = store.now_us
    rows = []
    for row in section.rows:
        store.now_us = midnight_us + row.at_us
        passed = 0
        for _ in range(row.come):
            (decision,) = store.run(limiter.check([call]))
            assert isinstance(decision, Decision)
            passed += decision.code is Code.OK
        rows.append(row._replace(passed=passed, left=decision.statuses[0].remaining, told=told(decision)))
    return rows


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_a_worked_clock_is_what_a_store_answers(section: Any, store: StoreUnderTest) -> None:
    assert list(section.rows) == played(section, store)


def test_the_page_has_a_clock_for_all_there_is_and_a_picture_for_every_algorithm() -> None:
    algorithms = [algorithm.value for algorithm in Algorithm]
    assert [section.title for section in SECTIONS] == [*algorithms, "Throttle", "Penalties", "Warnings"]
    assert all(len(section.rows) >= 4 for section in SECTIONS)
    assert [name for section in SECTIONS for name in section.pictures] == [*algorithms, "throttle"]


def test_every_row_of_a_table_is_read() -> None:
    lines = PAGE.PAGE.read_text(encoding="utf-8").splitlines()
    clocks = [line for line in lines if line.startswith("| 0")]
    assert len(clocks) == sum(len(section.rows) for section in SECTIONS)


def test_the_pictures_are_current() -> None:
    drawn = PAGE.pictures()
    assert {path.name for path in PAGE.HERE.glob("*.svg")} == {path.name for path in drawn}
    for path, text in drawn.items():
        stale = f"{path.name} is stale; `make docs` draws it anew"
        assert path.read_text(encoding="utf-8") == text, stale
