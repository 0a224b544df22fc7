"""The secret of an embedded database: made once, whoever starts first."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from ratelimit_rls.errors import SettingsError
from ratelimit_rls.records.key_secret import key_secret


def _made(path: Path, barrier: object, told: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    told.put(key_secret("", path))  # type: ignore[attr-defined]


def test_all_who_start_at_once_have_the_same(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for number in range(5):
        barrier, told = context.Barrier(4), context.Queue()
        path = tmp_path / f"{number}.db"
        processes = [context.Process(target=_made, args=(path, barrier, told)) for _ in range(4)]
        for process in processes:
            process.start()
        assert len({told.get(timeout=20) for _ in processes}) == 1
        for process in processes:
            process.join()
    secrets = sorted(tmp_path.iterdir())
    assert [path.name for path in secrets] == [f"{number}.db.secret" for number in range(5)]
    assert {path.stat().st_mode & 0o777 for path in secrets} == {0o600}


def test_a_file_without_a_secret_is_told_and_not_filled(tmp_path: Path) -> None:
    (tmp_path / "a.db.secret").touch()
    with pytest.raises(SettingsError, match="is empty"):
        key_secret("", tmp_path / "a.db")
