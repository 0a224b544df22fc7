"""Stored rules as a source: what is read, when to read again, and what becomes of files meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest

from ratelimit_rls.core.accounts import StoredRule, Targeting
from ratelimit_rls.errors import RulesError, SettingsError
from ratelimit_rls.rules.load import LAST_RANK, Source
from ratelimit_rls.rules.loader import RulesLoader
from ratelimit_rls.rules.snapshot import Rules
from ratelimit_rls.rules.sources.database import Merged, StoredRules, stored_sources
from ratelimit_rls.rules.sources.files import RulesFiles
from ratelimit_rls.telemetry.metrics import Metrics

BODY = "domain: edge\nrate_limit: {unit: minute, requests_per_unit: 5}\n"
RULE = StoredRule("1", "five", BODY, 7, targeting=Targeting(tiers=("free",)))


class Elsewhere:
    """A source whose news are this test's, and which counts how often it was let go on."""

    def __init__(self) -> None:
        self.sources: list[Source] | None = [Source("f.yaml", b"domain: file")]
        self.news = asyncio.Event()
        self.went_on = 0
        self.is_closed = False

    def check(self) -> None:
        raise SettingsError("nowhere")

    def read(self) -> list[Source] | None:
        return self.sources

    async def watch(self) -> AsyncGenerator[None, None]:
        try:
            while True:
                await self.news.wait()
                self.news.clear()
                yield
                self.went_on += 1
        finally:
            self.is_closed = True


def test_each_rule_is_a_source_that_errors_can_name() -> None:
    (source,) = stored_sources([RULE])
    assert source == Source("database:five", BODY.encode(), 7, RULE.targeting)
    late = StoredRule("2", "odd\nname", "", 2**40)
    assert stored_sources([late])[0].name == "database:odd\\nname"
    assert stored_sources([late])[0].rank < LAST_RANK


async def test_there_is_nothing_until_something_was_put_in() -> None:
    stored = StoredRules()
    stored.check()
    assert stored.read() is None
    stored.put([])
    assert stored.read() == []


async def test_it_is_time_to_read_when_other_rules_were_put_in() -> None:
    stored = StoredRules()
    async with aclosing(stored.watch()) as times:
        stored.put([RULE])
        await anext(times)
        stored.put([RULE])
        waiting = asyncio.ensure_future(anext(times))
        await asyncio.sleep(0)
        assert not waiting.done()
        stored.put([])
        await waiting


async def test_merged_rules_are_both_and_files_do_not_wait_for_the_database() -> None:
    stored, elsewhere = StoredRules(), Elsewhere()
    merged = Merged(stored, elsewhere)
    with pytest.raises(SettingsError, match="nowhere"):
        merged.check()
    assert merged.read() == elsewhere.sources
    stored.put([RULE])
    assert elsewhere.sources is not None
    assert merged.read() == [*stored_sources([RULE]), *elsewhere.sources]
    elsewhere.sources = None
    assert merged.read() is None


async def test_merged_news_come_from_either_which_goes_on_when_they_were_tried() -> None:
    stored, elsewhere = StoredRules(), Elsewhere()
    async with aclosing(Merged(stored, elsewhere).watch()) as times:
        stored.put([RULE])
        await anext(times)
        elsewhere.news.set()
        await anext(times)
        assert elsewhere.went_on == 0
        elsewhere.news.set()
        stored.put([])
        await anext(times)
        assert elsewhere.went_on == 1
    assert elsewhere.is_closed


async def test_what_breaks_a_source_is_not_kept_from_whoever_watches() -> None:
    class Broken(Elsewhere):
        async def watch(self) -> AsyncGenerator[None, None]:
            raise RulesError([])
            yield

    async with aclosing(Merged(StoredRules(), Broken()).watch()) as times:
        with pytest.raises(RulesError):
            await anext(times)


async def test_a_stored_rule_that_means_nothing_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("domain: file\n")
    stored, rules = StoredRules(), Rules()
    loader = RulesLoader(Merged(stored, RulesFiles([tmp_path])), rules, Metrics())
    stored.put([RULE])
    await loader.start()
    assert rules.current is not None
    assert list(rules.current.tree.domains) == ["edge", "file"]
    assert rules.current.files == 2

    stored.put([RULE, StoredRule("2", "bad", "domain: edge\nrate_limit: {unit: x}\n")])
    assert not await loader.reload()
    assert "database:bad:2:20: error: invalid rate limit unit 'x'" in str(rules.last_error)
    assert rules.current.version == 1

    stored.put([StoredRule("2", "other", "domain: other\n"), RULE])
    assert await loader.reload()
    version = rules.current.version
    stored.put([RULE, StoredRule("2", "other", "domain: other\n", version=9)])
    assert await loader.reload()
    assert rules.current.version == version  # in another order they say the same
