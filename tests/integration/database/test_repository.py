"""All changes by administrators, on each database."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import select

from ratelimit_rls.core.entitlements import Block
from ratelimit_rls.database.administration import AdminToken, Role, StoredResponse
from ratelimit_rls.database.tables import user_quotas
from ratelimit_rls.database.usage.counters import UserUsage
from ratelimit_rls.errors import BadRequest, Conflict, NotFound
from ratelimit_rls.identity.accounts import ApiKey, Override, Tier, User
from ratelimit_rls.rules.stored_rule import CounterScope, StoredRule, Targeting
from tests.integration.database.conftest import LIMITS, ME, NOW_S, AccountDb

OVERRIDE = Override(LIMITS[:1], NOW_S + 60.5, "a sale")
BLOCK = Block("spam", NOW_S + 3600)
KEY = ApiKey("k1", b"\x00digest\xff", "alice", "laptop", "gold", LIMITS, NOW_S + 86_400)
RULE = StoredRule(
    "",
    "checkout",
    "domain: shop\ndescriptors: []\n",
    10,
    True,
    Targeting(("gold",), ("/checkout/*",), ("POST",), ("192.0.2.0/24",), CounterScope.USER),
)
ANSWER = StoredResponse("d1", 201, {"ETag": '"1"'}, b"\x00{}", NOW_S)
TOKEN = AdminToken("tok1", b"\x00digest\xff", "ci", Role.WRITE, NOW_S + 60)


async def test_tier_is_created_replaced_and_deleted(db: AccountDb) -> None:
    gold = await db.do("add_tier", Tier("gold", LIMITS, "the best"))
    assert gold == Tier("gold", LIMITS, "the best", 1) == await db.ask("tier", "gold")
    with pytest.raises(Conflict, match='tier "gold" already exists') as taken:
        await db.do("add_tier", gold)
    assert not taken.value.is_stale
    assert (await db.do("put_tier", Tier("gold", LIMITS[:1]), expected=1)).version == 2
    assert (await db.do("put_tier", Tier("open", ()))).limits == ()
    assert [tier.name for tier in await db.ask("tiers")] == ["gold", "open"]
    await db.do("delete_tier", "gold", expected=2)
    with pytest.raises(NotFound, match='tier "gold" does not exist'):
        await db.ask("tier", "gold")


async def test_tier_in_use_cannot_be_deleted(db: AccountDb) -> None:
    await db.with_gold_and_alice()
    await db.do("add_tier", Tier("silver", LIMITS))
    await db.do("add_key", replace(KEY, tier="silver"))
    for tier, who in (("gold", "users"), ("silver", "keys")):
        with pytest.raises(Conflict, match=f"still has {who}"):
            await db.do("delete_tier", tier)


async def test_replacing_a_user_keeps_override_and_block(db: AccountDb) -> None:
    await db.with_gold_and_alice()
    await db.do("set_override", "alice", OVERRIDE)
    await db.do("set_block", "alice", BLOCK)
    alice = await db.do("put_user", User("alice", "", LIMITS, org="acme"))
    assert alice == User("alice", "", LIMITS, OVERRIDE, BLOCK, "acme", 4) == await db.ask("user", "alice")
    assert (await db.do("set_override", "alice", None)).override is None
    assert (await db.do("set_block", "alice", None)).block is None
    assert (await db.do("set_tier", "alice", "gold")).tier == "gold"
    assert (await db.do("set_tier", "alice", "")) == User("alice", "", LIMITS, org="acme", version=8)


async def test_setting_tier_override_or_block_creates_the_user(db: AccountDb) -> None:
    await db.with_gold_and_alice()
    assert await db.do("set_tier", "new1", "gold") == User("new1", "gold")
    assert await db.do("set_override", "new2", OVERRIDE) == User("new2", override=OVERRIDE)
    assert await db.do("set_block", "new3", Block()) == User("new3", block=Block())
    for lifted in ("set_override", "set_block"):
        with pytest.raises(NotFound, match=r"user .* does not exist"):
            await db.do(lifted, "nobody", None)


@pytest.mark.slow
async def test_users_are_filtered_by_tier_and_block(db: AccountDb) -> None:
    await db.with_gold_and_alice()
    await db.do("put_user", User("Zoe"))
    await db.do("put_user", User("ärger"))
    await db.do("set_block", "bob", BLOCK)
    names = lambda users: [user.user_id for user in users]  # noqa: E731
    assert names(await db.ask("users")) == ["Zoe", "alice", "bob", "ärger"]  # sorted by bytes
    assert names(await db.ask("users", "Zoe", 2)) == ["alice", "bob"]
    assert names(await db.ask("users", tier="gold")) == ["alice"]
    assert names(await db.ask("users", tier="")) == ["Zoe", "bob", "ärger"]
    assert names(await db.ask("users", blocked=True)) == ["bob"]
    assert names(await db.ask("users", blocked=False, limit=1)) == ["Zoe"]


async def test_deleting_a_user_deletes_its_keys(db: AccountDb) -> None:
    await db.with_gold_and_alice()
    key = await db.do("add_key", KEY)
    assert key == KEY == await db.ask("key", "k1")
    await db.do("put_user", User("bob"))
    await db.do("add_key", ApiKey("k2", b"other", "bob"))
    assert [key.key_id for key in await db.ask("keys")] == ["k1", "k2"]
    assert [key.key_id for key in await db.ask("keys", user_id="bob")] == ["k2"]
    await db.do("delete_user", "alice", expected=1)
    with pytest.raises(NotFound):
        await db.ask("user", "alice")
    with pytest.raises(NotFound):
        await db.ask("key", "k1")
    changed = await db.ask("changed_since", 5)
    assert (dict(changed.users), dict(changed.keys)) == ({"alice": None}, {"k1": None})


async def test_key_is_changed_and_revoked_permanently(db: AccountDb) -> None:
    await db.with_gold_and_alice()
    await db.do("add_key", KEY)
    changed = await db.do("put_key", ApiKey("k1", b"", "", "phone"), expected=1)
    assert changed == ApiKey("k1", KEY.digest, "alice", "phone", version=2)
    db.now_s += 1
    revoked = await db.do("revoke_key", "k1")
    assert (revoked.revoked_s, revoked.version) == (NOW_S + 1, 3)
    db.now_s += 1
    assert await db.do("revoke_key", "k1") == revoked
    with pytest.raises(Conflict, match="is revoked"):
        await db.do("put_key", changed)
    with pytest.raises(Conflict, match=r"key .* already exists"):
        await db.do("add_key", KEY)


async def test_rule_is_created_replaced_and_deleted(db: AccountDb) -> None:
    made = await db.do("add_rule", RULE)
    assert len(made.rule_id) == 36
    assert made == replace(RULE, rule_id=made.rule_id, created_by="me", created_s=NOW_S, updated_s=NOW_S)
    assert made == await db.ask("rule_named", "checkout")
    db.now_s += 1
    later = await db.do("put_rule", replace(made, name="cart", targeting=Targeting(), created_by="x"), expected=1)
    assert (
        later
        == replace(made, name="cart", targeting=Targeting(), version=2, updated_s=NOW_S + 1)
        == await db.ask("rule", made.rule_id)
    )
    await db.do("delete_rule", made.rule_id, expected=2)
    with pytest.raises(NotFound, match=r"rule .* does not exist"):
        await db.do("put_rule", later)


@pytest.mark.slow
async def test_domain_length_of_a_rule_is_checked(db: AccountDb) -> None:
    made = await db.do("add_rule", replace(RULE, document="domain: " + "ü" * 255))
    with pytest.raises(BadRequest, match="the domain of a rule has 3000 characters"):
        await db.do("put_rule", replace(made, document="domain: " + "x" * 3000))
    assert await db.ask("rule", made.rule_id) == made


async def test_rules_are_sorted_by_priority_then_name(db: AccountDb) -> None:
    for name, priority, domain in (("b", 2, "x"), ("a", 2, "y"), ("c", 1, "x"), ("d", 2, "x")):
        await db.do("add_rule", StoredRule("", name, f"domain: {domain}", priority, enabled=name != "d"))
    rules = await db.ask("rules")
    assert [rule.name for rule in rules] == ["c", "a", "b", "d"]
    assert [rule.name for rule in await db.ask("rules", rules[1].rule_id, 1)] == ["b"]
    assert [rule.name for rule in await db.ask("rules", domain="x", enabled=True)] == ["c", "b"]
    with pytest.raises(BadRequest, match="was deleted"):
        await db.ask("rules", "00000000-0000-0000-0000-000000000000")


async def test_rule_names_are_unique(db: AccountDb) -> None:
    first = await db.do("add_rule", RULE)
    other = await db.do("add_rule", replace(RULE, name="other"))
    for attempt in (("add_rule", RULE), ("put_rule", replace(other, name="checkout"))):
        with pytest.raises(Conflict, match=first.rule_id):
            await db.do(*attempt)
    with pytest.raises(Conflict, match="with the id"):
        await db.do("add_rule", replace(first, name="third"))


async def test_tokens_are_created_and_revoked(db: AccountDb) -> None:
    made = await db.do("add_token", TOKEN)
    assert made == replace(TOKEN, created_s=NOW_S) == await db.ask("token", "tok1")
    with pytest.raises(Conflict):
        await db.do("add_token", TOKEN)
    await db.repository.touch_tokens({"tok1": NOW_S + 5, "nobody's": NOW_S})
    revoked = await db.do("revoke_token", "tok1")
    assert revoked == replace(made, revoked_s=NOW_S, last_used_s=NOW_S + 5)
    assert await db.do("revoke_token", "tok1") == revoked
    assert await db.ask("tokens") == [revoked]
    with pytest.raises(NotFound):
        await db.do("revoke_token", "tok2")


async def test_change_of_an_outdated_version_is_a_conflict(db: AccountDb) -> None:
    await db.with_gold_and_alice()
    await db.do("add_key", KEY)
    rule = await db.do("add_rule", RULE)
    before = await db.ask("accounts")
    replaced = {"put_tier": Tier("gold", ()), "put_user": User("alice"), "put_key": KEY, "put_rule": rule}
    deleted = {"delete_tier": "gold", "delete_user": "alice", "delete_rule": rule.rule_id}
    for method, value in {**replaced, **deleted}.items():
        for seen in (0, 2):
            with pytest.raises(Conflict, match=f"is at version 1, expected version {seen}") as stale:
                await db.do(method, value, expected=seen)
            assert stale.value.is_stale
    assert await db.ask("accounts") == before
    for method, value in replaced.items():
        assert (await db.do(method, value, expected=1)).version == 2


async def test_expected_version_of_a_missing_resource_is_stale(db: AccountDb) -> None:
    for method, value in (("put_tier", Tier("gold", ())), ("put_user", User("alice"))):
        with pytest.raises(Conflict, match="does not exist") as stale:
            await db.do(method, value, expected=1)
        assert stale.value.is_stale


REJECTED: list[tuple[str, tuple[Any, ...], str]] = [
    ("add_tier", (Tier("", ()),), "must not be empty"),
    ("add_tier", (Tier("x" * 256, ()),), "256 characters"),
    ("add_tier", (Tier("a\nb", ()),), "cannot be printed"),
    ("add_tier", (Tier("a", (), "x\0"),), "must not contain a NUL"),
    ("add_tier", (Tier("gold ", ()),), "the name of a tier begins or ends with a space"),
    ("put_user", (User("a\0"),), "cannot be printed"),
    ("put_user", (User(" alice"),), "the id of a user begins or ends with a space"),
    ("put_user", (User("alice", org=" acme"),), 'the org of user "alice" begins or ends with a space'),
    ("put_users", ([User("bob"), User("alice ")],), "the id of a user begins or ends with a space"),
    ("set_block", (" alice", Block()), "the id of a user begins or ends with a space"),
    ("put_user", (User("a\ud800"),), "cannot be printed"),
    ("put_user", (User("a", "platinum"),), 'tier "platinum" does not exist'),
    ("set_tier", ("a", "platinum"), 'tier "platinum" does not exist'),
    ("set_override", ("a", Override((), float("inf"))), "between 1970 and 9999"),
    ("set_override", ("a", Override((), float("nan"))), "between 1970 and 9999"),
    ("set_block", ("a", Block("x", 1e15)), "between 1970 and 9999"),
    ("set_block", ("", Block()), "must not be empty"),
    ("add_key", (KEY,), 'user "alice" does not exist'),
    ("add_rule", (replace(RULE, priority=2**31),), "priority"),
    ("add_rule", (replace(RULE, rule_id="1; drop"),), "must be a UUID"),
    ("add_rule", (replace(RULE, document="a: \0"),), "must not contain a NUL"),
    ("add_rule", (replace(RULE, document='domain: "a\\0b"'),), "the domain of a rule has an unprintable character"),
    ("add_rule", (replace(RULE, document='domain: "a\\nb"'),), "the domain of a rule has an unprintable character"),
    ("add_rule", (replace(RULE, document="domain: " + "x" * 256),), "the domain of a rule has 256 characters; it must"),
    ("add_rule", (replace(RULE, document="domain: " + "ü" * 5000),), "the domain of a rule has 5000 characters"),
    ("add_token", (replace(TOKEN, name=""),), "must not be empty"),
]


async def test_invalid_values_are_rejected_equally_on_both_databases(db: AccountDb) -> None:
    for method, arguments, error in REJECTED:
        with pytest.raises(BadRequest, match=error):
            await db.do(method, *arguments)
    assert db.commits == 0
    assert await db.ask("audit") == []


@pytest.mark.slow
async def test_any_name_can_be_looked_up(db: AccountDb) -> None:
    for name in ("a\0b", "\ud800", "", "x" * 5000, "'; drop table tiers; --"):
        for method in ("tier", "user", "key", "rule", "rule_named", "token"):
            with pytest.raises(NotFound):
                await db.ask(method, name)
        assert await db.ask("stored_response", "t", name) is None
        assert await db.ask("audit", subject=name) == []


async def test_every_change_has_an_audit_entry(db: AccountDb) -> None:
    await db.with_gold_and_alice()
    await db.do("set_block", "alice", BLOCK)
    await db.do("add_key", KEY)
    await db.do("add_token", TOKEN)
    db.now_s += 1
    await db.do("delete_user", "alice")
    rows = await db.ask("audit")
    assert [(row.action, row.kind, row.subject) for row in rows] == [
        ("delete", "user", "alice"),
        ("delete", "key", "k1"),
        ("create", "token", "tok1"),
        ("create", "key", "k1"),
        ("block", "user", "alice"),
        ("create", "user", "alice"),
        ("create", "tier", "gold"),
    ]
    blocked = rows[4]
    assert (blocked.actor, blocked.actor_token, blocked.address, blocked.request_id) == ME
    assert (rows[0].at_s, blocked.at_s) == (NOW_S + 1, NOW_S)
    assert blocked.before == {"user_id": "alice", "tier": "gold", "org": None, "custom_limits": None, "version": 1}
    assert blocked.after == {**blocked.before, "version": 2, "block": {"reason": "spam", "until_s": BLOCK.until_s}}
    assert rows[0].after is None
    assert "digest" not in str(rows)
    assert [row.audit_id for row in await db.ask("audit", rows[2].audit_id, 2)] == [
        rows[3].audit_id,
        rows[4].audit_id,
    ]
    assert [row.action for row in await db.ask("audit", kind="user", subject="alice", actor="me")] == [
        "delete",
        "block",
        "create",
    ]
    assert await db.ask("audit", actor="you") == []


async def _add_twice(db: AccountDb) -> None:
    async with db.repository.change(ME) as change:
        await change.add_tier(Tier("gold", LIMITS))
        assert await change.tier("gold")
        await change.store_response("t1", "key-1", ANSWER)
        await change.add_tier(Tier("gold", LIMITS))


async def test_unit_of_work_is_atomic(db: AccountDb) -> None:
    with pytest.raises(Conflict):
        await _add_twice(db)
    assert await db.ask("tiers") == []
    assert await db.ask("audit") == []
    assert await db.ask("stored_response", "t1", "key-1") is None
    assert (await db.ask("accounts")).sequence == 0
    assert db.commits == 0


async def test_dry_run_changes_nothing(db: AccountDb) -> None:
    async with db.repository.change(ME, dry_run=True) as change:
        assert (await change.add_tier(Tier("gold", LIMITS))).version == 1
        assert await change.tier("gold")
    assert await db.ask("tiers") == []
    assert await db.ask("audit") == []
    assert db.commits == 0
    await db.do("add_tier", Tier("gold", LIMITS))
    assert db.commits == 1


@pytest.mark.slow
async def test_response_is_stored_for_a_day_with_its_change(db: AccountDb) -> None:
    async with db.repository.change(ME) as change:
        await change.add_tier(Tier("gold", LIMITS))
        await change.store_response("t1", "key-1", ANSWER)
    assert await db.ask("stored_response", "t1", "key-1") == ANSWER
    assert await db.ask("stored_response", "t2", "key-1") is None  # keys of different tokens are independent
    with pytest.raises(Conflict):
        await db.do("store_response", "t1", "key-1", ANSWER)
    db.now_s += 86_400
    assert await db.ask("stored_response", "t1", "key-1") is None
    await db.do("store_response", "t1", "key-1", ANSWER)
    assert (await db.ask("stored_response", "t1", "key-1")).at_s == db.now_s


@pytest.mark.slow
async def test_usage_is_counted_by_day_and_month_only(db: AccountDb) -> None:
    await db.with_gold_and_alice()
    await db.do("add_key", KEY)
    before = await db.ask("accounts")
    day, month = 86_400, 31 * 86_400
    await db.repository.count_users({"alice": UserUsage(10, 3, NOW_S), "nobody": UserUsage(1, 1, NOW_S)})
    await db.repository.count_users({"alice": UserUsage(5, 0, NOW_S - 1)})  # a late batch
    await db.repository.touch_keys({"k1": (10, NOW_S), "k0": (1, NOW_S)})
    await db.repository.touch_keys({"k1": (5, NOW_S - 1)})
    alice = (await db.ask("usage_of_users", ["alice", "nobody"]))["alice"]
    assert (alice.total, alice.today, alice.denied, alice.last_s) == (15, 15, 3, NOW_S)
    key = (await db.ask("usage_of_keys", ["k1"]))["k1"]
    assert (key.total, key.last_s) == (15, NOW_S)
    await db.repository.count_users({"alice": UserUsage(1, 0, NOW_S + day)})
    db.now_s += day
    alice = (await db.ask("usage_of_users", ["alice"]))["alice"]
    assert (alice.total, alice.today) == (16, 1)
    db.now_s += month
    alice = (await db.ask("usage_of_users", ["alice"]))["alice"]
    assert (alice.total, alice.today, alice.denied) == (0, 0, 3)
    await db.repository.count_users({})
    assert await db.ask("accounts") == before


async def test_late_usage_does_not_count_for_a_later_day(db: AccountDb) -> None:
    await db.with_gold_and_alice()
    day = 86_400.0
    await db.repository.count_users({"alice": UserUsage(5, 0, NOW_S)})
    await db.repository.count_users({"alice": UserUsage(1000, 0, NOW_S - 2 * day)})
    await db.repository.count_users({"alice": UserUsage(7000, 0, NOW_S - 100 * day)})
    used = (await db.ask("usage_of_users", ["alice"]))["alice"]
    assert (used.today, used.total, used.last_s) == (5, 1005, NOW_S)
    async with db.database.reading() as connection:
        assert await connection.scalar(select(user_quotas.c.quota_reset_at)) > NOW_S  # type: ignore[operator]
