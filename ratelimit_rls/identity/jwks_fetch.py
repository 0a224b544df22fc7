"""HTTP client for key sets: one blocking fetch within a deadline, for a thread of its own."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from ratelimit_rls.identity.issuers import key_url
from ratelimit_rls.identity.jwks import MAX_BYTES

if TYPE_CHECKING:
    import httpx

MAX_REDIRECTS = 10

_HEADERS = {
    "Accept": "application/jwk-set+json, application/json",
    "Accept-Encoding": "identity",  # a compressed response could be much larger than its bytes
}


def fetch(url: str, timeout_s: float) -> bytes:
    """Return the content at `url`, fetched within the timeout. Raises OSError, httpx.HTTPError or ValueError."""
    import httpx  # 4 MB that only processes with keys at a URL need

    authorities = ssl.create_default_context()  # those of the system, not those of certifi
    with (
        httpx.Client(verify=authorities, timeout=timeout_s, headers=_HEADERS) as client,
        _Deadline(timeout_s) as deadline,
    ):
        try:
            return _get(client, url, deadline)
        except (OSError, httpx.HTTPError) as error:
            if deadline.is_over or isinstance(error, httpx.TimeoutException):
                raise TimeoutError(f"timed out: the response was not complete within {timeout_s:g} s") from None
            raise


def _get(client: httpx.Client, url: str, deadline: _Deadline) -> bytes:
    for _ in range(MAX_REDIRECTS + 1):
        with client.stream("GET", url, extensions={"trace": deadline.trace}) as response:
            if response.next_request is None:
                return _read(response, deadline)
            url = _redirect_url(response, str(response.next_request.url))
    raise OSError(f"the server redirected more than {MAX_REDIRECTS} times")


def _read(response: httpx.Response, deadline: _Deadline) -> bytes:
    if response.status_code != 200:
        raise OSError(f"the server responded {response.status_code} {response.reason_phrase}")
    content = b""
    for piece in response.iter_raw():
        content += piece
        if len(content) > MAX_BYTES:
            raise ValueError(f"is larger than {MAX_BYTES // 2**20} MiB")
    if deadline.is_over:  # its shutdown looks like the end of a response without a length
        raise TimeoutError
    return content


def _redirect_url(response: httpx.Response, url: str) -> str:
    """Return where a redirect leads, if keys may be fetched from there; never from https to http."""
    try:
        key_url(url)
        if response.url.scheme == "https" and not url.startswith("https:"):
            raise ValueError("must begin with https://")
    except ValueError as error:
        raise ValueError(f"redirects to a URL that is not allowed: it {error}") from None
    return url


class _Deadline:
    """Deadline for a whole fetch, from the first connection to the last byte.

    A timeout of httpx applies to each operation, so a server that sends a byte now and then never exceeds it. At the
    deadline all connections are shut down, which wakes the thread that waits for one.
    """

    def __init__(self, timeout_s: float) -> None:
        self.is_over = False
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self._timer = threading.Timer(timeout_s, self._end)
        self._timer.daemon = True
        self._timer.name = "jwks-fetch-deadline"

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            for connection in self._connections:
                connection.close()
            self._connections = []

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Keep a duplicate of each new connection, since TLS detaches the original. Called by httpx for each step."""
        if event == "connection.connect_tcp.complete":
            made = info["return_value"]
            with self._lock:
                if self.is_over:
                    made.close()
                    raise TimeoutError
                self._connections.append(made.get_extra_info("socket").dup())

    def _end(self) -> None:
        with self._lock:
            self.is_over = True
            for connection in self._connections:
                with suppress(OSError):  # already closed by the peer
                    connection.shutdown(socket.SHUT_RDWR)
