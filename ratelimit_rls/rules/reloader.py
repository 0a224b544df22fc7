"""Loads and reloads rules: reads the source, compiles, activates. An invalid update only records the failure."""

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
from ratelimit_rls.rules.active_rules import ActiveRules
from ratelimit_rls.rules.compile import CompiledRules, compile_documents, digest, sort_by_rank
from ratelimit_rls.rules.source_document import SourceDocument
from ratelimit_rls.telemetry.metrics import Metrics

MAX_LOGGED = 20
"""Problems of one load that are logged; `check` shows all."""

T = TypeVar("T")

_log = structlog.get_logger()


class RulesSource(Protocol):
    def check(self) -> None:
        """Raise SettingsError if the location to read from does not exist."""
        ...

    def read(self) -> list[SourceDocument] | None:
        """Return all documents as of one moment; None if nothing has arrived yet, which is not an error."""
        ...

    def watch(self) -> AsyncGenerator[None, None]:
        """Yield whenever the source should be read.

        Resumed after the attempt, so that the source can report its result.
        """
        ...


class RulesReloader:
    """Keeps the active rules up to date with a source."""

    def __init__(
        self,
        source: RulesSource,
        rules: ActiveRules,
        metrics: Metrics,
        *,
        merge_domains: bool = False,
        default_admitted: bool = False,
        explain: Callable[[RulesError], RulesError] | None = None,
    ) -> None:
        """Initialise the reloader. `explain` rewrites positions of problems for sources that are not files."""
        self._source = source
        self._rules = rules
        self._metrics = metrics
        self._merge_domains = merge_domains
        self._default_admitted = default_admitted
        self._explain = explain
        self.first_attempt_done = asyncio.Event()
        """Set after the first attempt to load rules, successful or not."""
        self._attempted: str | None = None  # digest of the last attempt, successful or not
        self._lock = asyncio.Lock()
        self._running: Future[Any] | None = None  # the job in the thread, even if its caller was cancelled

    async def start(self) -> None:
        """Load the rules for the first time, if there are any.

        Raise SettingsError if the location to read from does not exist. Invalid rules do not prevent the start: every
        request gets NotReady until they are corrected (as in envoyproxy/ratelimit), and health and log show the reason.
        """
        async with self._lock:
            await self._run(self._source.check)
        await self.reload()

    async def reload(self, *, requested: bool = False) -> bool:
        """Load the source if its text has changed. Return whether the active rules are those of the source.

        An operator who requested it learns from the log that nothing has changed.
        """
        async with self._lock:
            # A text that is neither loaded nor rejected does not count as attempted.
            attempted, self._attempted = self._attempted, None
            text: str | None = None
            try:
                found = await self._run(self._read)
                if found is None:
                    _log.info("rules_not_available_yet")
                    return False
                sources, text = found
                compiled = await self._run(lambda: self._compile(sources)) if text != attempted else None
            except RateLimitRlsError as error:
                self._reject(error)
            else:
                if compiled is None:
                    (_log.info if requested else _log.debug)("rules_unchanged")
                else:
                    self._apply(compiled)
            self._attempted = text
            return self._rules.last_error is None

    async def watch(self) -> None:
        """Reload whenever the source changes, until cancelled."""
        async with aclosing(self._source.watch()) as times:
            async for _ in times:
                await self.reload()

    async def _run(self, job: Callable[[], T]) -> T:
        """Run `job` in a thread of its own and return its result. The caller must hold the lock.

        Large rules take seconds, and requests must be served meanwhile. A pool is unsuitable: the process would not end
        before the pool's thread does. A cancelled job runs on and its result is dropped; the next job waits for it, so
        that there is never more than one.
        """
        if self._running is not None:
            await asyncio.gather(asyncio.wrap_future(self._running), return_exceptions=True)
        done: Future[T] = Future()
        done.set_running_or_notify_cancel()  # from now on it cannot be cancelled, only abandoned
        Thread(target=_run_into, args=(done, job), name="rules", daemon=True).start()
        self._running = done
        try:
            return await asyncio.wrap_future(done)
        finally:
            if done.done():
                self._running = None

    def _read(self) -> tuple[list[SourceDocument], str] | None:
        sources = self._source.read()
        return None if sources is None else (sources, digest(sort_by_rank(sources)))

    def _compile(self, sources: list[SourceDocument]) -> CompiledRules:
        try:
            return compile_documents(
                sources, merge_domains=self._merge_domains, default_admitted=self._default_admitted
            )
        except RulesError as error:
            explained = self._explain(error) if self._explain else error
        raise explained  # raised here, so that it does not reference the error that it explains

    def _apply(self, compiled: CompiledRules) -> None:
        loaded = self._rules.swap(
            compiled.tree, digest=compiled.digest, files=compiled.files, loaded_at=datetime.now(UTC)
        )
        self.first_attempt_done.set()
        self._metrics.service.config_load_success += 1
        _log.info(
            "rules_loaded",
            version=loaded.version,
            digest=loaded.digest[:12],
            files=loaded.files,
            domains=len(loaded.tree.domains),
            rules=loaded.rules,
        )
        if not loaded.tree.domains:
            _log.warning("rules_empty", effect="no request is limited")
        _log_each(compiled.warnings, lambda text: _log.warning("rules_warning", detail=text))

    def _reject(self, error: RateLimitRlsError) -> None:
        # The error is kept until valid rules arrive; the frames of its traceback would keep everything that was read.
        self._rules.reject(error.with_traceback(None))
        self.first_attempt_done.set()
        self._metrics.service.config_load_error += 1
        kept = self._rules.current.version if self._rules.current else None
        _log.error("rules_rejected", version_kept=kept, failures=self._rules.failures)
        problems = error.problems if isinstance(error, RulesError) else (error,)
        _log_each(problems, lambda text: _log.error("rules_error", error=text))


def _run_into(done: Future[T], job: Callable[[], T]) -> None:
    try:
        result = job()
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(result)


def _log_each(problems: Sequence[object], write: Callable[[str], None]) -> None:
    for problem in problems[:MAX_LOGGED]:
        write(str(problem))
    if len(problems) > MAX_LOGGED:
        write(f"{len(problems) - MAX_LOGGED} more; of files `ratelimit-rls check` shows all")
