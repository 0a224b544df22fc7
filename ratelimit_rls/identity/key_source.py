"""Keys of one issuer from where they are published, kept as they are there.

A file is looked at every second and read when it has changed. A URL is fetched again and again, each time a little
earlier than the set time so that many processes do not ask at once, and earlier still when a token names a key that
nobody knows: that is how a new key usually makes itself known. Whatever fails leaves the last good keys in force.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
import threading
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPMessage, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import IO, Any, Self, TypeVar
from urllib.error import HTTPError

import structlog

from ratelimit_rls.errors import SettingsError, one_line
from ratelimit_rls.identity.issuers import Issuer, KeysAtUrl, KeysInFile, key_url
from ratelimit_rls.identity.jwks import KeySet, read_key_set, read_secret

MOST_BYTES = 2**20
EARLY_PAUSE_S = 10.0
"""Between two fetches that unknown keys ask for: whoever invents names of keys must not make us ask more often."""

GRACE_S = 0.5
"""Beyond the timeout, for a fetch to say by itself how far it came."""

FILE_POLL_S = 1.0
FIRST_RETRY_S = 1.0

_log = structlog.get_logger()

T = TypeVar("T")
_Fingerprint = tuple[int, int, int, int]


class KeySource:
    """The keys that are in force now (`keys`), and what keeps them so (`run`). Of the event loop's thread alone."""

    def __init__(self, issuer: Issuer, on_change: Callable[[], None]) -> None:
        """Raises SettingsError if the keys are in a file, and it cannot be used."""
        self._issuer = issuer
        self._on_change = on_change
        self._digest = b""
        self._seen: _Fingerprint | None = None
        self._is_failing = False
        self._wanted = asyncio.Event()
        self._next_s = 0.0
        self._early_s = -EARLY_PAUSE_S
        self._retry_s = FIRST_RETRY_S
        self.keys = KeySet(())
        if isinstance(issuer.keys, KeysInFile):
            try:
                self._seen = _fingerprint(issuer.keys.path)
                self._take(read_file(issuer.keys.path))
            except (OSError, ValueError) as error:
                raise SettingsError(
                    f"RLS_JWT_ISSUERS: the keys of {issuer.name}: {issuer.keys.path} {_told(error)}"
                ) from error

    @property
    def issuer(self) -> Issuer:
        return self._issuer

    def find_again_soon(self) -> None:
        """A token names a key that is not there; it may have been published since."""
        if isinstance(self._issuer.keys, KeysAtUrl):
            self._wanted.set()

    async def first(self) -> None:
        """The first keys. Without them every token is refused, but whoever publishes them must not stop us."""
        if isinstance(self._issuer.keys, KeysAtUrl):
            await self._fetch(self._issuer.keys)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            if isinstance(self._issuer.keys, KeysInFile):
                await asyncio.sleep(FILE_POLL_S)
                await self._look(self._issuer.keys.path)
            else:
                await self._until_due()
                await self._fetch(self._issuer.keys)

    def due_s(self) -> float:
        """When to fetch next, by the loop's clock."""
        return min(self._next_s, self._early_s + EARLY_PAUSE_S) if self._wanted.is_set() else self._next_s

    async def _until_due(self) -> None:
        clock = asyncio.get_running_loop().time
        while (left_s := self.due_s() - clock()) > 0:
            if self._wanted.is_set():
                await asyncio.sleep(left_s)
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self._wanted.wait()

    async def _fetch(self, place: KeysAtUrl) -> None:
        clock = asyncio.get_running_loop().time
        if self._wanted.is_set():
            self._wanted.clear()
            self._early_s = clock()
        try:
            async with asyncio.timeout(place.timeout_s + GRACE_S):  # the name may not be found for longer than that
                content = await _in_daemon(lambda: fetch(place.url, place.timeout_s))
            self._take(content)
        except Exception as error:  # whatever it is, it must not end the keeping of keys
            self._failed(error)
            self._next_s = clock() + min(self._retry_s, place.refresh_s) * random.uniform(0.8, 1)
            self._retry_s = min(2 * self._retry_s, place.refresh_s)
        else:
            self._next_s = clock() + place.refresh_s * random.uniform(0.8, 1)
            self._retry_s = FIRST_RETRY_S

    async def _look(self, path: Path) -> None:
        try:
            seen = await asyncio.to_thread(_fingerprint, path)
            if seen != self._seen:
                content = await asyncio.to_thread(read_file, path)
                self._seen = seen  # after it was read, so that a file that cannot be read is tried again
                self._take(content)
        except Exception as error:  # as above
            self._failed(error)

    def _take(self, content: bytes) -> None:
        """Raises ValueError, and leaves the keys, if they cannot be used."""
        digest = hashlib.sha256(content).digest()
        if digest != self._digest:
            place = self._issuer.keys
            is_secret = isinstance(place, KeysInFile) and place.is_secret
            self.keys = (read_secret if is_secret else read_key_set)(content, self._issuer.algorithms)
            self._digest = digest
            self._on_change()
        if self._is_failing:
            self._is_failing = False
            _log.info("the keys of an issuer of tokens can be read again", issuer=self._issuer.name)

    def _failed(self, error: Exception) -> None:
        """Told once, until it works again."""
        if not self._is_failing:
            self._is_failing = True
            _log.warning(
                "cannot read the keys of an issuer of tokens, those known stay",
                issuer=self._issuer.name,
                keys=len(self.keys.keys),
                error=f"what is there {_told(error)}",
            )


