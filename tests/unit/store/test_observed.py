"""A store that is timed: how long, which kind of trouble, and the same in its span."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ratelimit_rls.core.model import Answer
from ratelimit_rls.errors import StoreError, StoreTimeout
from ratelimit_rls.store import observed
from ratelimit_rls.store.observed import Observed
from ratelimit_rls.telemetry.metrics import Metrics

ANSWER = Answer(False, 0, ())


class Scripted:
    """A store that says what it is told to."""

    decides_here = True

    def __init__(self, answers: list[Answer | StoreError]) -> None:
        self._answers = answers

    async def spend(self, batch: Sequence[Any]) -> list[Answer | StoreError]:
        return self._answers


class Span:
    def __init__(self) -> None:
        self.ended: list[str | None] = []

    def end(self, error: str | None) -> None:
        self.ended.append(error)


@pytest.mark.parametrize(
    ("answers", "error"), [([ANSWER, ANSWER], None), ([ANSWER, StoreTimeout("late")], "StoreTimeout")]
)
async def test_a_batch_is_one_observation_and_one_span(
    monkeypatch: pytest.MonkeyPatch, answers: list[Answer | StoreError], error: str | None
) -> None:
    span, metrics = Span(), Metrics()
    begun: list[tuple[str, int]] = []
    monkeypatch.setattr(observed, "store_span", lambda *about: begun.append(about) or span)
    store = Observed(Scripted(answers), "redis", metrics)  # type: ignore[arg-type]
    assert store.decides_here
    assert await store.spend([object(), object()]) == answers  # type: ignore[list-item]
    assert (begun, span.ended) == ([("redis", 2)], [error])
    assert {key: times.count for key, times in metrics.store_times.items() if times.count} == {
        ("redis", error or ""): 1
    }
