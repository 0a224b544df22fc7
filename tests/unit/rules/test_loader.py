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
from ratelimit_rls.rules import loader as loader_module
from ratelimit_rls.rules.compile import Compiled, compile_documents
from ratelimit_rls.rules.load import Source
from ratelimit_rls.rules.loader import MOST_LOGGED, RulesLoader
from ratelimit_rls.rules.snapshot import Rules
from ratelimit_rls.rules.sources.files import RulesFiles
from ratelimit_rls.telemetry.metrics import Metrics

GOOD, BETTER, BAD = "domain: good\n", "domain: better\n", "domain: ''\n"


class Loading:
    """A loader over one real file."""

    def __init__(self, directory: Path, text: str) -> None:
        self.file = directory / "rules.yaml"
        self.file.write_text(text)
        self.rules = Rules()
        self.metrics = Metrics()
        self.loader = RulesLoader(RulesFiles([directory]), self.rules, self.metrics)

    @property
    def domains(self) -> set[str]:
        assert self.rules.current is not None
        return set(self.rules.current.tree.domains)

    @property
    def loads(self) -> tuple[int, int]:
        return self.metrics.service.config_load_success, self.metrics.service.config_load_error


async def test_a_good_update_is_put_in_force_and_counted(tmp_path: Path) -> None:
    loading = Loading(tmp_path, GOOD)
    with capture_logs() as logs:
        await loading.loader.start()
    loading.file.write_text(BETTER)

    assert await loading.loader.reload()

    assert loading.domains == {"better"}
    assert loading.rules.current is not None
    assert loading.rules.current.version == 2
    assert loading.loads == (2, 0)
    assert logs[0]["event"] == "rules loaded"
    assert logs[0]["domains"] == 1


async def test_a_bad_update_changes_nothing_and_is_told(tmp_path: Path) -> None:
    loading = Loading(tmp_path, GOOD)
    await loading.loader.start()
    loading.file.write_text(BAD)

    with capture_logs() as logs:
        assert not await loading.loader.reload()

    assert loading.domains == {"good"}
    assert loading.loads == (1, 1)
    assert loading.rules.failures == 1
    assert "cannot have empty domain" in str(loading.rules.last_error)
    assert logs[0]["event"] == "Error loading new configuration"
    assert "rules.yaml:1:9" in logs[1]["problem"]


async def test_going_back_to_the_good_rules_clears_the_failure(tmp_path: Path) -> None:
    loading = Loading(tmp_path, GOOD)
    await loading.loader.start()
    for text in (BAD, GOOD):
        loading.file.write_text(text)
        await loading.loader.reload()

    assert (loading.rules.failures, loading.rules.last_error) == (0, None)
    assert loading.loads == (2, 1)


async def test_the_same_text_is_neither_loaded_nor_refused_twice(tmp_path: Path) -> None:
    loading = Loading(tmp_path, GOOD)
    await loading.loader.start()
    loading.file.write_text(GOOD)
    assert await loading.loader.reload()
    loading.file.write_text(BAD)
    assert not await loading.loader.reload()
    assert not await loading.loader.reload()

    assert loading.loads == (1, 1)


async def test_rules_that_could_not_be_read_are_tried_again_with_the_same_text(tmp_path: Path) -> None:
    loading = Loading(tmp_path, GOOD)
    await loading.loader.start()
    away = tmp_path.with_name(tmp_path.name + "-away")
    tmp_path.rename(away)
    assert not await loading.loader.reload()
    away.rename(tmp_path)

    assert await loading.loader.reload()

    assert loading.rules.last_error is None


