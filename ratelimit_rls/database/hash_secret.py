"""The secret that keys the hashes of API keys and tokens: configured, or generated and stored beside a SQLite file.

It is not in the database, so that a stolen copy of the database alone does not even allow guessing keys.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from ratelimit_rls.errors import SettingsError

_BYTES = 32


def load_key_secret(given: str, database_file: Path | None) -> bytes:
    """Return the secret. `database_file` is the SQLite file; None for PostgreSQL, which requires `given`.

    Raises SettingsError if there is no secret.
    """
    if given:
        return given.encode()
    if database_file is None:
        raise SettingsError(
            "RLS_KEY_SECRET is not set; a database that several processes share needs one: any text that is hard to "
            "guess, the same for all processes, e.g. from `openssl rand -hex 32`"
        )
    path = database_file.with_name(database_file.name + ".secret")
    try:
        return _read_or_create(path)
    except OSError as error:
        raise SettingsError(f"the secret of API keys cannot be stored in {path}: {error.strerror}") from error


def _read_or_create(path: Path) -> bytes:
    if not path.exists():
        _create(path)
    secret = path.read_text().strip()
    if not secret:
        raise SettingsError(f"{path} is empty; restore its secret, or delete it together with all keys")
    return secret.encode()


def _create(path: Path) -> None:
    """Create the file atomically: a concurrent process reads all of it, or creates it, too, and one of the two wins."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    made = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(made, "w") as file:
            file.write(secrets.token_hex(_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(fresh, path)
    finally:
        fresh.unlink()
