from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from ratelimit_rls.errors import Problem, RulesError, SettingsError
from ratelimit_rls.rules import reloader as loader_module
from ratelimit_rls.rules.active_rules import ActiveRules
from ratelimit_rls.rules.compile import CompiledRules, compile_documents
from ratelimit_rls.rules.reloader import MAX_LOGGED, RulesReloader
from ratelimit_rls.rules.source_document import SourceDocument
from ratelimit_rls.rules.sources.files import RulesFiles
from ratelimit_rls.telemetry.metrics import Metrics

GOOD, BETTER, BAD = "domain: good\n", "domain: better\n", "domain: ''\n"


class FileReloader:
    """A reloader of one real file."""

    def __init__(self, directory: Path, text: str) -> None:
        self.file = directory / "rules.yaml"
        self.file.write_text(text)
        self.rules = ActiveRules()
        self.metrics = Metrics()
        self.loader = RulesReloader(RulesFiles([directory]), self.rules, self.metrics)

    @property
    def domains(self) -> set[str]:
        assert self.rules.current is not None
        return set(self.rules.current.tree.domains)

    @property
    def loads(self) -> tuple[int, int]:
        return self.metrics.service.config_load_success, self.metrics.service.config_load_error


async def test_valid_update_is_activated_and_counted(tmp_path: Path) -> None:
    loading = FileReloader(tmp_path, GOOD)
    with capture_logs() as logs:
        await loading.loader.start()
    loading.file.write_text(BETTER)

    assert await loading.loader.reload()

    assert loading.domains == {"better"}
    assert loading.rules.current is not None
    assert loading.rules.current.version == 2
    assert loading.loads == (2, 0)
    assert logs[0]["event"] == "rules_loaded"
    assert logs[0]["domains"] == 1


async def test_invalid_update_keeps_active_rules_and_is_reported(tmp_path: Path) -> None:
    loading = FileReloader(tmp_path, GOOD)
    await loading.loader.start()
    loading.file.write_text(BAD)

    with capture_logs() as logs:
        assert not await loading.loader.reload()

    assert loading.domains == {"good"}
    assert loading.loads == (1, 1)
    assert loading.rules.failures == 1
    assert "cannot have empty domain" in str(loading.rules.last_error)
    assert logs[0]["event"] == "rules_rejected"
    assert "rules.yaml:1:9" in logs[1]["error"]
    assert {line["log_level"] for line in logs} == {"error"}


async def test_reverting_to_valid_rules_clears_the_failure(tmp_path: Path) -> None:
    loading = FileReloader(tmp_path, GOOD)
    await loading.loader.start()
    for text in (BAD, GOOD):
        loading.file.write_text(text)
        await loading.loader.reload()

    assert (loading.rules.failures, loading.rules.last_error) == (0, None)
    assert loading.loads == (2, 1)


async def test_unchanged_text_is_not_attempted_again(tmp_path: Path) -> None:
    loading = FileReloader(tmp_path, GOOD)
    await loading.loader.start()
    loading.file.write_text(GOOD)
    assert await loading.loader.reload()
    loading.file.write_text(BAD)
    assert not await loading.loader.reload()
    assert not await loading.loader.reload()

    assert loading.loads == (1, 1)


async def test_unreadable_rules_are_retried_with_the_same_text(tmp_path: Path) -> None:
    loading = FileReloader(tmp_path, GOOD)
    await loading.loader.start()
    away = tmp_path.with_name(tmp_path.name + "-away")
    tmp_path.rename(away)
    assert not await loading.loader.reload()
    away.rename(tmp_path)

    assert await loading.loader.reload()

    assert loading.rules.last_error is None


