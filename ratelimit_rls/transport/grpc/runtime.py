"""Where the Unix sockets between our own parts live: a directory of this process that nobody else can enter."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ratelimit_rls.errors import SettingsError

_LONGEST_PATH_BYTES = 107 - len("/fallback.sock")
"""What the kernel takes as a socket's address, less the longest name we give one."""


def runtime_dir(configured: str = "") -> Path:
    """A new directory with mode 0700; the caller removes it.

    In RLS_RUNTIME_DIR if that is set, else in the first of XDG_RUNTIME_DIR, the temporary directory and /dev/shm that
    takes it (the root file system of a container is often read-only).
    """
    if configured:
        try:
            return _new(configured)
        except OSError as error:
            raise SettingsError(
                f"RLS_RUNTIME_DIR={configured}: {error.strerror}; name a directory that this process may write to"
            ) from error
    candidates = [os.environ.get("XDG_RUNTIME_DIR"), os.environ.get("TMPDIR") or "/tmp", "/dev/shm"]  # noqa: S108
    tried: list[str] = []
    for candidate in filter(None, candidates):
        try:
            return _new(candidate)
        except OSError as error:
            tried.append(f"{candidate}: {error.strerror}")
    raise SettingsError(
        f"no directory for Unix sockets ({'; '.join(tried)}); set RLS_RUNTIME_DIR to one that this process may write to"
    )


def _new(parent: str) -> Path:
    created = Path(tempfile.mkdtemp(prefix="ratelimit-rls-", dir=parent))
    if len(os.fsencode(created)) > _LONGEST_PATH_BYTES:
        created.rmdir()
        raise OSError(36, "the path is too long for a Unix socket")
    return created
