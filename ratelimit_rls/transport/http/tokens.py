"""Bearer token of the HTTP ports, from a setting or from a file that is reloaded when it changes."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

import structlog

from ratelimit_rls.errors import SettingsError
from ratelimit_rls.settings.http_validation import MIN_TOKEN_CHARACTERS
from ratelimit_rls.tls.certificates import FileState, file_state

_log = structlog.get_logger()


class BearerToken:
    """Expected token, kept as a digest."""

    def __init__(self, token: str = "", file: str = "") -> None:
        """Load the token. Raises SettingsError if the file cannot be used."""
        self._file = file
        self._state: FileState | None = None
        self._digest = _digest(token.encode())
        if file:
            self._state = file_state(file)
            self._digest = _digest(_read_token(file))

    def authorizes(self, fields: Iterable[tuple[bytes, bytes]]) -> bool:
        """Return whether a request has exactly one Authorization header, with this token. The time it takes reveals
        nothing."""
        self._reload_if_changed()
        credentials = [value for name, value in fields if name == b"authorization"]
        if len(credentials) != 1:
            return False
        scheme, _, token = credentials[0].partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(_digest(token.strip(b" ")), self._digest)

    def _reload_if_changed(self) -> None:
        if not self._file or (state := file_state(self._file)) == self._state:
            return
        self._state = state
        try:
            self._digest = _digest(_read_token(self._file))
        except SettingsError as error:
            _log.error("http_token_not_reloaded", error=str(error))


def _read_token(file: str) -> bytes:
    try:
        token = Path(file).read_bytes().strip()
    except OSError as error:
        raise SettingsError(f"RLS_HTTP_TOKEN_FILE={file}: {error.strerror or error}") from error
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise SettingsError(
            f"RLS_HTTP_TOKEN_FILE={file}: the token must have at least {MIN_TOKEN_CHARACTERS} characters"
        )
    return token


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
