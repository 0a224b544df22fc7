"""Selection of rules files in common directory layouts, and detection of every kind of change."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from ratelimit_rls.errors import RulesError, SettingsError
from ratelimit_rls.rules.source_document import MAX_BYTES
from ratelimit_rls.rules.sources import files as files_module
from ratelimit_rls.rules.sources.files import RulesFiles, RuntimeTree

PATIENCE_S = 10


def _write(path: Path, text: str = "domain: d\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def _names(source: RulesFiles, root: Path) -> list[str]:
    return [os.path.relpath(read.name, root) for read in source.read()]


def _swap_link(link: Path, target: str) -> None:
    """Swap a link as kubelet and deployment tools do: rename a new link over the old one."""
    fresh = link.with_name(link.name + "_fresh")
    fresh.symlink_to(target)
    fresh.rename(link)


class TestRuntimeTree:
    def test_watch_root_reads_app_directory_and_files_with_its_prefix(self, tmp_path: Path) -> None:
        for name in (
            "config/a.yaml",
            "config/deep/b.txt",
            "config.yaml",
            "config.d/c",
            "configs/no.yaml",
            "other/no.yaml",
        ):
            _write(tmp_path / "ratelimit" / name)

        source = RulesFiles(RuntimeTree(tmp_path, "ratelimit"))

        assert _names(source, tmp_path / "ratelimit") == [
            "config/a.yaml",
            "config/deep/b.txt",
            "config.d/c",
            "config.yaml",
        ]

    def test_without_watch_root_only_app_directory_is_read(self, tmp_path: Path) -> None:
        for name in ("config/a.yaml", "config/deep/b", "config.yaml"):
            _write(tmp_path / "ratelimit" / name)

        source = RulesFiles(RuntimeTree(tmp_path, "ratelimit", watch_root=False))

        assert _names(source, tmp_path / "ratelimit") == ["config/a.yaml", "config/deep/b"]

    @pytest.mark.parametrize("watch_root", [True, False])
    def test_empty_subdirectory_reads_app_directory_of_the_root(self, tmp_path: Path, watch_root: bool) -> None:
        _write(tmp_path / "rules" / "a.yaml")

        source = RulesFiles(RuntimeTree(tmp_path, app_directory="rules", watch_root=watch_root))

        assert _names(source, tmp_path) == ["rules/a.yaml"]

    @pytest.mark.parametrize(
        ("ignore", "expected"), [(False, [".hidden/b.yaml", ".secret.yaml", "a.yaml"]), (True, ["a.yaml"])]
    )
    def test_dot_files_are_read_unless_ignored(self, tmp_path: Path, ignore: bool, expected: list[str]) -> None:
        for name in ("a.yaml", ".secret.yaml", ".hidden/b.yaml"):
            _write(tmp_path / "config" / name)

        source = RulesFiles(RuntimeTree(tmp_path, ignore_dot_files=ignore))

        assert _names(source, tmp_path / "config") == expected

    def test_temporary_files_tests_and_non_files_are_skipped(self, tmp_path: Path) -> None:
        for name in ("a.yaml", "a.yaml~", ".a.yaml.swp", "b.tmp", "#a.yaml#", "a.test.yaml"):
            _write(tmp_path / "config" / name)
        os.mkfifo(tmp_path / "config" / "pipe")
        (tmp_path / "config" / "nowhere").symlink_to("gone")

        assert _names(RulesFiles(RuntimeTree(tmp_path)), tmp_path) == ["config/a.yaml"]

    def test_links_to_files_are_followed_and_links_to_directories_are_not(self, tmp_path: Path) -> None:
        outside = _write(tmp_path / "elsewhere" / "x.yaml")
        (tmp_path / "config").mkdir()
        (tmp_path / "config" / "file.yaml").symlink_to(outside)
        (tmp_path / "config" / "directory").symlink_to(outside.parent)

        assert _names(RulesFiles(RuntimeTree(tmp_path)), tmp_path) == ["config/file.yaml"]

    @pytest.mark.parametrize("watch_root", [True, False])
    def test_missing_directory_is_named_in_the_error(self, tmp_path: Path, watch_root: bool) -> None:
        source = RulesFiles(RuntimeTree(tmp_path, "ratelimit", watch_root=watch_root))

        with pytest.raises(SettingsError, match=f"no rules at {tmp_path}/ratelimit.*RUNTIME_SUBDIRECTORY=ratelimit"):
            source.check()
        (tmp_path / "ratelimit").mkdir()
        with pytest.raises(SettingsError, match=f"no rules at {tmp_path}/ratelimit/config"):
            source.check()

    def test_empty_app_directory_is_not_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "config").mkdir()

        assert RulesFiles(RuntimeTree(tmp_path)).read() == []


class TestPlainPaths:
    def test_plain_paths_expand_directories_to_yaml_files(self, tmp_path: Path) -> None:
        for name in ("d/a.yaml", "d/deep/b.yml", "d/README.md", "d/a.test.yaml", "d/.git/x.yaml", "plain.conf"):
            _write(tmp_path / name)

        source = RulesFiles([tmp_path / "d", str(tmp_path / "plain.conf"), tmp_path / "d" / "a.yaml"])

        assert _names(source, tmp_path) == ["d/a.yaml", "d/deep/b.yml", "plain.conf"]

    def test_missing_path_is_named_in_the_error(self, tmp_path: Path) -> None:
        with pytest.raises(SettingsError, match=f"no rules at {tmp_path}/typo"):
            RulesFiles([tmp_path / "typo"]).check()


def test_unreadable_file_is_an_error_naming_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _write(tmp_path / "a.yaml")

    def deny_access(name: str) -> bytes:
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr(files_module, "_read_start", deny_access)  # root may read anything, and tests may run as root

    with pytest.raises(RulesError, match=f"{file}:1:1: error: .*Permission denied"):
        RulesFiles([tmp_path]).read()


def test_unreadable_directory_is_an_error_not_an_empty_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "team").mkdir()
    (tmp_path / "team" / "rules.yaml").write_text("domain: a")
    readable = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("team"):
            raise PermissionError(13, "Permission denied", str(path))
        return readable(path)

    monkeypatch.setattr(os, "scandir", scandir)

    with pytest.raises(SettingsError, match=r"no rules at .*team: Permission denied; the service's user must"):
        RulesFiles([tmp_path]).read()


def test_oversized_file_is_read_only_up_to_the_bound(tmp_path: Path) -> None:
    with open(tmp_path / "a.yaml", "wb") as file:
        file.truncate(MAX_BYTES * 4)

    (source,) = RulesFiles([tmp_path]).read()

    assert len(source.content) == MAX_BYTES + 1


def test_link_swapped_during_a_read_restarts_the_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for release in ("one", "two"):
        for name in ("a.yaml", "b.yaml"):
            _write(tmp_path / release / "config" / name, f"domain: {release}-{name}\n")
    (tmp_path / "current").symlink_to("one")
    read_start = files_module._read_start
    swapped: list[str] = []

    def read_and_swap_once(name: str) -> bytes:
        content = read_start(name)
        if not swapped:
            swapped.append(name)
            _swap_link(tmp_path / "current", "two")
        return content

    monkeypatch.setattr(files_module, "_read_start", read_and_swap_once)

    sources = RulesFiles(RuntimeTree(tmp_path / "current")).read()

    assert [source.content for source in sources] == [b"domain: two-a.yaml\n", b"domain: two-b.yaml\n"]


class _CountingFiles(RulesFiles):
    """Signals when the files were checked a second time."""

    def __init__(self, tree: RuntimeTree) -> None:
        super().__init__(tree)
        self.checked_twice = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._looks = 0

    def fingerprint(self) -> files_module.Fingerprint:
        found = super().fingerprint()
        self._looks += 1
        if self._looks == 2:
            self._loop.call_soon_threadsafe(self.checked_twice.set)
        return found


class TestWatch:
    async def _notices(self, source: RulesFiles, *changes: Callable[[], object]) -> None:
        """Assert that each change wakes the waiting watch, and that the content read afterwards is new."""
        async with aclosing(source.watch()) as wakes:
            await asyncio.wait_for(anext(wakes), PATIENCE_S)
            before = source.read()
            for change in changes:
                waiting = asyncio.ensure_future(anext(wakes))
                await asyncio.to_thread(change)
                await asyncio.wait_for(waiting, PATIENCE_S)
                now = source.read()
                assert now != before
                before = now

    async def test_watch_notices_edit_creation_rename_and_removal(self, tmp_path: Path) -> None:
        file = _write(tmp_path / "config" / "a.yaml")
        other = tmp_path / "config" / "deep" / "b.yaml"

        await self._notices(
            RulesFiles([tmp_path / "config"]),
            lambda: file.write_text("domain: e\n"),
            lambda: _write(other),
            lambda: other.write_text("domain: f\n"),
            lambda: _write(tmp_path / "b.new", "domain: g\n").rename(other),
            other.unlink,
        )

    async def test_watch_notices_repeated_root_swaps(self, tmp_path: Path) -> None:
        for release in ("one", "two", "three"):
            _write(tmp_path / release / "ratelimit" / "config" / "a.yaml", f"domain: {release}\n")
        (tmp_path / "current").symlink_to("one")

        await self._notices(
            RulesFiles(RuntimeTree(tmp_path / "current", "ratelimit")),
            lambda: _swap_link(tmp_path / "current", "two"),
            lambda: _swap_link(tmp_path / "current", "three"),
            lambda: (tmp_path / "three/ratelimit/config/a.yaml").write_text("domain: edited\n"),
        )

    @pytest.mark.parametrize("watch_root", [True, False])
    async def test_watch_notices_config_map_updates(self, tmp_path: Path, watch_root: bool) -> None:
        volume = tmp_path / "ratelimit" / "config"
        for stamp in ("..2024_01_01_00_00_00.1", "..2024_01_02_00_00_00.2", "..2024_01_03_00_00_00.3"):
            _write(volume / stamp / "rules.yaml", f"domain: d  # {stamp}\n")
        (volume / "..data").symlink_to("..2024_01_01_00_00_00.1")
        (volume / "rules.yaml").symlink_to("..data/rules.yaml")
        source = RulesFiles(RuntimeTree(tmp_path, "ratelimit", watch_root=watch_root))

        assert _names(source, volume) == ["rules.yaml"]
        await self._notices(
            source,
            lambda: _swap_link(volume / "..data", "..2024_01_02_00_00_00.2"),
            lambda: _swap_link(volume / "..data", "..2024_01_03_00_00_00.3"),
        )

    async def test_watch_notices_a_recreated_directory(self, tmp_path: Path) -> None:
        config = _write(tmp_path / "config" / "a.yaml").parent
        source = RulesFiles(RuntimeTree(tmp_path))
        async with aclosing(source.watch()) as wakes:
            await anext(wakes)
            config.rename(tmp_path / "away")
            await asyncio.wait_for(anext(wakes), PATIENCE_S)
            with pytest.raises(SettingsError):
                source.read()
            (tmp_path / "away").rename(config)
            await asyncio.wait_for(anext(wakes), PATIENCE_S)
            assert len(source.read()) == 1

    async def test_watch_falls_back_to_polling(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_watches_left(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("watchfiles.awatch", no_watches_left)
        monkeypatch.setattr(files_module, "POLL_MS", 100)
        file = _write(tmp_path / "a.yaml")

        await self._notices(RulesFiles([tmp_path]), lambda: file.write_text("domain: e\n"))

    @pytest.mark.parametrize("change", ["edit", "swapped root", "updated volume"])
    async def test_watch_wakes_on_file_system_events_without_polling(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
    ) -> None:
        monkeypatch.setattr(files_module, "POLL_MS", 60_000)
        for release in ("one", "two"):
            _write(tmp_path / release / "config" / f"..{release}" / "a.yaml", f"domain: {release}\n")
            (tmp_path / release / "config" / "..data").symlink_to(f"..{release}")
            (tmp_path / release / "config" / "a.yaml").symlink_to("..data/a.yaml")
        (tmp_path / "current").symlink_to("one")
        config = tmp_path / "current" / "config"
        _write(config / "..three" / "a.yaml", "domain: three\n")
        _write(config / "b.yaml")
        source = _CountingFiles(RuntimeTree(tmp_path / "current"))
        async with aclosing(source.watch()) as wakes:
            await anext(wakes)
            waiting = asyncio.ensure_future(anext(wakes))
            await asyncio.wait_for(source.checked_twice.wait(), PATIENCE_S)  # only a file system event can wake it now

            if change == "edit":
                (config / "b.yaml").write_text("domain: e\n")
            elif change == "swapped root":
                _swap_link(tmp_path / "current", "two")
            else:
                _swap_link(config / "..data", "..three")

            await asyncio.wait_for(waiting, PATIENCE_S)

    async def test_cancelled_watch_ends_at_once(self, tmp_path: Path) -> None:
        _write(tmp_path / "a.yaml")
        started = asyncio.Event()

        async def watch() -> None:
            async for _ in RulesFiles([tmp_path]).watch():
                started.set()

        watching = asyncio.create_task(watch())
        await started.wait()
        watching.cancel()

        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(watching, PATIENCE_S)
