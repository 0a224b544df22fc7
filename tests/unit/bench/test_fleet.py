"""Benchmark servers with a database do not share it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from bench import callers, edge
from bench.fleet import Fleet
from bench.scenarios import CHECKS, EDGE, with_everything, with_records
from bench.workload import TENANTS


def keys_in(url: str) -> int:
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as database:
        (keys,) = database.execute("SELECT count(*) FROM api_keys").fetchone()
    return int(keys)


def test_every_scenario_has_its_own_database_filled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[int] = []
    fill_now = callers.fill_now

    def counted(url: str, count: int) -> None:
        filled.append(count)
        fill_now(url, count)

    monkeypatch.setattr(callers, "fill_now", counted)
    fleet = Fleet(tmp_path, max_keys=30, peer=None)
    urls = [fleet._variables(one)["RLS_DATABASE_URL"] for one in (with_records(CHECKS), with_everything(CHECKS))]
    assert len({*urls}) == 2
    assert [keys_in(url) for url in urls] == [30, 30]
    assert filled == [30]


def test_database_of_the_edge_contains_its_most_active_users(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, max_keys=TENANTS, peer=None)
    url = fleet._variables(with_everything(EDGE))["RLS_DATABASE_URL"]
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as database:
        users = {name for (name,) in database.execute("SELECT user_id FROM user_quotas")}
        tiers = {name for (name,) in database.execute("SELECT DISTINCT tier FROM user_quotas")}
    assert users == {edge.user_name(rank) for rank in range(TENANTS)}
    assert callers.TRIAL not in tiers
    assert keys_in(url) == 0
