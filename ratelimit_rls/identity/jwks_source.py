"""Keys of one issuer, kept up to date from a file or a URL.

A file is checked every second and read when it has changed. A URL is fetched periodically, each time a little earlier
than the configured interval, so that many processes do not fetch at once. It is fetched earlier still when a token
names an unknown key, which is usually the first sign of a new one. After a failure the last good keys stay in use.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import structlog

from ratelimit_rls.common.backoff import Backoff
from ratelimit_rls.common.timers import wait_for_event
from ratelimit_rls.errors import SettingsError, one_line
from ratelimit_rls.identity.issuers import Issuer, KeysAtUrl, KeysInFile
from ratelimit_rls.identity.jwks import MAX_BYTES, KeySet, read_key_set, read_secret
from ratelimit_rls.identity.jwks_fetch import fetch

MIN_EARLY_FETCH_INTERVAL_S = 10.0
"""Minimum time between two fetches caused by unknown keys, so that invented key ids do not cause more."""

TIMEOUT_GRACE_S = 0.5
"""Time beyond the timeout for a fetch to report its own error."""

FILE_POLL_S = 1.0
FIRST_RETRY_S = 1.0
JITTER = 0.2
"""Fraction by which a wait may be shortened, so that many processes do not fetch at once."""

_log = structlog.get_logger()

T = TypeVar("T")
_Fingerprint = tuple[int, int, int, int]


class JwksSource:
    """Current keys of an issuer (`keys`), and the task that updates them (`run`). For the event loop thread only."""

    def __init__(self, issuer: Issuer, on_change: Callable[[], None]) -> None:
        """Read the keys if they are in a file. Raises SettingsError if it cannot be used."""
        self._issuer = issuer
        self._on_change = on_change
        self._digest = b""
        self._seen: _Fingerprint | None = None
        self._is_failing = False
        self._refresh_requested = asyncio.Event()
        self._next_s = 0.0
        self._early_s = -MIN_EARLY_FETCH_INTERVAL_S
        max_s = issuer.keys.refresh_s if isinstance(issuer.keys, KeysAtUrl) else FIRST_RETRY_S
        self._retries = Backoff(FIRST_RETRY_S, max_s, jitter=JITTER)
        self.keys = KeySet(())
        if isinstance(issuer.keys, KeysInFile):
            try:
                self._seen = _fingerprint(issuer.keys.path)
                self._accept(read_file(issuer.keys.path))
            except (OSError, ValueError) as error:
                raise SettingsError(
                    f"RLS_JWT_ISSUERS: the keys of {issuer.name}: {issuer.keys.path} {_describe_error(error)}"
                ) from error

    @property
    def issuer(self) -> Issuer:
        return self._issuer

    def request_refresh(self) -> None:
        """Ask for an early fetch: a token names an unknown key, which may have been published since."""
        if isinstance(self._issuer.keys, KeysAtUrl):
            self._refresh_requested.set()

    async def fetch_initial(self) -> None:
        """Fetch the first keys. If it fails, every token is rejected, but the process starts nevertheless."""
        if isinstance(self._issuer.keys, KeysAtUrl):
            await self._fetch(self._issuer.keys)

    async def run(self) -> None:
        """Keep the keys up to date until cancelled."""
        while True:
            if isinstance(self._issuer.keys, KeysInFile):
                await asyncio.sleep(FILE_POLL_S)
                await self._check_file(self._issuer.keys.path)
            else:
                await self._wait_until_due()
                await self._fetch(self._issuer.keys)

    def due_s(self) -> float:
        """Return the time of the next fetch, on the event loop's clock."""
        if self._refresh_requested.is_set():
            return min(self._next_s, self._early_s + MIN_EARLY_FETCH_INTERVAL_S)
        return self._next_s

    async def _wait_until_due(self) -> None:
        clock = asyncio.get_running_loop().time
        while (left_s := self.due_s() - clock()) > 0:
            if self._refresh_requested.is_set():
                await asyncio.sleep(left_s)
            else:
                await wait_for_event(self._refresh_requested, left_s)

    async def _fetch(self, location: KeysAtUrl) -> None:
        clock = asyncio.get_running_loop().time
        if self._refresh_requested.is_set():
            self._refresh_requested.clear()
            self._early_s = clock()
        try:
            # DNS resolution is not bound by the timeout of the fetch.
            async with asyncio.timeout(location.timeout_s + TIMEOUT_GRACE_S):
                content = await _run_in_daemon_thread(lambda: fetch(location.url, location.timeout_s))
            self._accept(content)
        except Exception as error:  # no error may end the update task
            self._on_failure(error)
            self._next_s = clock() + self._retries.next_s(location.refresh_s)
        else:
            self._next_s = clock() + location.refresh_s * random.uniform(1 - JITTER, 1)
            self._retries.reset()

    async def _check_file(self, path: Path) -> None:
        try:
            seen = await asyncio.to_thread(_fingerprint, path)
            if seen != self._seen:
                content = await asyncio.to_thread(read_file, path)
                self._seen = seen  # set after reading, so that an unreadable file is tried again
                self._accept(content)
        except Exception as error:  # no error may end the update task
            self._on_failure(error)

    def _accept(self, content: bytes) -> None:
        """Replace the keys. Raises ValueError and keeps the old ones if the content cannot be used."""
        digest = hashlib.sha256(content).digest()
        if digest != self._digest:
            location = self._issuer.keys
            is_secret = isinstance(location, KeysInFile) and location.is_secret
            self.keys = (read_secret if is_secret else read_key_set)(content, self._issuer.algorithms)
            self._digest = digest
            self._on_change()
        if self._is_failing:
            self._is_failing = False
            _log.info("jwks_refresh_recovered", issuer=self._issuer.name)

    def _on_failure(self, error: Exception) -> None:
        """Log the first failure after a success."""
        if not self._is_failing:
            self._is_failing = True
            _log.warning(
                "jwks_refresh_failed",
                issuer=self._issuer.name,
                keys=len(self.keys.keys),
                error=f"the content {_describe_error(error)}",
            )


def read_file(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"is larger than {MAX_BYTES // 2**20} MiB")
    return content


async def _run_in_daemon_thread(work: Callable[[], T]) -> T:
    """Run `work` in a daemon thread, so that an unresponsive server does not delay the shutdown of this process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except Exception as error:  # passed on to the waiter
            failure = error
        with suppress(RuntimeError):  # the event loop was closed meanwhile
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="jwks-fetch", daemon=True).start()
    return await done


def _fingerprint(path: Path) -> _Fingerprint:
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _describe_error(error: Exception) -> str:
    """Return the error as the end of a sentence about the file or URL."""
    if isinstance(error, ValueError):
        return str(error)
    reason = getattr(error, "strerror", None) or (str(error) or type(error).__name__)
    return f"cannot be read: {one_line(reason)}"