async def test_rules_that_broke_the_compiler_are_not_taken_for_those_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = Loading(tmp_path, GOOD)
    await loading.loader.start()
    loading.file.write_text(BETTER)
    with monkeypatch.context() as broken:
        broken.setattr("ratelimit_rls.rules.loader.compile_documents", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await loading.loader.reload()

    assert await loading.loader.reload()

    assert loading.domains == {"better"}


async def test_rules_whose_arrival_broke_something_are_not_taken_for_those_before(tmp_path: Path) -> None:
    loading = Loading(tmp_path, GOOD)
    await loading.loader.start()
    loading.rules.on_change = lambda _: 1 / 0
    loading.file.write_text(BETTER)
    with pytest.raises(ZeroDivisionError):
        await loading.loader.reload()
    loading.rules.on_change = lambda _: None
    loading.file.write_text(GOOD)

    assert await loading.loader.reload()

    assert loading.domains == {"good"}


class Held:
    """Holds the compiler until it is let go, and tells who is in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: asyncio.Queue[threading.Thread] = asyncio.Queue()
        self.go = threading.Event()
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr(loader_module, "compile_documents", self._compile)

    def _compile(self, *args: Any, **more: Any) -> Compiled:
        self._loop.call_soon_threadsafe(self.begun.put_nowait, threading.current_thread())
        self.go.wait(10)
        return compile_documents(*args, **more)


async def test_a_load_that_is_given_up_changes_nothing_and_the_next_waits_until_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = Loading(tmp_path, GOOD)
    await loading.loader.start()
    loading.file.write_text(BETTER)
    held = Held(monkeypatch)
    given_up = asyncio.create_task(loading.loader.reload())
    thread = await held.begun.get()
    assert thread.daemon  # or the process would not end before it does

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
    held.go.set()
    assert await following
    assert loading.domains == {"best"}
    assert loading.loads == (2, 0)


async def test_bad_rules_at_the_start_leave_none_in_force(tmp_path: Path) -> None:
    loading = Loading(tmp_path, BAD)

    await loading.loader.start()

    assert loading.rules.current is None
    assert loading.rules.failures == 1


async def test_no_place_to_read_from_stops_the_start(tmp_path: Path) -> None:
    loader = RulesLoader(RulesFiles([tmp_path / "typo"]), Rules(), Metrics())

    with pytest.raises(SettingsError, match="typo"):
        await loader.start()


async def test_a_flood_of_problems_does_not_flood_the_log(tmp_path: Path) -> None:
    loading = Loading(tmp_path, "domain: d\n" + "".join(f"k{n}: 1\n" for n in range(500)))

    with capture_logs() as logs:
        await loading.loader.start()

    assert len(logs) == MOST_LOGGED + 2
    assert "480 more" in logs[-1]["problem"]


async def test_an_edit_before_the_watch_began_and_one_after_it_are_both_followed(tmp_path: Path) -> None:
    loading = Loading(tmp_path, GOOD)
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


class Pushed:
    """A source to which somebody pushes; it notes how each attempt went, once it was made."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.texts: asyncio.Queue[str] = asyncio.Queue()
        self.outcomes: asyncio.Queue[str] = asyncio.Queue()
        self._text: str | None = None

    def check(self) -> None:
        pass

    def read(self) -> list[Source] | None:
        return None if self._text is None else [Source("pushed", self._text.encode())]

    async def watch(self) -> AsyncGenerator[None, None]:
        while True:
            self._text = await self.texts.get()
            yield
            self.outcomes.put_nowait(str(self._rules.last_error))


async def test_a_source_that_has_nothing_yet_is_no_fault_and_learns_how_each_push_went() -> None:
    rules, metrics = Rules(), Metrics()
    source = Pushed(rules)
    loader = RulesLoader(source, rules, metrics, explain=lambda error: RulesError([Problem("here", 1, 1, "so")]))
    await loader.start()
    assert (rules.current, rules.last_error, metrics.service.config_load_error) == (None, None, 0)
    assert not loader.has_tried.is_set()

    watching = asyncio.create_task(loader.watch())
    try:
        source.texts.put_nowait(BAD)
        assert await source.outcomes.get() == "here:1:1: error: so"
        assert loader.has_tried.is_set()
        source.texts.put_nowait(GOOD)
        assert await source.outcomes.get() == "None"
        assert rules.current is not None
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


class Text(list[Source]):
    """What was read, as something that can be watched going away."""


async def test_a_refusal_that_is_kept_does_not_keep_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = Rules()
    source = Pushed(rules)
    loader = RulesLoader(source, rules, Metrics(), explain=lambda error: RulesError(error.problems))
    read: list[weakref.ref[Text]] = []

    def reading() -> list[Source]:
        text = Text([Source("pushed", BAD.encode())])
        read.append(weakref.ref(text))
        return text

    monkeypatch.setattr(source, "read", reading)
    gc.disable()  # in a process that serves, what only the collector could free stays
    try:
        assert not await loader.reload()
        assert rules.last_error is not None
        assert [text() for text in read] == [None]
    finally:
        gc.enable()
