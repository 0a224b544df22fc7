"""docs/algorithms.md: its tables are replayed on every store, and its pictures are up to date."""

from __future__ import annotations

from typing import Any

import pytest

from ratelimit_rls.core.duration import format_duration_us
from ratelimit_rls.core.model import Algorithm, Code, Decision
from ratelimit_rls.simulation.runner import make_limiter
from tests.support.stores import StoreUnderTest
from tools import pictures

SECTIONS = pictures.sections()


def describe(decision: Decision) -> str:
    """Return the decision as text, as in the tables of the page."""
    (status,) = decision.statuses
    assert status.reading is not None
    assert status.descriptor_plan.rule is not None
    if decision.code is Code.OVER_LIMIT:
        text = f"retry after {format_duration_us(status.reading.retry_us)}"
    elif decision.wait_us:
        text = f"delayed by {format_duration_us(decision.wait_us)}"
    else:
        text = f"resets in {format_duration_us(status.reading.reset_us)}"
    if status.descriptor_plan.rule.penalty is not None:
        text += f"; {status.violations} violation{'s' if status.violations != 1 else ''}"
    if status.state is not None:
        text += f"; {status.state.name.lower()}"
    return text


def replay(section: Any, store: StoreUnderTest) -> list[Any]:
    """Return the rows of a table as the store decides."""
    limiter = make_limiter(section.tree, store.store)
    call = limiter.prepare(section.request)
    midnight_us = store.now_us
    rows = []
    for row in section.rows:
        store.now_us = midnight_us + row.at_us
        decisions: list[Decision] = []
        for _ in range(row.requests):
            (decision,) = store.run(limiter.check([call]))
            assert isinstance(decision, Decision)
            decisions.append(decision)
        admitted = sum(decision.code is Code.OK for decision in decisions)
        last = decisions[-1]
        rows.append(row._replace(admitted=admitted, remaining=last.statuses[0].remaining, response=describe(last)))
    return rows


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_documented_table_matches_store(section: Any, store: StoreUnderTest) -> None:
    assert list(section.rows) == replay(section, store)


def test_page_has_all_tables_and_pictures() -> None:
    algorithms = [algorithm.value for algorithm in Algorithm]
    assert [section.title for section in SECTIONS] == [*algorithms, "Throttle", "Penalties", "Warnings"]
    assert all(len(section.rows) >= 4 for section in SECTIONS)
    assert [name for section in SECTIONS for name in section.pictures] == [*algorithms, "throttle"]


def test_all_table_rows_are_parsed() -> None:
    lines = pictures.PAGE.read_text(encoding="utf-8").splitlines()
    clocks = [line for line in lines if line.startswith("| 0")]
    assert len(clocks) == sum(len(section.rows) for section in SECTIONS)


def test_pictures_are_up_to_date() -> None:
    drawn = pictures.pictures()
    assert {path.name for path in (pictures.DOCS / "pictures").glob("*.svg")} == {path.name for path in drawn}
    for path, text in drawn.items():
        stale = f"{path.name} is stale; run `make docs`"
        assert path.read_text(encoding="utf-8") == text, stale
