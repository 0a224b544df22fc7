"""Stored rules as a source: content, change notification, and merging with files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest

from ratelimit_rls.errors import RulesError, SettingsError
from ratelimit_rls.rules.active_rules import ActiveRules
from ratelimit_rls.rules.reloader import RulesReloader
from ratelimit_rls.rules.source_document import LAST_RANK, SourceDocument
from ratelimit_rls.rules.sources.database import MergedSource, StoredRulesSource, stored_sources
from ratelimit_rls.rules.sources.files import RulesFiles
from ratelimit_rls.rules.stored_rule import StoredRule, Targeting
from ratelimit_rls.telemetry.metrics import Metrics

BODY = "domain: edge\nrate_limit: {unit: minute, requests_per_unit: 5}\n"
RULE = StoredRule("1", "five", BODY, 7, targeting=Targeting(tiers=("free",)))


class ManualSource:
    """A source triggered by the test, which counts how often it was resumed."""

    def __init__(self) -> None:
        self.sources: list[SourceDocument] | None = [SourceDocument("f.yaml", b"domain: file")]
        self.news = asyncio.Event()
        self.went_on = 0
        self.is_closed = False

    def check(self) -> None:
        raise SettingsError("nowhere")

    def read(self) -> list[SourceDocument] | None:
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


def test_each_stored_rule_is_a_named_source() -> None:
    (source,) = stored_sources([RULE])
    assert source == SourceDocument("database:five", BODY.encode(), 7, RULE.targeting)
    late = StoredRule("2", "odd\nname", "", 2**40)
    assert stored_sources([late])[0].name == "database:odd\\nname"
    assert stored_sources([late])[0].rank < LAST_RANK


async def test_read_is_none_until_rules_are_put() -> None:
    stored = StoredRulesSource()
    stored.check()
    assert stored.read() is None
    stored.put([])
    assert stored.read() == []


async def test_watch_yields_when_changed_rules_are_put() -> None:
    stored = StoredRulesSource()
    async with aclosing(stored.watch()) as times:
        stored.put([RULE])
        await anext(times)
        stored.put([RULE])
        waiting = asyncio.ensure_future(anext(times))
        await asyncio.sleep(0)
        assert not waiting.done()
        stored.put([])
        await waiting


async def test_merged_source_does_not_wait_for_the_database() -> None:
    stored, manual = StoredRulesSource(), ManualSource()
    merged = MergedSource(stored, manual)
    with pytest.raises(SettingsError, match="nowhere"):
        merged.check()
    assert merged.read() == manual.sources
    stored.put([RULE])
    assert manual.sources is not None
    assert merged.read() == [*stored_sources([RULE]), *manual.sources]
    manual.sources = None
    assert merged.read() is None


async def test_merged_watch_resumes_each_source_after_its_attempt() -> None:
    stored, manual = StoredRulesSource(), ManualSource()
    async with aclosing(MergedSource(stored, manual).watch()) as times:
        stored.put([RULE])
        await anext(times)
        manual.news.set()
        await anext(times)
        assert manual.went_on == 0
        manual.news.set()
        stored.put([])
        await anext(times)
        assert manual.went_on == 1
    assert manual.is_closed


async def test_merged_watch_propagates_source_errors() -> None:
    class Broken(ManualSource):
        async def watch(self) -> AsyncGenerator[None, None]:
            raise RulesError([])
            yield

    async with aclosing(MergedSource(StoredRulesSource(), Broken()).watch()) as times:
        with pytest.raises(RulesError):
            await anext(times)


async def test_invalid_stored_rule_keeps_the_active_rules(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("domain: file\n")
    stored, rules = StoredRulesSource(), ActiveRules()
    loader = RulesReloader(MergedSource(stored, RulesFiles([tmp_path])), rules, Metrics())
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
    assert rules.current.version == version  # another order is no change
