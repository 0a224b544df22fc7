"""The instrumented store: durations and error types in metrics and spans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ratelimit_rls.core.model import StoreResult
from ratelimit_rls.errors import StoreError, StoreTimeout
from ratelimit_rls.store import instrumented
from ratelimit_rls.store.instrumented import InstrumentedStore
from ratelimit_rls.telemetry.metrics import Metrics

ANSWER = StoreResult.of(False, 0, ())


class Scripted:
    """A store that returns given results."""

    is_synchronous = True

    def __init__(self, answers: list[StoreResult | StoreError]) -> None:
        self._answers = answers

    async def spend(self, batch: Sequence[Any]) -> list[StoreResult | StoreError]:
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
    monkeypatch: pytest.MonkeyPatch, answers: list[StoreResult | StoreError], error: str | None
) -> None:
    span, metrics = Span(), Metrics()
    begun: list[tuple[str, int]] = []
    monkeypatch.setattr(instrumented, "store_span", lambda *about: begun.append(about) or span)  # type: ignore[func-returns-value]
    store = InstrumentedStore(Scripted(answers), "redis", metrics, has_traces=True)  # type: ignore[arg-type]
    assert store.is_synchronous
    assert await store.spend([object(), object()]) == answers  # type: ignore[list-item]
    assert (begun, span.ended) == ([("redis", 2)], [error])
    assert {key: times.count for key, times in metrics.store_times.items() if times.count} == {
        ("redis", error or ""): 1
    }


async def test_without_traces_there_are_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instrumented, "store_span", lambda *_: pytest.fail("a span was begun"))
    store = InstrumentedStore(Scripted([ANSWER]), "redis", Metrics(), has_traces=False)  # type: ignore[arg-type]
    assert await store.spend([object()]) == [ANSWER]  # type: ignore[list-item]
