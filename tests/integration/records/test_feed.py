"""What processes hold, and how they hear what of it has changed."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import delete, select, text, update

from ratelimit_rls.core.accounts import Accounts, ApiKey, Block, Changed, StoredRule, Tier, User
from ratelimit_rls.core.model import Limit, Unit
from ratelimit_rls.errors import BadRequest, Conflict, RecordsError
from ratelimit_rls.records import changing, feed
from ratelimit_rls.records.held import Held
from ratelimit_rls.records.tables import changes, tiers, user_quotas
from tests.integration.records.conftest import LIMITS, ME, NOW_S, Office


async def test_everything_is_read_as_of_one_moment(office: Office) -> None:
    assert await office.ask("accounts") == Accounts()
    await office.with_gold_and_alice()
    await office.do("set_block", "bob", Block("spam"))
    await office.do("add_key", ApiKey("k1", b"d", "alice"))
    late, early = StoredRule("", "late", "domain: a", 2), StoredRule("", "early", "domain: a", 1)
    rules = [await office.do("add_rule", rule) for rule in (late, early)]
    expected = Accounts(
        6,
        (Tier("gold", LIMITS),),
        (User("alice", "gold"), User("bob", block=Block("spam"))),
        (ApiKey("k1", b"d", "alice"),),
        (rules[1], rules[0]),
        NOW_S,
    )
    assert await office.ask("accounts") == expected
    async with office.desk.reading() as reader:
        before = await reader.sequence()
        await office.do("set_tier", "carl", "gold")
        assert await reader.accounts() == expected
        assert await reader.changed_since(before) == Changed(before, at_s=NOW_S)
    assert len((await office.ask("accounts")).users) == 3


async def test_what_has_changed_is_told_once_and_as_it_is_now(office: Office) -> None:
    await office.with_gold_and_alice()
    since = (await office.ask("accounts")).sequence
    assert not await office.ask("changed_since", since)
    await office.do("put_tier", Tier("gold", LIMITS[:1]))
    await office.do("set_block", "alice", Block())
    await office.do("set_block", "alice", None)
    await office.do("set_tier", "alice", "")
    await office.do("put_user", User("bob"))
    await office.do("delete_user", "bob")
    rule = await office.do("add_rule", StoredRule("", "r", "domain: a"))
    changed = await office.ask("changed_since", since)
    assert changed == Changed(
        since + 7,
        {"gold": Tier("gold", LIMITS[:1], version=2)},
        {"alice": User("alice", version=4), "bob": None},
        {},
        {rule.rule_id: rule},
        NOW_S,
    )
    assert not await office.ask("changed_since", changed.sequence)


@pytest.mark.slow
async def test_who_is_too_far_behind_or_ahead_reads_everything(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c", "d"):
        await office.do("put_user", User(name))
    assert await office.ask("changed_since", 5) is None  # of a database that came from a backup
    monkeypatch.setattr(feed, "MOST_SUBJECTS", 3)
    assert await office.ask("changed_since", 0) is None
    assert len((await office.ask("changed_since", 1)).users) == 3
    async with office.database.begin() as connection:
        await connection.execute(delete(changes).where(changes.c.sequence <= 2))
    assert await office.ask("changed_since", 1) is None
    assert len((await office.ask("changed_since", 2)).users) == 2


@pytest.mark.slow
async def test_the_feed_does_not_grow_without_end(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changing, "KEPT_CHANGES", 3)
    monkeypatch.setattr(changing, "_PRUNE_EVERY", 5)
    for number in range(11):
        await office.do("put_user", User(f"u{number}"))
    async with office.database.reading() as connection:
        kept = (await connection.scalars(select(changes.c.sequence).order_by(changes.c.sequence))).all()
    assert kept == [8, 9, 10, 11]


@pytest.mark.slow
async def test_many_users_are_one_change(office: Office) -> None:
    await office.with_gold_and_alice()
    await office.do("set_block", "alice", Block())
    since = (await office.ask("accounts")).sequence
    users = [User("alice", "", LIMITS), *(User(f"u{number}", "gold", org="acme") for number in range(1500))]
    assert await office.do("put_users", users) == 1501
    assert await office.ask("changed_since", since) is None
    accounts = await office.ask("accounts")
    assert len(accounts.users) == 1501
    assert accounts.users[0] == User("alice", "", LIMITS, block=Block(), version=3)
    assert accounts.users[1] == User("u0", "gold", org="acme")
    (row,) = await office.ask("audit", limit=1)
    assert (row.action, row.after) == ("import", {"created": 1500, "replaced": 1})
    with pytest.raises(BadRequest, match="no tier"):
        await office.do("put_users", [User("x", "platinum")])


@pytest.mark.slow
async def test_a_row_that_somebody_else_wrote_is_left_out(office: Office, capsys: pytest.CaptureFixture[str]) -> None:
    await office.with_gold_and_alice()
    await office.do("put_user", User("bob", "", LIMITS))
    await office.do("add_tier", Tier("open", ()))
    async with office.database.begin() as connection:
        await connection.execute(update(tiers).where(tiers.c.name == "open").values(limits=[{"unit": "never"}]))
        await connection.execute(
            update(user_quotas).where(user_quotas.c.user_id == "bob").values(custom_limits={"no": "list"})
        )
    accounts = await office.ask("accounts")
    assert [tier.name for tier in accounts.tiers] == ["gold"]
    assert [user.user_id for user in accounts.users] == ["alice"]
    told = capsys.readouterr().out
    assert told.count("cannot be read and is left out") == 2
    assert '"bob"' in told or "bob" in told


async def test_two_editors_of_one_thing_do_not_both_win(office: Office) -> None:
    rule = await office.do("add_rule", StoredRule("", "r", "domain: a"))

    async def edit(who: int) -> str:
        async with office.desk.change(ME) as change:
            document = f"domain: a{who}"
            return (await change.put_rule(StoredRule(rule.rule_id, "r", document), expected=rule.version)).document

    results = await asyncio.gather(*(edit(who) for who in range(5)), return_exceptions=True)
    won = [result for result in results if isinstance(result, str)]
    lost = [result for result in results if isinstance(result, Conflict)]
    assert (len(won), len(lost)) == (1, 4)
    assert all(conflict.is_stale for conflict in lost)
    now = await office.ask("rule", rule.rule_id)
    assert (now.document, now.version) == (won[0], 2)
    assert len(await office.ask("audit", kind="rule")) == 2


@pytest.mark.slow
async def test_no_change_overtakes_another(upgraded_url: str) -> None:
    one, other = Office(upgraded_url), Office(upgraded_url)
    async with one.desk.change(ME) as change:
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
async def test_the_sequence_is_the_order_of_commits_under_twenty_writers(upgraded_url: str) -> None:
    """Who has seen up to a number has missed nothing before it, however many write."""
    reader, writers = Office(upgraded_url), [Office(upgraded_url) for _ in range(4)]
    since, is_over = 0, False
    held = Held(await reader.ask("accounts"))

    async def follow() -> None:
        nonlocal since
        while True:
            was_over = is_over
            changed = await reader.ask("changed_since", since)
            assert changed is not None
            held.apply(changed)
            since = changed.sequence
            if was_over and not changed:
                return

    async def write(writer: int) -> None:
        for number in range(2):
            async with writers[writer % 4].desk.change(ME, patience_s=30) as change:
                await change.put_user(User(f"w{writer}"))
                await asyncio.sleep(0.001 * (writer % 3))
                await change.put_user(User(f"w{writer}-{number}"))

    following = asyncio.create_task(follow())
    await asyncio.gather(*(write(writer) for writer in range(20)))
    is_over = True
    await following
    everything = await reader.ask("accounts")
    seen = held.accounts()
    assert sorted(seen.users, key=lambda user: user.user_id) == list(everything.users)
    assert (since, len(seen.users)) == (everything.sequence, 60)
    for office in (reader, *writers):
        await office.database.close()


@pytest.mark.slow
async def test_many_thousand_users_are_read_in_steps(office: Office) -> None:
    """The loop goes on meanwhile: whoever waits for a decision does not wait for this."""
    await office.with_gold_and_alice()
    users = [User(f"u{number}", "gold", (Limit(number + 1, Unit.MINUTE),)) for number in range(10_000)]
    async with office.desk.change(ME, patience_s=60) as change:
        await change.put_users(users)
    turns, is_over = 0, False

    async def decide() -> None:
        nonlocal turns
        while not is_over:
            turns += 1
            await asyncio.sleep(0)

    deciding = asyncio.create_task(decide())
    accounts = await office.ask("accounts")
    is_over = True
    await deciding
    assert sorted(users, key=lambda user: user.user_id) == list(accounts.users[1:])
    assert turns >= len(users) / feed.STEP


# What somebody else can write into a column: neither database has checks for all of it.
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
async def test_one_row_that_nobody_can_read_hides_no_other(office: Office, number: int) -> None:
    statements = [*ODD[office.database.dialect], *ODD_EVERYWHERE][number : number + 1]
    async with office.desk.change(ME) as change:
        for user in ("alice", "odd", "zoe"):
            await change.put_user(User(user))
        for rule in ("first", "odd", "third"):
            await change.add_rule(StoredRule("", rule, "domain: a"))
    before = await office.ask("sequence")
    for statement in statements:
        async with office.database.begin() as connection:
            await connection.execute(text(statement))
    accounts = await office.ask("accounts")
    assert {"alice", "zoe"} <= {user.user_id for user in accounts.users}
    assert {"first", "third"} <= {rule.name for rule in accounts.rules}
    assert len(accounts.users) + len(accounts.rules) == 6 - len(statements)
    await office.do("put_user", User("late"))
    changed = await office.ask("changed_since", before - 6)
    assert changed is not None
    assert {"alice", "late", "zoe"} <= {name for name, user in changed.users.items() if user is not None}
    if statements:
        with pytest.raises(RecordsError, match="was not stored by this service"):
            await office.ask("users" if "user_quotas" in statements[0] else "rules")


async def test_a_database_that_was_brought_back_is_known_by_its_last_change(office: Office) -> None:
    await office.do("put_user", User("alice"))
    accounts = await office.ask("accounts")
    assert await office.ask("changed_since", accounts.sequence, accounts.at_s) == Changed(1, at_s=NOW_S)
    assert await office.ask("changed_since", accounts.sequence, accounts.at_s - 1) is None
    office.now_s += 1
    await office.do("put_user", User("bob"))
    assert (await office.ask("changed_since", 1, NOW_S)).users == {"bob": User("bob")}
    assert await office.ask("changed_since", 1, NOW_S + 1) is None