async def test_text_that_crashed_the_compiler_is_attempted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = FileReloader(tmp_path, GOOD)
    await loading.loader.start()
    loading.file.write_text(BETTER)
    with monkeypatch.context() as broken:
        broken.setattr("ratelimit_rls.rules.reloader.compile_documents", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await loading.loader.reload()

    assert await loading.loader.reload()

    assert loading.domains == {"better"}


async def test_text_that_failed_to_activate_is_attempted_again(tmp_path: Path) -> None:
    loading = FileReloader(tmp_path, GOOD)
    await loading.loader.start()
    loading.rules.on_change = lambda _: 1 / 0  # type: ignore[assignment]
    loading.file.write_text(BETTER)
    with pytest.raises(ZeroDivisionError):
        await loading.loader.reload()
    loading.rules.on_change = lambda _: None
    loading.file.write_text(GOOD)

    assert await loading.loader.reload()

    assert loading.domains == {"good"}


class PausedCompiler:
    """Pauses the compiler until it is released, and reports the threads inside it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: asyncio.Queue[threading.Thread] = asyncio.Queue()
        self.go = threading.Event()
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr(loader_module, "compile_documents", self._compile)

    def _compile(self, *args: Any, **more: Any) -> CompiledRules:
        self._loop.call_soon_threadsafe(self.begun.put_nowait, threading.current_thread())
        self.go.wait(10)
        return compile_documents(*args, **more)


async def test_cancelled_load_has_no_effect_and_the_next_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = FileReloader(tmp_path, GOOD)
    await loading.loader.start()
    loading.file.write_text(BETTER)
    paused = PausedCompiler(monkeypatch)
    given_up = asyncio.create_task(loading.loader.reload())
    thread = await paused.begun.get()
    assert thread.daemon  # otherwise the process would not end before it

    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up

    assert loading.domains == {"good"}
    loading.file.write_text("domain: best\n")
    with monkeypatch.context() as noted:
        threads: list[threading.Thread] = []
        noted.setattr(threading.Thread, "start", threads.append)
        following = asyncio.create_task(loading.loader.reload())
        await asyncio.sleep(0)
        assert threads == []
    paused.go.set()
    assert await following
    assert loading.domains == {"best"}
    assert loading.loads == (2, 0)


async def test_invalid_rules_at_start_leave_no_active_rules(tmp_path: Path) -> None:
    loading = FileReloader(tmp_path, BAD)

    await loading.loader.start()

    assert loading.rules.current is None
    assert loading.rules.failures == 1


async def test_missing_rules_location_fails_the_start(tmp_path: Path) -> None:
    loader = RulesReloader(RulesFiles([tmp_path / "typo"]), ActiveRules(), Metrics())

    with pytest.raises(SettingsError, match="typo"):
        await loader.start()


async def test_logged_problems_are_bounded(tmp_path: Path) -> None:
    loading = FileReloader(tmp_path, "domain: d\n" + "".join(f"k{n}: 1\n" for n in range(500)))

    with capture_logs() as logs:
        await loading.loader.start()

    assert len(logs) == MAX_LOGGED + 2
    assert "480 more" in logs[-1]["error"]


async def test_edits_before_and_after_the_watch_began_are_loaded(tmp_path: Path) -> None:
    loading = FileReloader(tmp_path, GOOD)
    await loading.loader.start()
    changed: asyncio.Queue[set[str]] = asyncio.Queue()
    loading.rules.on_change = lambda _: changed.put_nowait(loading.domains)
    loading.file.write_text(BETTER)

    watching = asyncio.create_task(loading.loader.watch())
    try:
        assert await asyncio.wait_for(changed.get(), 10) == {"better"}
        loading.file.write_text("domain: best\n")
        assert await asyncio.wait_for(changed.get(), 10) == {"best"}
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


class PushedSource:
    """A source that tests push to; records the result of each attempt."""

    def __init__(self, rules: ActiveRules) -> None:
        self._rules = rules
        self.texts: asyncio.Queue[str] = asyncio.Queue()
        self.outcomes: asyncio.Queue[str] = asyncio.Queue()
        self._text: str | None = None

    def check(self) -> None:
        pass

    def read(self) -> list[SourceDocument] | None:
        return None if self._text is None else [SourceDocument("pushed", self._text.encode())]

    async def watch(self) -> AsyncGenerator[None, None]:
        while True:
            self._text = await self.texts.get()
            yield
            self.outcomes.put_nowait(str(self._rules.last_error))


async def test_source_without_rules_yet_is_not_a_failure_and_sees_each_result() -> None:
    rules, metrics = ActiveRules(), Metrics()
    source = PushedSource(rules)
    loader = RulesReloader(source, rules, metrics, explain=lambda error: RulesError([Problem("here", 1, 1, "so")]))
    await loader.start()
    assert (rules.current, rules.last_error, metrics.service.config_load_error) == (None, None, 0)
    assert not loader.first_attempt_done.is_set()

    watching = asyncio.create_task(loader.watch())
    try:
        source.texts.put_nowait(BAD)
        assert await source.outcomes.get() == "here:1:1: error: so"
        assert loader.first_attempt_done.is_set()
        source.texts.put_nowait(GOOD)
        assert await source.outcomes.get() == "None"
        assert rules.current is not None
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


class TrackedSources(list[SourceDocument]):
    """Source documents that support weak references."""


async def test_stored_error_does_not_keep_the_text_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = ActiveRules()
    source = PushedSource(rules)
    loader = RulesReloader(source, rules, Metrics(), explain=lambda error: RulesError(error.problems))
    read: list[weakref.ref[TrackedSources]] = []

    def reading() -> list[SourceDocument]:
        text = TrackedSources([SourceDocument("pushed", BAD.encode())])
        read.append(weakref.ref(text))
        return text

    monkeypatch.setattr(source, "read", reading)
    gc.disable()  # the server does not collect cycles at this point
    try:
        assert not await loader.reload()
        assert rules.last_error is not None
        assert [text() for text in read] == [None]
    finally:
        gc.enable()
