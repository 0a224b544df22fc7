"""Runtime directory: a private directory of this process for its internal Unix sockets."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ratelimit_rls.errors import SettingsError

_MAX_PATH_BYTES = 107 - len("/aio.sock")
"""Longest socket address that the kernel accepts, minus the longest file name that we use."""


def runtime_dir(configured: str = "") -> Path:
    """Create a directory with mode 0700; the caller removes it.

    Its parent is RLS_RUNTIME_DIR if that is set, otherwise the first writable one of XDG_RUNTIME_DIR, the temporary
    directory and /dev/shm (the root file system of a container is often read-only). Raises SettingsError.
    """
    if configured:
        try:
            return _new(configured)
        except OSError as error:
            raise SettingsError(
                f"RLS_RUNTIME_DIR={configured}: {error.strerror}; it must be a directory that this process can write to"
            ) from error
    candidates = [os.environ.get("XDG_RUNTIME_DIR"), os.environ.get("TMPDIR") or "/tmp", "/dev/shm"]  # noqa: S108
    tried: list[str] = []
    for candidate in filter(None, candidates):
        try:
            return _new(candidate)
        except OSError as error:
            tried.append(f"{candidate}: {error.strerror}")
    raise SettingsError(
        f"no directory for Unix sockets ({'; '.join(tried)}); set RLS_RUNTIME_DIR to one that this process can write to"
    )


def _new(parent: str) -> Path:
    created = Path(tempfile.mkdtemp(prefix="ratelimit-rls-", dir=parent))
    if len(os.fsencode(created)) > _MAX_PATH_BYTES:
        created.rmdir()
        raise OSError(36, "the path is too long for a Unix socket")
    return created
