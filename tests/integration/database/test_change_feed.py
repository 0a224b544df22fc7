"""The change feed: reading all accounts, and what has changed since."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import delete, select, text, update

from ratelimit_rls.core.entitlements import Block
from ratelimit_rls.core.model import Limit, Unit
from ratelimit_rls.database import change_feed
from ratelimit_rls.database.account_mirror import AccountMirror
from ratelimit_rls.database.configuration import Configuration, ConfigurationChanges
from ratelimit_rls.database.tables import changes, tiers, user_quotas
from ratelimit_rls.database.writes import audited
from ratelimit_rls.errors import BadRequest, Conflict, DatabaseError
from ratelimit_rls.identity.accounts import ApiKey, Tier, User
from ratelimit_rls.rules.stored_rule import StoredRule
from tests.integration.database.conftest import LIMITS, ME, NOW_S, AccountDb


async def test_all_accounts_are_read_in_one_snapshot(db: AccountDb) -> None:
    assert await db.ask("accounts") == Configuration()
    await db.with_gold_and_alice()
    await db.do("set_block", "bob", Block("spam"))
    await db.do("add_key", ApiKey("k1", b"d", "alice"))
    late, early = StoredRule("", "late", "domain: a", 2), StoredRule("", "early", "domain: a", 1)
    rules = [await db.do("add_rule", rule) for rule in (late, early)]
    expected = Configuration(
        6,
        (Tier("gold", LIMITS),),
        (User("alice", "gold"), User("bob", block=Block("spam"))),
        (ApiKey("k1", b"d", "alice"),),
        (rules[1], rules[0]),
        NOW_S,
    )
    assert await db.ask("accounts") == expected
    async with db.repository.reading() as reader:
        before = await reader.sequence()
        await db.do("set_tier", "carl", "gold")
        assert await reader.accounts() == expected
        assert await reader.changed_since(before) == ConfigurationChanges(before, at_s=NOW_S)
    assert len((await db.ask("accounts")).users) == 3


async def test_changes_are_reported_once_with_current_values(db: AccountDb) -> None:
    await db.with_gold_and_alice()
    since = (await db.ask("accounts")).sequence
    assert not await db.ask("changed_since", since)
    await db.do("put_tier", Tier("gold", LIMITS[:1]))
    await db.do("set_block", "alice", Block())
    await db.do("set_block", "alice", None)
    await db.do("set_tier", "alice", "")
    await db.do("put_user", User("bob"))
    await db.do("delete_user", "bob")
    rule = await db.do("add_rule", StoredRule("", "r", "domain: a"))
    changed = await db.ask("changed_since", since)
    assert changed == ConfigurationChanges(
        since + 7,
        {"gold": Tier("gold", LIMITS[:1], version=2)},
        {"alice": User("alice", version=4), "bob": None},
        {},
        {rule.rule_id: rule},
        NOW_S,
    )
    assert not await db.ask("changed_since", changed.sequence)


@pytest.mark.slow
async def test_reader_too_far_behind_or_ahead_loads_everything(db: AccountDb, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c", "d"):
        await db.do("put_user", User(name))
    assert await db.ask("changed_since", 5) is None  # a restored database
    monkeypatch.setattr(change_feed, "MAX_SUBJECTS", 3)
    assert await db.ask("changed_since", 0) is None
    assert len((await db.ask("changed_since", 1)).users) == 3
    async with db.database.begin() as connection:
        await connection.execute(delete(changes).where(changes.c.sequence <= 2))
    assert await db.ask("changed_since", 1) is None
    assert len((await db.ask("changed_since", 2)).users) == 2


@pytest.mark.slow
async def test_change_feed_is_pruned(db: AccountDb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audited, "MAX_FEED_ROWS", 3)
    monkeypatch.setattr(audited, "_PRUNE_EVERY", 5)
    for number in range(11):
        await db.do("put_user", User(f"u{number}"))
    async with db.database.reading() as connection:
        kept = (await connection.scalars(select(changes.c.sequence).order_by(changes.c.sequence))).all()
    assert kept == [8, 9, 10, 11]


@pytest.mark.slow
async def test_bulk_import_is_one_change(db: AccountDb) -> None:
    await db.with_gold_and_alice()
    await db.do("set_block", "alice", Block())
    since = (await db.ask("accounts")).sequence
    users = [User("alice", "", LIMITS), *(User(f"u{number}", "gold", org="acme") for number in range(1500))]
    assert await db.do("put_users", users) == 1501
    assert await db.ask("changed_since", since) is None
    accounts = await db.ask("accounts")
    assert len(accounts.users) == 1501
    assert accounts.users[0] == User("alice", "", LIMITS, block=Block(), version=3)
    assert accounts.users[1] == User("u0", "gold", org="acme")
    (row,) = await db.ask("audit", limit=1)
    assert (row.action, row.after) == ("import", {"created": 1500, "replaced": 1})
    with pytest.raises(BadRequest, match="does not exist"):
        await db.do("put_users", [User("x", "platinum")])


@pytest.mark.slow
async def test_foreign_row_is_skipped_and_logged(db: AccountDb, capsys: pytest.CaptureFixture[str]) -> None:
    await db.with_gold_and_alice()
    await db.do("put_user", User("bob", "", LIMITS))
    await db.do("add_tier", Tier("open", ()))
    async with db.database.begin() as connection:
        await connection.execute(update(tiers).where(tiers.c.name == "open").values(limits=[{"unit": "never"}]))
        await connection.execute(
            update(user_quotas).where(user_quotas.c.user_id == "bob").values(custom_limits={"no": "list"})
        )
    accounts = await db.ask("accounts")
    assert [tier.name for tier in accounts.tiers] == ["gold"]
    assert [user.user_id for user in accounts.users] == ["alice"]
    output = capsys.readouterr().out
    assert output.count("database_row_unreadable") == 2
    assert '"bob"' in output or "bob" in output


async def test_concurrent_edits_of_one_resource_conflict(db: AccountDb) -> None:
    rule = await db.do("add_rule", StoredRule("", "r", "domain: a"))

    async def edit(who: int) -> str:
        async with db.repository.change(ME) as change:
            document = f"domain: a{who}"
            return (await change.put_rule(StoredRule(rule.rule_id, "r", document), expected=rule.version)).document

    results = await asyncio.gather(*(edit(who) for who in range(5)), return_exceptions=True)
    won = [result for result in results if isinstance(result, str)]
    lost = [result for result in results if isinstance(result, Conflict)]
    assert (len(won), len(lost)) == (1, 4)
    assert all(conflict.is_stale for conflict in lost)
    now = await db.ask("rule", rule.rule_id)
    assert (now.document, now.version) == (won[0], 2)
    assert len(await db.ask("audit", kind="rule")) == 2


@pytest.mark.slow
async def test_changes_are_serialized(upgraded_url: str) -> None:
    one, other = AccountDb(upgraded_url), AccountDb(upgraded_url)
    async with one.repository.change(ME) as change:
        await change.put_user(User("first"))
        second = asyncio.create_task(other.do("put_user", User("second")))
        await asyncio.wait([second], timeout=0.2)
        has_waited = not second.done()
    await second
    assert has_waited
    assert set((await one.ask("changed_since", 1)).users) == {"second"}
    await one.database.close()
    await other.database.close()


@pytest.mark.slow
async def test_sequence_is_the_commit_order_with_twenty_writers(upgraded_url: str) -> None:
    """A reader that has seen a number has missed nothing before it."""
    reader, writers = AccountDb(upgraded_url), [AccountDb(upgraded_url) for _ in range(4)]
    since, is_over = 0, False
    mirror = AccountMirror(await reader.ask("accounts"))

    async def follow() -> None:
        nonlocal since
        while True:
            was_over = is_over
            changed = await reader.ask("changed_since", since)
            assert changed is not None
            mirror.apply(changed)
            since = changed.sequence
            if was_over and not changed:
                return

    async def write(writer: int) -> None:
        for number in range(2):
            async with writers[writer % 4].repository.change(ME, timeout_s=30) as change:
                await change.put_user(User(f"w{writer}"))
                await asyncio.sleep(0.001 * (writer % 3))
                await change.put_user(User(f"w{writer}-{number}"))

    following = asyncio.create_task(follow())
    await asyncio.gather(*(write(writer) for writer in range(20)))
    is_over = True
    await following
    everything = await reader.ask("accounts")
    seen = mirror.accounts()
    assert sorted(seen.users, key=lambda user: user.user_id) == list(everything.users)
    assert (since, len(seen.users)) == (everything.sequence, 60)
    for db in (reader, *writers):
        await db.database.close()


@pytest.mark.slow
async def test_many_users_are_read_without_blocking_the_event_loop(db: AccountDb) -> None:
    """Rate limit requests are served while accounts are read."""
    await db.with_gold_and_alice()
    users = [User(f"u{number}", "gold", (Limit(number + 1, Unit.MINUTE),)) for number in range(10_000)]
    async with db.repository.change(ME, timeout_s=60) as change:
        await change.put_users(users)
    turns, is_over = 0, False

    async def decide() -> None:
        nonlocal turns
        while not is_over:
            turns += 1
            await asyncio.sleep(0)

    deciding = asyncio.create_task(decide())
    accounts = await db.ask("accounts")
    is_over = True
    await deciding
    assert sorted(users, key=lambda user: user.user_id) == list(accounts.users[1:])
    assert turns >= len(users) / change_feed.ROWS_PER_STEP


# Invalid values that another program can store: neither database checks all of them.
ODD = {
    "sqlite": [
        "UPDATE user_quotas SET is_blocked = 1, blocked_until = 'tomorrow' WHERE user_id = 'odd'",
        "UPDATE user_quotas SET is_blocked = 1, blocked_until = 1786000000 WHERE user_id = 'odd'",
        "UPDATE rate_limit_rules SET user_tiers = 'free' WHERE rule_name = 'odd'",
        "UPDATE rate_limit_rules SET priority = 'high' WHERE rule_name = 'odd'",
    ],
    "postgresql": [
        "UPDATE user_quotas SET is_blocked = true, blocked_until = '20000-01-01' WHERE user_id = 'odd'",
        "UPDATE user_quotas SET is_blocked = true, blocked_until = '0044-03-15 BC' WHERE user_id = 'odd'",
    ],
}
ODD_EVERYWHERE = [
    "UPDATE rate_limit_rules SET user_tiers = '[1]' WHERE rule_name = 'odd'",
    "UPDATE rate_limit_rules SET user_tiers = 'null' WHERE rule_name = 'odd'",
    "UPDATE rate_limit_rules SET scope = 'bogus' WHERE rule_name = 'odd'",
]


@pytest.mark.parametrize("number", range(7))
async def test_unreadable_row_does_not_hide_others(db: AccountDb, number: int) -> None:
    statements = [*ODD[db.database.dialect], *ODD_EVERYWHERE][number : number + 1]
    async with db.repository.change(ME) as change:
        for user in ("alice", "odd", "zoe"):
            await change.put_user(User(user))
        for rule in ("first", "odd", "third"):
            await change.add_rule(StoredRule("", rule, "domain: a"))
    before = await db.ask("sequence")
    for statement in statements:
        async with db.database.begin() as connection:
            await connection.execute(text(statement))
    accounts = await db.ask("accounts")
    assert {"alice", "zoe"} <= {user.user_id for user in accounts.users}
    assert {"first", "third"} <= {rule.name for rule in accounts.rules}
    assert len(accounts.users) + len(accounts.rules) == 6 - len(statements)
    await db.do("put_user", User("late"))
    changed = await db.ask("changed_since", before - 6)
    assert changed is not None
    assert {"alice", "late", "zoe"} <= {name for name, user in changed.users.items() if user is not None}
    if statements:
        with pytest.raises(DatabaseError, match="unreadable row, not written by this service"):
            await db.ask("users" if "user_quotas" in statements[0] else "rules")


async def test_restored_database_is_detected_by_its_last_change(db: AccountDb) -> None:
    await db.do("put_user", User("alice"))
    accounts = await db.ask("accounts")
    assert await db.ask("changed_since", accounts.sequence, accounts.at_s) == ConfigurationChanges(1, at_s=NOW_S)
    assert await db.ask("changed_since", accounts.sequence, accounts.at_s - 1) is None
    db.now_s += 1
    await db.do("put_user", User("bob"))
    assert (await db.ask("changed_since", 1, NOW_S)).users == {"bob": User("bob")}
    assert await db.ask("changed_since", 1, NOW_S + 1) is None
