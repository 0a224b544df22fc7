"""The key secret beside a SQLite file: created once, by the first process to start."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from ratelimit_rls.database.hash_secret import load_key_secret
from ratelimit_rls.errors import SettingsError


def _load(path: Path, barrier: object, result: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    result.put(load_key_secret("", path))  # type: ignore[attr-defined]


def test_concurrent_processes_get_the_same_secret(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for number in range(5):
        barrier, result = context.Barrier(4), context.Queue()
        path = tmp_path / f"{number}.db"
        processes = [context.Process(target=_load, args=(path, barrier, result)) for _ in range(4)]
        for process in processes:
            process.start()
        assert len({result.get(timeout=20) for _ in processes}) == 1
        for process in processes:
            process.join()
    secrets = sorted(tmp_path.iterdir())
    assert [path.name for path in secrets] == [f"{number}.db.secret" for number in range(5)]
    assert {path.stat().st_mode & 0o777 for path in secrets} == {0o600}


def test_empty_secret_file_is_an_error_and_stays_empty(tmp_path: Path) -> None:
    (tmp_path / "a.db.secret").touch()
    with pytest.raises(SettingsError, match="is empty"):
        load_key_secret("", tmp_path / "a.db")