def read_file(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"is larger than {MOST_BYTES // 2**20} MiB")
    return content


def fetch(url: str, timeout_s: float) -> bytes:
    """What is at `url`, whole and within the time; raises OSError, HTTPException (http.client) or ValueError."""
    request = urllib.request.Request(url, headers={"Accept": "application/jwk-set+json, application/json"})  # noqa: S310
    content = b""
    with _Deadline(timeout_s) as deadline:
        try:
            with _open(request, deadline) as response:
                while piece := response.read1(65_536):
                    content += piece
                    if len(content) > MOST_BYTES:
                        raise ValueError(f"is larger than {MOST_BYTES // 2**20} MiB")
        except (OSError, HTTPException):
            if not deadline.is_over:
                raise
        if deadline.is_over:  # whatever became of it then: to whoever reads, the connection has come to its end
            raise TimeoutError(f"timed out: it did not come whole within {timeout_s:g} s")
    return content


def _open(request: urllib.request.Request, deadline: _Deadline) -> HTTPResponse:
    opener = urllib.request.build_opener(_SafeRedirects(), _Http(deadline), _Https(deadline))
    try:
        response: HTTPResponse = opener.open(request, timeout=deadline.timeout_s + GRACE_S)  # the deadline is first
    except HTTPError as error:
        error.close()  # it holds the connection, and may be held for long
        raise OSError(f"the answer is {error.code} {error.reason}") from None
    return response


class _Deadline:
    """For all waits of one fetch together, from the first connection to the last byte.

    A timeout of a socket is for each wait: who sends a byte now and then never exceeds it. So at the end of the time
    all connections that were made are shut down, and whoever waits for one goes on.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.is_over = False
        self._turn = threading.Lock()
        self._connections: list[socket.socket] = []
        self._timer = threading.Timer(timeout_s, self._end)
        self._timer.daemon = True
        self._timer.name = "deadline of a fetch"

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._turn:
            for connection in self._connections:
                connection.close()
            self._connections = []

    def connect(self, address: tuple[str, int], timeout_s: float, source: tuple[str, int] | None) -> socket.socket:
        """As socket.create_connection. What is kept is another handle to it: TLS takes the first one away."""
        made = socket.create_connection(address, self.timeout_s, source)
        made.settimeout(timeout_s)
        with self._turn:
            if self.is_over:
                made.close()
                raise TimeoutError
            self._connections.append(made.dup())
        return made

    def _end(self) -> None:
        with self._turn:
            self.is_over = True
            for connection in self._connections:
                with suppress(OSError):  # the other side was faster
                    connection.shutdown(socket.SHUT_RDWR)


class _Http(urllib.request.HTTPHandler):
    def __init__(self, deadline: _Deadline) -> None:
        super().__init__()
        self._deadline = deadline

    def http_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(partial(_connection, HTTPConnection, self._deadline), req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, deadline: _Deadline) -> None:
        super().__init__()
        self._deadline = deadline

    def https_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(partial(_connection, HTTPSConnection, self._deadline), req)


def _connection(kind: type[HTTPConnection], deadline: _Deadline, host: str, **more: Any) -> HTTPConnection:
    made = kind(host, **more)
    made._create_connection = deadline.connect  # type: ignore[attr-defined]
    return made


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """To where keys may come from, and never from a safe place to one that is not."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        try:
            key_url(newurl)
            if req.full_url.startswith("https:") and not newurl.startswith("https:"):
                raise ValueError("must begin with https://")
        except ValueError as error:
            fp.close()
            raise ValueError(f"sends us on to a place that {error}") from None
        return super().redirect_request(req, fp, code, msg, headers, newurl)


async def _in_daemon(work: Callable[[], T]) -> T:
    """`work` in a thread that nobody waits for: a server that does not answer must not hold up the end of ours."""
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
        result, fault = None, None
        try:
            result = work()
        except Exception as error:  # told to whoever waits
            fault = error
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, result, fault)

    threading.Thread(target=run, name="keys of an issuer", daemon=True).start()
    return await done


def _fingerprint(path: Path) -> _Fingerprint:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _told(error: Exception) -> str:
    """The end of a sentence about the place."""
    if isinstance(error, ValueError):
        return str(error)
    why = getattr(error, "strerror", None) or (str(error) or type(error).__name__)
    return f"cannot be read: {one_line(why)}"
