"""Reads, compiles, and puts in force; a bad update changes nothing but the record of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from datetime import UTC, datetime
from threading import Thread
from typing import Any, Protocol, TypeVar

import structlog

from ratelimit_rls.errors import RateLimitRlsError, RulesError
from ratelimit_rls.rules.compile import Compiled, compile_documents, digest, in_order
from ratelimit_rls.rules.load import Source
from ratelimit_rls.rules.snapshot import Rules
from ratelimit_rls.telemetry.metrics import Metrics

MOST_LOGGED = 20
"""Problems of one load that are written to the log; `check` shows all."""

T = TypeVar("T")

_log = structlog.get_logger()


class RulesSource(Protocol):
    def check(self) -> None:
        """Raise SettingsError if there is nowhere to read from."""
        ...

    def read(self) -> list[Source] | None:
        """All there is, as of one moment; None where nothing has come yet, which is no fault."""
        ...

    def watch(self) -> AsyncGenerator[None, None]:
        """Yield whenever it is time to read. Goes on when that was tried, so that a source can pass on how it went."""
        ...


class RulesLoader:
    """Keeps `rules` as the source has them."""

    def __init__(
        self,
        source: RulesSource,
        rules: Rules,
        metrics: Metrics,
        *,
        merge_domains: bool = False,
        default_admitted: bool = False,
        explain: Callable[[RulesError], RulesError] | None = None,
    ) -> None:
        """`explain` says the places of problems in the source's words, where they are not those of files."""
        self._source = source
        self._rules = rules
        self._metrics = metrics
        self._merge_domains = merge_domains
        self._default_admitted = default_admitted
        self._explain = explain
        self.has_tried = asyncio.Event()
        """Set when something was there to be loaded, be it refused."""
        self._tried: str | None = None  # the digest of the last attempt, good or bad
        self._turn = asyncio.Lock()
        self._apart: Future[Any] | None = None  # what runs in a thread, be it that nobody waits for it any more

    async def start(self) -> None:
        """The first load, if there is something to load. Raises SettingsError if there is nowhere to read from.

        Rules that are refused are no reason not to start: every request is answered NotReady until they are mended
        (reference behaviour), and whoever looks at the health or the log sees why.
        """
        async with self._turn:
            await self._run(self._source.check)
        await self.reload()

    async def reload(self) -> bool:
        """Whether the rules in force are now those of the source. The same text as last time is not tried again."""
        async with self._turn:
            tried, self._tried = self._tried, None  # should it neither be loaded nor refused, it was not tried
            text: str | None = None
            try:
                found = await self._run(self._read)
                if found is None:
                    _log.info("no rules have come yet")
                    return False
                sources, text = found
                compiled = await self._run(lambda: self._compile(sources)) if text != tried else None
            except RateLimitRlsError as error:
                self._refuse(error)
            else:
                if compiled is None:
                    _log.info("rules are as they were")
                else:
                    self._apply(compiled)
            self._tried = text
            return self._rules.last_error is None

    async def watch(self) -> None:
        """Follow the source until cancelled."""
        async with aclosing(self._source.watch()) as times:
            async for _ in times:
                await self.reload()

    async def _run(self, job: Callable[[], T]) -> T:
        """In a thread of its own: large rules take seconds, and requests go on meanwhile. For whoever has the turn.

        Not of a pool: the process would not end before a thread of one does. What is cancelled runs on, and what it
        comes to is dropped; the next waits for it, so that there is never more than one.
        """
        if self._apart is not None:
            await asyncio.gather(asyncio.wrap_future(self._apart), return_exceptions=True)
        done: Future[T] = Future()
        done.set_running_or_notify_cancel()  # from now on it cannot be cancelled, only left alone
        Thread(target=_settle, args=(done, job), name="rules", daemon=True).start()
        self._apart = done
        try:
            return await asyncio.wrap_future(done)
        finally:
            if done.done():
                self._apart = None

    def _read(self) -> tuple[list[Source], str] | None:
        sources = self._source.read()
        return None if sources is None else (sources, digest(in_order(sources)))

    def _compile(self, sources: list[Source]) -> Compiled:
        try:
            return compile_documents(
                sources, merge_domains=self._merge_domains, default_admitted=self._default_admitted
            )
        except RulesError as error:
            refusal = self._explain(error) if self._explain else error
        raise refusal  # from here, so that it does not hold the one it explains

    def _apply(self, compiled: Compiled) -> None:
        loaded = self._rules.swap(
            compiled.tree, digest=compiled.digest, files=compiled.files, loaded_at=datetime.now(UTC)
        )
        self.has_tried.set()
        self._metrics.service.config_load_success += 1
        _log.info(
            "rules loaded",
            version=loaded.version,
            digest=loaded.digest[:12],
            files=loaded.files,
            domains=len(loaded.tree.domains),
            rules=loaded.rules,
        )
        if not loaded.tree.domains:
            _log.warning("there are no rules: no request is limited")
        _log_each(compiled.warnings, "rules warning")

    def _refuse(self, error: RateLimitRlsError) -> None:
        # It is kept until better rules come; the frames that it came through would keep all that was read.
        self._rules.refuse(error.with_traceback(None))
        self.has_tried.set()
        self._metrics.service.config_load_error += 1
        kept = self._rules.current.version if self._rules.current else None
        _log.error("Error loading new configuration", version_kept=kept, failures=self._rules.failures)
        _log_each(error.problems if isinstance(error, RulesError) else (error,), "rules error")


def _settle(done: Future[T], job: Callable[[], T]) -> None:
    try:
        result = job()
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(result)


def _log_each(problems: Sequence[object], event: str) -> None:
    for problem in problems[:MOST_LOGGED]:
        _log.warning(event, problem=str(problem))
    if len(problems) > MOST_LOGGED:
        _log.warning(event, problem=f"{len(problems) - MOST_LOGGED} more; of files `ratelimit-rls check` shows all")
