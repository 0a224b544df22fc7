"""Everything administrators can decide, on every database."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import select

from ratelimit_rls.core.accounts import (
    AdminToken,
    ApiKey,
    Block,
    KeptAnswer,
    Override,
    Role,
    Scope,
    StoredRule,
    Targeting,
    Tier,
    User,
)
from ratelimit_rls.errors import BadRequest, Conflict, NotFound
from ratelimit_rls.records.tables import user_quotas
from ratelimit_rls.records.use import Counted
from tests.integration.records.conftest import LIMITS, ME, NOW_S, Office

OVERRIDE = Override(LIMITS[:1], NOW_S + 60.5, "a sale")
BLOCK = Block("spam", NOW_S + 3600)
KEY = ApiKey("k1", b"\x00digest\xff", "alice", "laptop", "gold", LIMITS, NOW_S + 86_400)
RULE = StoredRule(
    "",
    "checkout",
    "domain: shop\ndescriptors: []\n",
    10,
    True,
    Targeting(("gold",), ("/checkout/*",), ("POST",), ("192.0.2.0/24",), Scope.USER),
)
ANSWER = KeptAnswer("d1", 201, {"ETag": '"1"'}, b"\x00{}", NOW_S)
TOKEN = AdminToken("tok1", b"\x00digest\xff", "ci", Role.WRITE, NOW_S + 60)


async def test_a_tier_is_created_replaced_and_deleted(office: Office) -> None:
    gold = await office.do("add_tier", Tier("gold", LIMITS, "the best"))
    assert gold == Tier("gold", LIMITS, "the best", 1) == await office.ask("tier", "gold")
    with pytest.raises(Conflict, match="there is a tier") as taken:
        await office.do("add_tier", gold)
    assert not taken.value.is_stale
    assert (await office.do("put_tier", Tier("gold", LIMITS[:1]), expected=1)).version == 2
    assert (await office.do("put_tier", Tier("open", ()))).limits == ()
    assert [tier.name for tier in await office.ask("tiers")] == ["gold", "open"]
    await office.do("delete_tier", "gold", expected=2)
    with pytest.raises(NotFound, match='there is no tier "gold"'):
        await office.ask("tier", "gold")


async def test_a_tier_stays_as_long_as_somebody_has_it(office: Office) -> None:
    await office.with_gold_and_alice()
    await office.do("add_tier", Tier("silver", LIMITS))
    await office.do("add_key", replace(KEY, tier="silver"))
    for tier, who in (("gold", "users"), ("silver", "keys")):
        with pytest.raises(Conflict, match=f"there are {who} in tier"):
            await office.do("delete_tier", tier)


async def test_a_user_keeps_override_and_block_when_it_is_replaced(office: Office) -> None:
    await office.with_gold_and_alice()
    await office.do("set_override", "alice", OVERRIDE)
    await office.do("set_block", "alice", BLOCK)
    alice = await office.do("put_user", User("alice", "", LIMITS, org="acme"))
    assert alice == User("alice", "", LIMITS, OVERRIDE, BLOCK, "acme", 4) == await office.ask("user", "alice")
    assert (await office.do("set_override", "alice", None)).override is None
    assert (await office.do("set_block", "alice", None)).block is None
    assert (await office.do("set_tier", "alice", "gold")).tier == "gold"
    assert (await office.do("set_tier", "alice", "")) == User("alice", "", LIMITS, org="acme", version=8)


async def test_whoever_is_spoken_of_first_is_created(office: Office) -> None:
    await office.with_gold_and_alice()
    assert await office.do("set_tier", "new1", "gold") == User("new1", "gold")
    assert await office.do("set_override", "new2", OVERRIDE) == User("new2", override=OVERRIDE)
    assert await office.do("set_block", "new3", Block()) == User("new3", block=Block())
    for lifted in ("set_override", "set_block"):
        with pytest.raises(NotFound, match="there is no user"):
            await office.do(lifted, "nobody", None)


@pytest.mark.slow
async def test_users_are_found_by_tier_and_block(office: Office) -> None:
    await office.with_gold_and_alice()
    await office.do("put_user", User("Zoe"))
    await office.do("put_user", User("ärger"))
    await office.do("set_block", "bob", BLOCK)
    names = lambda users: [user.user_id for user in users]  # noqa: E731
    assert names(await office.ask("users")) == ["Zoe", "alice", "bob", "ärger"]  # by their bytes
    assert names(await office.ask("users", "Zoe", 2)) == ["alice", "bob"]
    assert names(await office.ask("users", tier="gold")) == ["alice"]
    assert names(await office.ask("users", tier="")) == ["Zoe", "bob", "ärger"]
    assert names(await office.ask("users", blocked=True)) == ["bob"]
    assert names(await office.ask("users", blocked=False, limit=1)) == ["Zoe"]


async def test_keys_go_with_their_user(office: Office) -> None:
    await office.with_gold_and_alice()
    key = await office.do("add_key", KEY)
    assert key == KEY == await office.ask("key", "k1")
    await office.do("put_user", User("bob"))
    await office.do("add_key", ApiKey("k2", b"other", "bob"))
    assert [key.key_id for key in await office.ask("keys")] == ["k1", "k2"]
    assert [key.key_id for key in await office.ask("keys", user_id="bob")] == ["k2"]
    await office.do("delete_user", "alice", expected=1)
    with pytest.raises(NotFound):
        await office.ask("user", "alice")
    with pytest.raises(NotFound):
        await office.ask("key", "k1")
    changed = await office.ask("changed_since", 5)
    assert (dict(changed.users), dict(changed.keys)) == ({"alice": None}, {"k1": None})


async def test_a_key_is_changed_and_revoked_once_and_for_all(office: Office) -> None:
    await office.with_gold_and_alice()
    await office.do("add_key", KEY)
    changed = await office.do("put_key", ApiKey("k1", b"", "", "phone"), expected=1)
    assert changed == ApiKey("k1", KEY.digest, "alice", "phone", version=2)
    office.now_s += 1
    revoked = await office.do("revoke_key", "k1")
    assert (revoked.revoked_s, revoked.version) == (NOW_S + 1, 3)
    office.now_s += 1
    assert await office.do("revoke_key", "k1") == revoked
    with pytest.raises(Conflict, match="is revoked"):
        await office.do("put_key", changed)
    with pytest.raises(Conflict, match="there is a key"):
        await office.do("add_key", KEY)


async def test_a_rule_is_created_replaced_and_deleted(office: Office) -> None:
    made = await office.do("add_rule", RULE)
    assert len(made.rule_id) == 36
    assert made == replace(RULE, rule_id=made.rule_id, created_by="me", created_s=NOW_S, updated_s=NOW_S)
    assert made == await office.ask("rule_named", "checkout")
    office.now_s += 1
    later = await office.do("put_rule", replace(made, name="cart", targeting=Targeting(), created_by="x"), expected=1)
    assert (
        later
        == replace(made, name="cart", targeting=Targeting(), version=2, updated_s=NOW_S + 1)
        == await office.ask("rule", made.rule_id)
    )
    await office.do("delete_rule", made.rule_id, expected=2)
    with pytest.raises(NotFound, match="there is no rule"):
        await office.do("put_rule", later)


@pytest.mark.slow
async def test_the_domain_of_a_rule_may_be_as_long_as_any_name_and_is_checked_when_it_changes(office: Office) -> None:
    made = await office.do("add_rule", replace(RULE, document="domain: " + "ü" * 255))
    with pytest.raises(BadRequest, match="the domain of a rule has 3000 characters"):
        await office.do("put_rule", replace(made, document="domain: " + "x" * 3000))
    assert await office.ask("rule", made.rule_id) == made


async def test_rules_come_by_priority_then_name(office: Office) -> None:
    for name, priority, domain in (("b", 2, "x"), ("a", 2, "y"), ("c", 1, "x"), ("d", 2, "x")):
        await office.do("add_rule", StoredRule("", name, f"domain: {domain}", priority, enabled=name != "d"))
    rules = await office.ask("rules")
    assert [rule.name for rule in rules] == ["c", "a", "b", "d"]
    assert [rule.name for rule in await office.ask("rules", rules[1].rule_id, 1)] == ["b"]
    assert [rule.name for rule in await office.ask("rules", domain="x", enabled=True)] == ["c", "b"]
    with pytest.raises(BadRequest, match="is gone"):
        await office.ask("rules", "00000000-0000-0000-0000-000000000000")


async def test_a_rule_s_name_is_its_own(office: Office) -> None:
    first = await office.do("add_rule", RULE)
    other = await office.do("add_rule", replace(RULE, name="other"))
    for attempt in (("add_rule", RULE), ("put_rule", replace(other, name="checkout"))):
        with pytest.raises(Conflict, match=first.rule_id):
            await office.do(*attempt)
    with pytest.raises(Conflict, match="with the id"):
        await office.do("add_rule", replace(first, name="third"))


async def test_tokens_are_made_and_revoked(office: Office) -> None:
    made = await office.do("add_token", TOKEN)
    assert made == replace(TOKEN, created_s=NOW_S) == await office.ask("token", "tok1")
    with pytest.raises(Conflict):
        await office.do("add_token", TOKEN)
    await office.desk.touch_tokens({"tok1": NOW_S + 5, "nobody's": NOW_S})
    revoked = await office.do("revoke_token", "tok1")
    assert revoked == replace(made, revoked_s=NOW_S, last_used_s=NOW_S + 5)
    assert await office.do("revoke_token", "tok1") == revoked
    assert await office.ask("tokens") == [revoked]
    with pytest.raises(NotFound):
        await office.do("revoke_token", "tok2")


async def test_what_was_seen_must_be_what_is_there(office: Office) -> None:
    await office.with_gold_and_alice()
    await office.do("add_key", KEY)
    rule = await office.do("add_rule", RULE)
    before = await office.ask("accounts")
    replaced = {"put_tier": Tier("gold", ()), "put_user": User("alice"), "put_key": KEY, "put_rule": rule}
    deleted = {"delete_tier": "gold", "delete_user": "alice", "delete_rule": rule.rule_id}
    for method, value in {**replaced, **deleted}.items():
        for seen in (0, 2):
            with pytest.raises(Conflict, match=f"is at version 1, and not at version {seen}") as stale:
                await office.do(method, value, expected=seen)
            assert stale.value.is_stale
    assert await office.ask("accounts") == before
    for method, value in replaced.items():
        assert (await office.do(method, value, expected=1)).version == 2


async def test_what_is_expected_and_not_there_is_stale_too(office: Office) -> None:
    for method, value in (("put_tier", Tier("gold", ())), ("put_user", User("alice"))):
        with pytest.raises(Conflict, match="is not there") as stale:
            await office.do(method, value, expected=1)
        assert stale.value.is_stale


REFUSED: list[tuple[str, tuple[Any, ...], str]] = [
    ("add_tier", (Tier("", ()),), "must not be empty"),
    ("add_tier", (Tier("x" * 256, ()),), "256 characters"),
    ("add_tier", (Tier("a\nb", ()),), "cannot be printed"),
    ("add_tier", (Tier("a", (), "x\0"),), "cannot be stored"),
    ("put_user", (User("a\0"),), "cannot be printed"),
    ("put_user", (User("a\ud800"),), "cannot be printed"),
    ("put_user", (User("a", "platinum"),), 'no tier "platinum"'),
    ("set_tier", ("a", "platinum"), 'no tier "platinum"'),
    ("set_override", ("a", Override((), float("inf"))), "between 1970 and 9999"),
    ("set_override", ("a", Override((), float("nan"))), "between 1970 and 9999"),
    ("set_block", ("a", Block("x", 1e15)), "between 1970 and 9999"),
    ("set_block", ("", Block()), "must not be empty"),
    ("add_key", (KEY,), 'no user "alice"'),
    ("add_rule", (replace(RULE, priority=2**31),), "priority"),
    ("add_rule", (replace(RULE, rule_id="1; drop"),), "must be a UUID"),
    ("add_rule", (replace(RULE, document="a: \0"),), "cannot be stored"),
    ("add_rule", (replace(RULE, document='domain: "a\\0b"'),), "the domain of a rule has a character that cannot be"),
    ("add_rule", (replace(RULE, document='domain: "a\\nb"'),), "the domain of a rule has a character that cannot be"),
    ("add_rule", (replace(RULE, document="domain: " + "x" * 256),), "the domain of a rule has 256 characters; 255 are"),
    ("add_rule", (replace(RULE, document="domain: " + "ü" * 5000),), "the domain of a rule has 5000 characters"),
    ("add_token", (replace(TOKEN, name=""),), "must not be empty"),
]


async def test_what_no_database_takes_is_refused_alike(office: Office) -> None:
    for method, arguments, why in REFUSED:
        with pytest.raises(BadRequest, match=why):
            await office.do(method, *arguments)
    assert office.commits == 0
    assert await office.ask("audit") == []


@pytest.mark.slow
async def test_any_name_can_be_asked_for(office: Office) -> None:
    for name in ("a\0b", "\ud800", "", "x" * 5000, "'; drop table tiers; --"):
        for method in ("tier", "user", "key", "rule", "rule_named", "token"):
            with pytest.raises(NotFound):
                await office.ask(method, name)
        assert await office.ask("idempotent", "t", name) is None
        assert await office.ask("audit", subject=name) == []


async def test_every_change_has_its_row_in_the_audit(office: Office) -> None:
    await office.with_gold_and_alice()
    await office.do("set_block", "alice", BLOCK)
    await office.do("add_key", KEY)
    await office.do("add_token", TOKEN)
    office.now_s += 1
    await office.do("delete_user", "alice")
    rows = await office.ask("audit")
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
    assert [row.audit_id for row in await office.ask("audit", rows[2].audit_id, 2)] == [
        rows[3].audit_id,
        rows[4].audit_id,
    ]
    assert [row.action for row in await office.ask("audit", kind="user", subject="alice", actor="me")] == [
        "delete",
        "block",
        "create",
    ]
    assert await office.ask("audit", actor="you") == []


async def _add_twice(office: Office) -> None:
    async with office.desk.change(ME) as change:
        await change.add_tier(Tier("gold", LIMITS))
        assert await change.tier("gold")
        await change.keep_answer("t1", "key-1", ANSWER)
        await change.add_tier(Tier("gold", LIMITS))


async def test_a_change_is_whole_or_not_at_all(office: Office) -> None:
    with pytest.raises(Conflict):
        await _add_twice(office)
    assert await office.ask("tiers") == []
    assert await office.ask("audit") == []
    assert await office.ask("idempotent", "t1", "key-1") is None
    assert (await office.ask("accounts")).sequence == 0
    assert office.commits == 0


async def test_a_dry_run_tells_and_does_nothing(office: Office) -> None:
    async with office.desk.change(ME, dry_run=True) as change:
        assert (await change.add_tier(Tier("gold", LIMITS))).version == 1
        assert await change.tier("gold")
    assert await office.ask("tiers") == []
    assert await office.ask("audit") == []
    assert office.commits == 0
    await office.do("add_tier", Tier("gold", LIMITS))
    assert office.commits == 1


@pytest.mark.slow
async def test_an_answer_is_kept_for_a_day_with_the_change_it_tells_of(office: Office) -> None:
    async with office.desk.change(ME) as change:
        await change.add_tier(Tier("gold", LIMITS))
        await change.keep_answer("t1", "key-1", ANSWER)
    assert await office.ask("idempotent", "t1", "key-1") == ANSWER
    assert await office.ask("idempotent", "t2", "key-1") is None  # another's key is another key
    with pytest.raises(Conflict):
        await office.do("keep_answer", "t1", "key-1", ANSWER)
    office.now_s += 86_400
    assert await office.ask("idempotent", "t1", "key-1") is None
    await office.do("keep_answer", "t1", "key-1", ANSWER)
    assert (await office.ask("idempotent", "t1", "key-1")).at_s == office.now_s


@pytest.mark.slow
async def test_use_is_counted_by_day_and_month_and_changes_nothing_else(office: Office) -> None:
    await office.with_gold_and_alice()
    await office.do("add_key", KEY)
    before = await office.ask("accounts")
    day, month = 86_400, 31 * 86_400
    await office.desk.count_users({"alice": Counted(10, 3, NOW_S), "nobody": Counted(1, 1, NOW_S)})
    await office.desk.count_users({"alice": Counted(5, 0, NOW_S - 1)})  # a batch that comes late
    await office.desk.touch_keys({"k1": (10, NOW_S), "k0": (1, NOW_S)})
    await office.desk.touch_keys({"k1": (5, NOW_S - 1)})
    alice = (await office.ask("use_of_users", ["alice", "nobody"]))["alice"]
    assert (alice.total, alice.today, alice.refused, alice.last_s) == (15, 15, 3, NOW_S)
    key = (await office.ask("use_of_keys", ["k1"]))["k1"]
    assert (key.total, key.last_s) == (15, NOW_S)
    await office.desk.count_users({"alice": Counted(1, 0, NOW_S + day)})
    office.now_s += day
    alice = (await office.ask("use_of_users", ["alice"]))["alice"]
    assert (alice.total, alice.today) == (16, 1)
    office.now_s += month
    alice = (await office.ask("use_of_users", ["alice"]))["alice"]
    assert (alice.total, alice.today, alice.refused) == (0, 0, 3)
    await office.desk.count_users({})
    assert await office.ask("accounts") == before


async def test_what_is_counted_late_is_in_no_later_day_s_total(office: Office) -> None:
    await office.with_gold_and_alice()
    day = 86_400.0
    await office.desk.count_users({"alice": Counted(5, 0, NOW_S)})
    await office.desk.count_users({"alice": Counted(1000, 0, NOW_S - 2 * day)})
    await office.desk.count_users({"alice": Counted(7000, 0, NOW_S - 100 * day)})
    used = (await office.ask("use_of_users", ["alice"]))["alice"]
    assert (used.today, used.total, used.last_s) == (5, 1005, NOW_S)
    async with office.database.reading() as connection:
        assert await connection.scalar(select(user_quotas.c.quota_reset_at)) > NOW_S
