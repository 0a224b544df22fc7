"""The secret that hashes of keys and tokens are keyed with: given, or made once and kept beside an embedded database.

Not in the database: whoever gets hold of a copy of that alone can then not even try out keys on it.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from ratelimit_rls.errors import SettingsError

_BYTES = 32


def key_secret(given: str, database_file: Path | None) -> bytes:
    """`database_file` is that of an embedded database, None for any other. Raises SettingsError if there is none."""
    if given:
        return given.encode()
    if database_file is None:
        raise SettingsError(
            "RLS_KEY_SECRET is not set; a database that several processes share needs one: any text that is hard to "
            "guess, the same for all of them, e.g. of `openssl rand -hex 32`"
        )
    path = database_file.with_name(database_file.name + ".secret")
    try:
        return _read_or_make(path)
    except OSError as error:
        raise SettingsError(f"the secret of API keys cannot be kept in {path}: {error.strerror}") from error


def _read_or_make(path: Path) -> bytes:
    if not path.exists():
        _make(path)
    kept = path.read_text().strip()
    if not kept:
        raise SettingsError(f"{path} is empty; put the secret back that it had, or remove it with the keys")
    return kept.encode()


def _make(path: Path) -> None:
    """Whole at once: another process that starts now reads all of it, or makes it itself, and one of the two counts."""
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
