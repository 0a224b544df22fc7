"""Which files are read, in the layouts that are met in the wild, and that every kind of change is noticed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from ratelimit_rls.errors import RulesError, SettingsError
from ratelimit_rls.rules.load import MOST_BYTES
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
    """As kubelet and deployment tools do it: a new link renamed over the old."""
    fresh = link.with_name(link.name + "_fresh")
    fresh.symlink_to(target)
    fresh.rename(link)


class TestRuntimeTree:
    def test_with_watch_root_the_app_directory_and_what_starts_like_it_are_read(self, tmp_path: Path) -> None:
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

    def test_without_watch_root_only_the_app_directory_is_read(self, tmp_path: Path) -> None:
        for name in ("config/a.yaml", "config/deep/b", "config.yaml"):
            _write(tmp_path / "ratelimit" / name)

        source = RulesFiles(RuntimeTree(tmp_path, "ratelimit", watch_root=False))

        assert _names(source, tmp_path / "ratelimit") == ["config/a.yaml", "config/deep/b"]

    @pytest.mark.parametrize("watch_root", [True, False])
    def test_without_a_subdirectory_the_root_s_own_app_directory_is_read(
        self, tmp_path: Path, watch_root: bool
    ) -> None:
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

    def test_leftovers_tests_and_what_is_no_file_are_left_out(self, tmp_path: Path) -> None:
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
    def test_a_missing_directory_is_named(self, tmp_path: Path, watch_root: bool) -> None:
        source = RulesFiles(RuntimeTree(tmp_path, "ratelimit", watch_root=watch_root))

        with pytest.raises(SettingsError, match=f"no rules at {tmp_path}/ratelimit.*RUNTIME_SUBDIRECTORY=ratelimit"):
            source.check()
        (tmp_path / "ratelimit").mkdir()
        with pytest.raises(SettingsError, match=f"no rules at {tmp_path}/ratelimit/config"):
            source.check()

    def test_an_empty_app_directory_has_no_rules_and_is_no_error(self, tmp_path: Path) -> None:
        (tmp_path / "config").mkdir()

        assert RulesFiles(RuntimeTree(tmp_path)).read() == []


class TestPlainPaths:
    def test_a_directory_gives_its_yaml_files_and_a_file_itself(self, tmp_path: Path) -> None:
        for name in ("d/a.yaml", "d/deep/b.yml", "d/README.md", "d/a.test.yaml", "d/.git/x.yaml", "plain.conf"):
            _write(tmp_path / name)

        source = RulesFiles([tmp_path / "d", str(tmp_path / "plain.conf"), tmp_path / "d" / "a.yaml"])

        assert _names(source, tmp_path) == ["d/a.yaml", "d/deep/b.yml", "plain.conf"]

    def test_a_path_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(SettingsError, match=f"no rules at {tmp_path}/typo"):
            RulesFiles([tmp_path / "typo"]).check()


def test_a_file_that_may_not_be_read_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _write(tmp_path / "a.yaml")

    def refuse(name: str) -> bytes:
        raise PermissionError(13, "Permission denied", name)

    monkeypatch.setattr(files_module, "_read_start", refuse)  # root may read anything, and tests may run as root

    with pytest.raises(RulesError, match=f"{file}:1:1: error: .*Permission denied"):
        RulesFiles([tmp_path]).read()


def test_a_directory_that_may_not_be_read_is_an_error_and_not_a_directory_without_rules(
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


def test_no_more_is_read_of_a_file_than_shows_that_it_is_too_large(tmp_path: Path) -> None:
    with open(tmp_path / "a.yaml", "wb") as file:
        file.truncate(MOST_BYTES * 4)

    (source,) = RulesFiles([tmp_path]).read()

    assert len(source.content) == MOST_BYTES + 1


def test_a_swap_in_the_middle_of_a_reading_starts_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


class _Looked(RulesFiles):
    """Tells when it has looked at its files a second time."""

    def __init__(self, tree: RuntimeTree) -> None:
        super().__init__(tree)
        self.looked_twice = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._looks = 0

    def fingerprint(self) -> files_module.Fingerprint:
        found = super().fingerprint()
        self._looks += 1
        if self._looks == 2:
            self._loop.call_soon_threadsafe(self.looked_twice.set)
        return found


class TestWatch:
    async def _notices(self, source: RulesFiles, *changes: Callable[[], object]) -> None:
        """Each change, made while the watch waits, wakes it, and what is then read is new."""
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

    async def test_an_edit_a_new_file_a_rename_and_a_removal_are_noticed(self, tmp_path: Path) -> None:
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

    async def test_a_swapped_root_is_noticed_again_and_again(self, tmp_path: Path) -> None:
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
    async def test_a_config_map_is_read_once_and_its_updates_are_noticed(
        self, tmp_path: Path, watch_root: bool
    ) -> None:
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

    async def test_a_directory_that_went_and_came_back_is_noticed(self, tmp_path: Path) -> None:
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

    async def test_polling_alone_notices_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_watches_left(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(files_module.watchfiles, "awatch", no_watches_left)
        monkeypatch.setattr(files_module, "POLL_MS", 100)
        file = _write(tmp_path / "a.yaml")

        await self._notices(RulesFiles([tmp_path]), lambda: file.write_text("domain: e\n"))

    @pytest.mark.parametrize("change", ["edit", "swapped root", "updated volume"])
    async def test_the_system_s_own_notice_is_enough(
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
        source = _Looked(RuntimeTree(tmp_path / "current"))
        async with aclosing(source.watch()) as wakes:
            await anext(wakes)
            waiting = asyncio.ensure_future(anext(wakes))
            await asyncio.wait_for(source.looked_twice.wait(), PATIENCE_S)  # only a notice is left to wake it

            if change == "edit":
                (config / "b.yaml").write_text("domain: e\n")
            elif change == "swapped root":
                _swap_link(tmp_path / "current", "two")
            else:
                _swap_link(config / "..data", "..three")

            await asyncio.wait_for(waiting, PATIENCE_S)

    async def test_a_cancelled_watch_ends_at_once(self, tmp_path: Path) -> None:
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
