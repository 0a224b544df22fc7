"""Rules from files: which files are read, and detection of changes.

Guarantee: one read is consistent. A symbolic link swapped or a file replaced during a read restarts it, so that a
release is seen as a whole. A change is seen at once where the system reports it (inotify and similar), and within
POLL_MS everywhere else, whatever its kind: an edit, a rename, a swapped link.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog
import watchfiles

from ratelimit_rls.errors import Problem, RulesError, SettingsError
from ratelimit_rls.rules import diagnostics
from ratelimit_rls.rules.source_document import MAX_BYTES, SourceDocument

POLL_MS = 1000
SETTLE_MS = 50
"""Editors and kubelets write in bursts: a change counts once nothing has changed for this long."""

MAX_ATTEMPTS = 5

_YAML_ENDINGS = (".yaml", ".yml")
_LEFTOVER_ENDINGS = ("~", ".swp", ".swx", ".tmp", "#")
_TEST_ENDINGS = (".test.yaml", ".test.yml")

Fingerprint = tuple[tuple[str, int, int, int, int, int], ...]

_log = structlog.get_logger()


class FileSet(Protocol):
    """Selection of rules files, evaluated anew on each call."""

    def files(self) -> list[Path]:
        """Return the files, sorted. Raise SettingsError if the location does not exist."""
        ...

    def watched(self) -> set[Path]:
        """Return the directories in which a change may matter."""
        ...


@dataclass(frozen=True, slots=True)
class PlainPaths:
    """Files, and directories of which every *.yaml and *.yml is read, at any depth."""

    paths: tuple[Path, ...]

    def files(self) -> list[Path]:
        found: set[Path] = set()
        for path in self.paths:
            if path.is_dir():
                found.update(file for file in walk(path, ignore_dot_files=True) if file.name.endswith(_YAML_ENDINGS))
            elif path.exists():
                found.add(path)
            else:
                raise SettingsError(f"no rules at {path}: there is no such file or directory")
        return sorted(found)

    def watched(self) -> set[Path]:
        directories = {path.parent for path in self.paths}
        for path in self.paths:
            if path.is_dir():
                directories.update(_directories(path))
        return directories


@dataclass(frozen=True, slots=True)
class RuntimeTree:
    """Files selected by RUNTIME_ROOT, RUNTIME_SUBDIRECTORY and RUNTIME_APPDIRECTORY, as in envoyproxy/ratelimit.

    With `watch_root`, every file under ROOT/SUBDIRECTORY whose path, with dots for slashes, starts with
    "APPDIRECTORY.": the directory's files, and also a file such as config.yaml beside it. Without it, the files of
    ROOT/SUBDIRECTORY/APPDIRECTORY. Every file counts, whatever its extension.
    """

    root: Path
    subdirectory: str = ""
    app_directory: str = "config"
    watch_root: bool = True
    ignore_dot_files: bool = False

    def files(self) -> list[Path]:
        base = self._base()
        prefix = self.app_directory.strip("/").replace("/", ".") + "."
        if not base.is_dir():
            raise SettingsError(self._missing(base))
        found = walk(base, ignore_dot_files=self.ignore_dot_files)
        if not self.watch_root or not self.app_directory:
            return sorted(found)
        inside = sorted(file for file in found if _dotted(file, base).startswith(prefix))
        if not inside and not (base / self.app_directory).is_dir():
            raise SettingsError(self._missing(base / self.app_directory))
        return inside

    def watched(self) -> set[Path]:
        # The parents contain the links that are swapped: usually ROOT itself, and in a mounted volume any of them.
        base = self._base()
        parents = {self.root.parent, self.root, base.parent}
        return {directory for directory in parents if directory.is_dir()} | set(_directories(base))

    def _base(self) -> Path:
        base = self.root / self.subdirectory.strip("/")
        return base if self.watch_root else base / self.app_directory.strip("/")

    def _missing(self, path: Path) -> str:
        return (
            f"no rules at {path}: there is no such directory; create it, or say where the rules are "
            f"(now RUNTIME_ROOT={self.root}, RUNTIME_SUBDIRECTORY={self.subdirectory}, "
            f"RUNTIME_APPDIRECTORY={self.app_directory})"
        )


def walk(base: Path, *, ignore_dot_files: bool) -> Iterator[Path]:
    """Yield every file under `base` that may contain rules. Links to files are followed, links to directories are not.

    Names that start with ".." are never included: in a Kubernetes volume they are duplicates of the same files.
    """
    for directory, subdirectories, names in os.walk(base, onerror=_unreadable):
        subdirectories[:] = [name for name in subdirectories if not _is_hidden(name, ignore_dot_files)]
        for name in names:
            if not _is_hidden(name, ignore_dot_files) and not name.endswith(_LEFTOVER_ENDINGS + _TEST_ENDINGS):
                yield Path(directory, name)


def _unreadable(error: OSError) -> None:
    """Raise SettingsError for an unreadable directory: its rules must not silently disappear."""
    if not isinstance(error, FileNotFoundError):  # removed since it was listed
        raise SettingsError(
            f"no rules at {error.filename}: {error.strerror}; the service's user must be able to read it"
        ) from error


def _is_hidden(name: str, ignore_dot_files: bool) -> bool:
    return name.startswith(".." if not ignore_dot_files else ".")


def _dotted(file: Path, base: Path) -> str:
    return ".".join(file.relative_to(base).parts)


def _directories(base: Path) -> Iterator[Path]:
    for directory, _, _ in os.walk(base):
        yield Path(directory)


class RulesFiles:
    """A set of files as a source of rules."""

    def __init__(self, files: FileSet | Sequence[Path | str]) -> None:
        self._files = PlainPaths(tuple(Path(path) for path in files)) if isinstance(files, Sequence) else files

    def check(self) -> None:
        """Raise SettingsError if the location does not exist."""
        self._files.files()

    def read(self) -> list[SourceDocument]:
        """Return every file as of one moment, sorted by name. Raise SettingsError or RulesError."""
        for _ in range(MAX_ATTEMPTS):
            before = self.fingerprint()
            try:
                sources = [SourceDocument(name, _read_start(name)) for name, *_ in before]
            except FileNotFoundError:
                continue
            except OSError as error:
                reason = diagnostics.unreadable_file(f"{error.strerror}; the service's user must be able to read it")
                raise RulesError([Problem(str(error.filename), 1, 1, reason)]) from error
            if self.fingerprint() == before:
                return sources
        name = before[0][0] if before else str(self._files)
        raise RulesError(
            [Problem(name, 1, 1, diagnostics.unreadable_file("the files changed during every attempt to read them"))]
        )

    def fingerprint(self) -> Fingerprint:
        """Return a fingerprint that changes when a file is added, removed, replaced or written to."""
        seen = []
        for file in self._files.files():
            try:
                found = file.stat()
            except OSError:
                continue  # a dangling link, or a file removed since it was listed
            if stat.S_ISREG(found.st_mode):
                # ctime too: a copy may preserve mtime and size.
                seen.append(
                    (str(file), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
                )
        return tuple(seen)

    async def watch(self) -> AsyncGenerator[None, None]:
        """Yield at once, and after each change has settled. Ends when cancelled or closed.

        Yielding at once covers changes between an earlier read and the first check of the watch.
        """
        seen = await asyncio.to_thread(self._fingerprint_or_nothing)
        yield
        while True:
            async with aclosing(self._wakeups()) as wakeups:
                async for _ in wakeups:
                    if await asyncio.to_thread(self._fingerprint_or_nothing) != seen:
                        break
            seen = await self._settle()
            yield

    async def _settle(self) -> Fingerprint:
        """Wait until nothing has changed for SETTLE_MS, but at most POLL_MS. Return the fingerprint."""
        now = await asyncio.to_thread(self._fingerprint_or_nothing)
        for _ in range(POLL_MS // SETTLE_MS):
            await asyncio.sleep(SETTLE_MS / 1000)
            before, now = now, await asyncio.to_thread(self._fingerprint_or_nothing)
            if now == before:
                break
        return now

    def _fingerprint_or_nothing(self) -> Fingerprint:
        try:
            return self.fingerprint()
        except SettingsError:
            return ()

    async def _wakeups(self) -> AsyncGenerator[None, None]:
        """Yield once the watches are set, when something may have changed, and at least every POLL_MS.

        Start it anew after each change: the directories to watch may differ then.
        """
        try:
            directories = await asyncio.to_thread(self._files.watched)
            async with aclosing(_changes_in(directories)) as changes:
                async for _ in changes:
                    yield
        except (OSError, RuntimeError) as error:  # a directory was removed, or the system has no watches left
            _log.debug("file_watch_unavailable", fallback="polling", error=str(error))
            while True:
                await asyncio.sleep(POLL_MS / 1000)
                yield


async def _changes_in(directories: set[Path]) -> AsyncGenerator[None, None]:
    watching = watchfiles.awatch(
        *directories,
        watch_filter=None,
        recursive=False,
        step=SETTLE_MS,
        rust_timeout=POLL_MS,
        yield_on_timeout=True,
        ignore_permission_denied=True,
    )
    first = asyncio.ensure_future(anext(watching))
    try:
        await asyncio.sleep(0)  # the first step of `first` sets the watches
        yield
        await first
        yield
        async for _ in watching:
            yield
    finally:
        first.cancel()
        await asyncio.wait([first])
        await watching.aclose()


def _read_start(name: str) -> bytes:
    """Return the file's content, at most one byte more than the size limit."""
    with open(name, "rb") as file:
        return file.read(MAX_BYTES + 1)
