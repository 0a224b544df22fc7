"""The file of a SQLite database: which of the files that were at its path is in use, and how a new one is created."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

from ratelimit_rls.errors import DatabaseUnavailable

FileId = tuple[int, int]
"""Identity of a file, even if moved: its device and inode numbers."""


class SqliteFile:
    """The file at a path, which another file may replace, e.g. a backup."""

    def __init__(self, path: Path, display_name: str) -> None:
        """`display_name` is for messages."""
        self.path = path
        self.used: FileId | None = None  # the file that all connections use; None: not used yet
        self._display_name = display_name

    def on_disk(self) -> FileId | None:
        """Return the file that is now at the path; None if there is none, or it is inaccessible."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def require_same(self) -> None:
        """Raise DatabaseUnavailable unless the file is the one used before. The first call accepts any file."""
        there = self.on_disk()
        if there is None:
            raise DatabaseUnavailable(f"{self._display_name} does not exist: put it back")
        if self.used is None:
            self.used = there
        elif there != self.used:
            raise DatabaseUnavailable(f"{self._display_name} was replaced by another file, which must be read first")

    def require_content(self) -> None:
        """Raise DatabaseUnavailable if the file is empty. Does not open it: it may still be being written."""
        with contextlib.suppress(OSError):  # it disappeared again
            if self.path.stat().st_size == 0:
                raise self.empty_error()

    def empty_error(self) -> DatabaseUnavailable:
        return DatabaseUnavailable(f"{self._display_name} was replaced by an empty file: restore the right one")

    def create(self) -> None:
        """Create the file with access for its owner only, unless there is one; SQLite would create it for everyone.

        It is created under another name and linked, so that it is complete at once if another process creates it, too.
        """
        if self.path.exists():
            return
        fresh = self.path.with_name(f".{self.path.name}.{os.getpid()}.new")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(fresh, os.O_CREAT | os.O_RDWR, 0o600))
            with contextlib.closing(sqlite3.connect(fresh)) as new:
                # Only possible in an empty file: lets retention give back the space of deleted rows.
                new.execute("PRAGMA auto_vacuum = INCREMENTAL")
                new.execute("PRAGMA journal_mode = WAL")
            with contextlib.suppress(FileExistsError):
                os.link(fresh, self.path)
        except (OSError, sqlite3.Error) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise DatabaseUnavailable(
                f"{self._display_name} cannot be created: {reason}; the user of the service must have write access"
            ) from None
        finally:
            with contextlib.suppress(OSError):
                fresh.unlink()
