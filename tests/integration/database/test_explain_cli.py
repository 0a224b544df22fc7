"""`ratelimit-rls explain` with a database: limits and blocks come from it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ratelimit_rls.cli import main
from ratelimit_rls.core.entitlements import Block
from ratelimit_rls.core.model import Algorithm, Limit, Unit
from ratelimit_rls.database.database import Database
from ratelimit_rls.database.repository import Repository
from ratelimit_rls.identity.accounts import ApiKey, Override, Tier, User
from tests.integration.database.conftest import ME

pytestmark = pytest.mark.slow  # each command opens a connection

RULES = """\
domain: edge
descriptors:
  - key: user
    limits_of: user
    rate_limit: {unit: minute, requests_per_unit: 5, name: five}
  - key: api_key
    limits_of: api_key
    rate_limit: {unit: minute, requests_per_unit: 6}
  - key: path
    rate_limit: {unit: minute, requests_per_unit: 7, name: seven}
"""
UNTIL_S = 4_000_000_000.0
GOLD = Tier("gold", (Limit(100, Unit.MINUTE),))
USERS = (
    User("bob", "gold"),
    User("carl", "gold", limits=(Limit(9, Unit.HOUR, Algorithm.GCRA, 3),)),
    User("dora"),
)

Explain = Callable[..., list[str]]


@pytest.fixture
def explain(upgraded_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Explain:
    async def fill() -> None:
        database = Database(upgraded_url)
        async with Repository(database).change(ME) as change:
            await change.add_tier(GOLD)
            for user in USERS:
                await change.put_user(user)
            await change.set_block("alice", Block("sp\x1bam", UNTIL_S))
            await change.set_override("dora", Override((Limit(50, Unit.SECOND),), UNTIL_S))
            await change.add_key(ApiKey("k1", b"x", "bob"))
            await change.revoke_key("k1")
        await database.close()

    asyncio.run(fill())
    (tmp_path / "edge.yaml").write_text(RULES)

    def explain(*descriptors: str, form: str = "text", database: str = upgraded_url) -> list[str]:
        options = [part for one in descriptors for part in ("--descriptor", one)]
        line = ["explain", str(tmp_path / "edge.yaml"), "--domain", "edge", "--database", database, "--format", form]
        assert main([*line, *options]) == 0
        result = capsys.readouterr()
        assert result.err == ""
        return result.out.splitlines()

    return explain


def test_explain_shows_effective_limits_and_counters(explain: Explain) -> None:
    conclusion = "rule edge.user, except for subjects with limits as user"
    assert explain("user=bob")[-4:] == [
        conclusion,
        "entitlement tier gold",
        "limit 100/minute fixed_window, charge admitted",
        "counter rl:{edge/user=bob}:fixed_window:60  slot 11846",
    ]
    assert explain("user=carl")[-4:] == [
        conclusion,
        "entitlement custom",
        "limit 9/hour gcra, burst 3, charge admitted",
        "counter rl:{edge/user=carl}:gcra:3600  slot 4552",
    ]
    assert explain("user=dora")[-3:] == [
        "entitlement override until 2096-10-02 07:06Z",
        "limit 50/second fixed_window, charge admitted",
        "counter rl:{edge/user=dora}:fixed_window:1  slot 2633",
    ]
    assert explain("user=nobody")[-3:] == [
        "entitlement rule",
        "limit 5/minute fixed_window, charge admitted, name five",
        "counter rl:{edge/user=nobody}:fixed_window:60  slot 5406",
    ]
    assert "entitlement" not in "\n".join(explain("path=/a"))
    assert explain("user=bob", database="")[-2] == "limit 5/minute fixed_window, charge admitted, name five"


def test_explain_shows_a_block(explain: Explain) -> None:
    assert explain("user=alice")[-3:] == [
        "rule edge.user, except for subjects with limits as user",
        r"entitlement block until 2096-10-02 07:06Z: sp\x1bam",
        "blocked: nothing passes, and nothing is counted",
    ]
    first, second = "\n".join(explain("path=/a", "user=alice")).split("\n\n")
    assert first.splitlines()[-2:] == [
        "rule edge.path",
        "blocked by another descriptor of this request: nothing passes, and nothing is counted",
    ]
    assert second.splitlines()[-1] == "blocked: nothing passes, and nothing is counted"
    assert explain("api_key=k1")[-2:] == [
        "entitlement block: the key was revoked",
        "blocked: nothing passes, and nothing is counted",
    ]


def test_explain_json_output(explain: Explain) -> None:
    def result(*descriptors: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads("\n".join(explain(*descriptors, form="json")))["descriptors"]
        return found

    (dora, path) = result("user=dora", "path=/a")
    assert dora["entitlement"] == {"source": "override", "until_s": UNTIL_S, "blocked": False, "block": None}
    assert (dora["limits"][0]["requests_per_unit"], dora["storage_keys"]) == (
        50,
        ["rl:{edge/user=dora}:fixed_window:1"],
    )
    assert (path["entitlement"], path["rejected"]) == (None, False)
    (alice, path) = result("user=alice", "path=/a")
    assert alice["entitlement"]["blocked"] is True
    assert alice["entitlement"]["block"] == {"reason": "sp\x1bam", "until_s": UNTIL_S}
    assert (alice["rejected"], alice["storage_keys"], alice["replaced"]) == (True, [], [])
    assert (path["rejected"], path["storage_keys"], path["replaced"]) == (True, [], [])
