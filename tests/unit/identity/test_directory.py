"""The directory: precedence of limits, and invalidation of entitlements."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimit_rls.core.entitlements import Block, Entitlement, EntitlementValidity
from ratelimit_rls.core.model import Limit, Subject, Unit
from ratelimit_rls.identity.accounts import AccountChanges, Accounts, ApiKey, Override, Tier, User
from ratelimit_rls.identity.directory import AccountIndex, Directory
from ratelimit_rls.identity.precedence import EXPIRED, REVOKED

NOW = 1_000.0
GOLD, FREE, CUSTOM, RAISED = ((Limit(count, Unit.MINUTE),) for count in (100, 5, 42, 1000))
TIERS = (Tier("gold", GOLD), Tier("free", FREE), Tier("named only", ()))
BLOCK = Block("spam", until_s=NOW + 10)


class Clock:
    def __init__(self) -> None:
        self.now_s = NOW

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def directory(clock: Clock) -> Directory:
    return Directory(clock)


def summary(entitlement: Entitlement) -> tuple[object, ...]:
    return entitlement.source, entitlement.limits, entitlement.block, entitlement.until_s


USERS = {
    "unknown user": (None, "", ("", None, None, inf)),
    "unknown user, tier named by the request": (None, "gold", ("tier gold", GOLD, None, inf)),
    "unknown user and unknown tier": (None, "platinum", ("", None, None, inf)),
    "account without settings": (User("u"), "", ("", None, None, inf)),
    "account without a tier": (User("u"), "free", ("tier free", FREE, None, inf)),
    "tier of the account before that of the request": (User("u", "gold"), "free", ("tier gold", GOLD, None, inf)),
    "deleted tier": (User("u", "gone"), "free", ("", None, None, inf)),
    "tier without limits": (User("u", "named only"), "free", ("", None, None, inf)),
    "custom limits before the tier": (User("u", "gold", CUSTOM), "", ("custom", CUSTOM, None, inf)),
    "override before custom limits": (
        User("u", "gold", CUSTOM, Override(RAISED, NOW + 5)),
        "",
        ("override", RAISED, None, NOW + 5),
    ),
    "override that ends now": (User("u", "gold", CUSTOM, Override(RAISED, NOW)), "", ("custom", CUSTOM, None, inf)),
    "override without limits": (User("u", "gold", (), Override((), NOW + 5)), "", ("tier gold", GOLD, None, inf)),
    "block before everything": (
        User("u", "gold", CUSTOM, Override(RAISED, NOW + 5), BLOCK),
        "",
        ("override", RAISED, BLOCK, NOW + 5),
    ),
    "block without an end": (User("u", block=Block("x")), "", ("", None, Block("x"), inf)),
    "block that ends now": (
        User("u", "gold", block=Block("x", until_s=NOW)),
        "",
        ("tier gold", GOLD, None, inf),
    ),
}


@pytest.mark.parametrize(("user", "tier", "expected"), USERS.values(), ids=USERS)
def test_precedence_for_users(directory: Directory, user: User | None, tier: str, expected: tuple[object, ...]) -> None:
    directory.load(Accounts(tiers=TIERS, users=(user,) if user else ()))

    assert summary(directory.of(Subject.USER, "u", tier)) == expected


KEY = ApiKey("k", b"", "u")

KEYS = {
    "unknown key": (None, User("u", "gold"), "", ("", None, None, inf)),
    "unknown user of the key": (KEY, None, "", ("", None, None, inf)),
    "tier of its user": (KEY, User("u", "gold"), "free", ("tier gold", GOLD, None, inf)),
    "its own tier before its user's": (
        replace(KEY, tier="free"),
        User("u", "gold"),
        "",
        ("tier free", FREE, None, inf),
    ),
    "its own limits before any tier": (
        replace(KEY, tier="free", limits=CUSTOM),
        User("u", "gold"),
        "",
        ("custom", CUSTOM, None, inf),
    ),
    "limits of its user do not apply": (
        KEY,
        User("u", "gold", CUSTOM, Override(RAISED, NOW + 5)),
        "",
        ("tier gold", GOLD, None, inf),
    ),
    "key that will expire": (
        replace(KEY, expires_s=NOW + 1),
        User("u", "gold"),
        "",
        ("tier gold", GOLD, None, NOW + 1),
    ),
    "key with limits that will expire": (
        replace(KEY, expires_s=NOW + 1, limits=CUSTOM),
        None,
        "",
        ("custom", CUSTOM, None, NOW + 1),
    ),
    "key without limits that will expire": (replace(KEY, expires_s=NOW + 1), None, "", ("", None, None, NOW + 1)),
    "key that expires now": (replace(KEY, expires_s=NOW, limits=CUSTOM), None, "", ("custom", CUSTOM, EXPIRED, inf)),
    "revoked key": (replace(KEY, revoked_s=NOW - 1), None, "", ("", None, REVOKED, inf)),
    "blocked user of the key": (
        replace(KEY, expires_s=NOW + 1, limits=CUSTOM),
        User("u", block=BLOCK),
        "",
        ("custom", CUSTOM, BLOCK, NOW + 1),
    ),
}


@pytest.mark.parametrize(("key", "user", "tier", "expected"), KEYS.values(), ids=KEYS)
def test_precedence_for_keys(
    directory: Directory, key: ApiKey | None, user: User | None, tier: str, expected: tuple[object, ...]
) -> None:
    directory.load(Accounts(tiers=TIERS, users=(user,) if user else (), keys=(key,) if key else ()))

    assert summary(directory.of(Subject.API_KEY, "k", tier)) == expected


def test_entitlement_is_shared_while_referenced(directory: Directory) -> None:
    directory.load(Accounts(tiers=TIERS, users=(User("u", "gold"),)))

    cached = directory.of(Subject.USER, "u", "")

    assert directory.of(Subject.USER, "u", "") is cached
    assert directory.sizes.entitlements == 1
    del cached
    assert directory.sizes.entitlements == 0


def test_unknown_tiers_share_one_entitlement(directory: Directory) -> None:
    cached = [directory.of(Subject.USER, "u", f"tier {number}") for number in range(100)]

    assert len(set(map(id, cached))) == 1


def test_change_invalidates_only_affected_entitlements(directory: Directory) -> None:
    keys = (ApiKey("ka", b"", "a"), ApiKey("kb", b"", "b"))
    directory.load(Accounts(tiers=TIERS, users=(User("a", "gold"), User("b", "gold")), keys=keys))
    a, b, ka, kb = (
        directory.of(kind, name, tier)
        for kind, name, tier in [
            (Subject.USER, "a", "free"),
            (Subject.USER, "b", ""),
            (Subject.API_KEY, "ka", ""),
            (Subject.API_KEY, "kb", ""),
        ]
    )

    directory.apply(AccountChanges(2, users={"a": User("a", "free")}))
    assert (a.stale, b.stale, ka.stale, kb.stale) == (True, False, True, False)
    assert directory.of(Subject.USER, "a", "").limits == directory.of(Subject.API_KEY, "ka", "").limits == FREE

    directory.apply(AccountChanges(3, keys={"kb": replace(keys[1], revoked_s=NOW)}))
    assert (b.stale, kb.stale) == (False, True)
    assert directory.of(Subject.API_KEY, "kb", "").block == REVOKED

    directory.apply(AccountChanges(4, users={"b": None}, keys={"kb": None}))
    assert b.stale
    assert directory.sizes[:3] == (3, 1, 1)
    assert directory.sequence == 4


def test_new_account_invalidates_entitlement_of_unknown_subject(directory: Directory) -> None:
    user, key = directory.of(Subject.USER, "u", ""), directory.of(Subject.API_KEY, "k", "platinum")

    directory.apply(AccountChanges(1, users={"u": User("u", limits=CUSTOM)}, keys={"k": KEY}))

    assert user.stale
    assert key.stale
    assert directory.of(Subject.USER, "u", "").limits == CUSTOM


def test_subjects_without_an_account_share_one_entitlement(directory: Directory) -> None:
    users, keys = (directory.of(kind, "a", "") for kind in (Subject.USER, Subject.API_KEY))
    assert directory.of(Subject.USER, "b", "") is users
    assert directory.of(Subject.API_KEY, "b", "") is keys

    directory.apply(AccountChanges(1, users={"b": User("b", "", CUSTOM)}))

    assert (users.stale, keys.stale) == (True, False)
    assert directory.of(Subject.USER, "b", "").limits == CUSTOM
    fresh = directory.of(Subject.USER, "a", "")
    assert (fresh.stale, fresh.limits) == (False, None)

    directory.load(Accounts())
    assert (fresh.stale, keys.stale) == (True, True)


def test_tier_change_invalidates_entitlements_of_that_tier(directory: Directory) -> None:
    users = (User("gold", "gold"), User("free", "free"), User("custom", "gold", CUSTOM), User("later", "later"))
    directory.load(Accounts(tiers=TIERS, users=users))
    cached = {user.user_id: directory.of(Subject.USER, user.user_id, "") for user in users}
    cached["named"] = directory.of(Subject.USER, "unknown", "gold")
    cached["unknown tier"] = directory.of(Subject.USER, "unknown", "later")

    directory.apply(AccountChanges(2, tiers={"gold": Tier("gold", RAISED)}))
    assert {name for name, entitlement in cached.items() if entitlement.stale} == {"gold", "named"}
    assert directory.of(Subject.USER, "gold", "").limits == RAISED

    directory.apply(AccountChanges(3, tiers={"later": Tier("later", GOLD)}))
    assert {name for name, entitlement in cached.items() if entitlement.stale} == {
        "gold",
        "named",
        "later",
        "unknown tier",
    }

    directory.apply(AccountChanges(4, tiers={"free": None}))
    assert cached["free"].stale
    assert not cached["custom"].stale


def test_deleted_tier_invalidates_entitlements_requested_by_its_name(directory: Directory) -> None:
    directory.load(Accounts(tiers=TIERS, users=(User("u", limits=CUSTOM),)))
    cached = directory.of(Subject.USER, "u", "gold")

    directory.apply(AccountChanges(2, tiers={"gold": None}))
    directory.apply(AccountChanges(3, users={"u": User("u", limits=RAISED)}))

    assert cached.stale


def test_load_invalidates_all_entitlements(directory: Directory) -> None:
    cached = [directory.of(Subject.USER, name, "") for name in "abc"]

    directory.load(AccountIndex(Accounts(5, tiers=TIERS)))

    assert all(entitlement.stale for entitlement in cached)
    assert directory.sequence == 5


def test_ended_override_is_resolved_again(directory: Directory, clock: Clock) -> None:
    directory.load(Accounts(tiers=TIERS, users=(User("u", "gold", override=Override(RAISED, NOW + 5)),)))
    cached = directory.of(Subject.USER, "u", "")
    plan = EntitlementValidity((cached,))
    assert plan.holds(NOW + 4.9)

    clock.now_s = NOW + 5

    assert not plan.holds(clock.now_s)
    assert directory.of(Subject.USER, "u", "").limits == GOLD
    assert cached.stale


def test_equal_limits_are_interned(directory: Directory) -> None:
    users = tuple(User(f"u{number}", limits=(Limit(7, Unit.HOUR),)) for number in range(10))
    directory.load(Accounts(users=users))
    directory.apply(AccountChanges(2, users={"u0": User("u0", limits=(Limit(7, Unit.HOUR),))}))

    cached = [directory.user(f"u{number}") for number in range(10)]

    assert len({id(user.limits) for user in cached if user}) == 1


def test_effective_limits_list_all_candidates_with_reasons(directory: Directory) -> None:
    block, override = Block("spam", NOW - 1), Override(RAISED, NOW + 5, "launch")
    directory.load(Accounts(tiers=TIERS, users=(User("u", "gold", CUSTOM, override, block),)))

    effective = directory.effective("u", NOW)

    assert effective[:4] == (RAISED, "override", NOW + 5, None)
    assert [(one.source, one.limits, one.why_not) for one in effective.considered] == [
        ("block", None, "it has ended"),
        ("override", RAISED, ""),
        ("custom", CUSTOM, "override takes precedence"),
        ("tier gold", GOLD, "override takes precedence"),
        ("", None, "override takes precedence"),
    ]


def test_effective_limits_of_unknown_user_are_the_rules(directory: Directory) -> None:
    effective = directory.effective("unknown", NOW)

    assert effective[:4] == (None, "", inf, None)
    assert [one.why_not for one in effective.considered] == [
        "not set",
        "not set",
        "no limits are set",
        "not set",
        "",
    ]


def test_effective_limits_of_blocked_user(directory: Directory) -> None:
    directory.load(Accounts(users=(User("u", limits=CUSTOM, block=BLOCK),)))

    effective = directory.effective("u", NOW)

    assert (effective.block, effective.source, effective.until_s) == (BLOCK, "block", BLOCK.until_s)


# --- random sequences of changes

names = st.sampled_from(["a", "b"])
tiers = st.sampled_from(["", "gold", "free"])
limits = st.sampled_from([(), GOLD, CUSTOM])
moments = st.integers(0, 8).map(float)
changed_users = st.none() | st.builds(
    User,
    st.just(""),
    tiers,
    limits,
    st.none() | st.builds(Override, limits, moments),
    st.none() | st.builds(Block, st.just(""), st.none() | moments),
)
changed_keys = st.none() | st.builds(
    ApiKey,
    st.just(""),
    st.just(b""),
    names,
    tier=tiers,
    limits=limits,
    expires_s=st.none() | moments,
    revoked_s=st.none() | moments,
)
steps = st.one_of(
    st.tuples(st.just("of"), st.sampled_from(Subject), names, st.sampled_from(["", "gold", "free", "other"])),
    st.tuples(st.just("user"), names, changed_users),
    st.tuples(st.just("key"), names, changed_keys),
    st.tuples(st.just("tier"), st.sampled_from(["gold", "free", "other"]), st.none() | limits),
    st.tuples(st.just("later")),
)


@given(st.lists(steps, max_size=20))
def test_entitlement_is_correct_until_stale_or_ended(steps: list[tuple[Any, ...]]) -> None:
    clock = Clock()
    clock.now_s = 0.0
    directory = Directory(clock)
    known: dict[str, dict[str, Any]] = {"user": {}, "key": {}, "tier": {}}
    issued: list[tuple[tuple[Subject, str, str], Entitlement]] = []
    for step in steps:
        match step:
            case ("of", kind, name, tier):
                issued.append(((kind, name, tier), directory.of(kind, name, tier)))
            case ("later",):
                clock.now_s += 1
            case (what, name, value):
                if what == "user" and value is not None:
                    value = replace(value, user_id=name)
                elif what == "key" and value is not None:
                    value = replace(value, key_id=name)
                elif what == "tier" and value is not None:
                    value = Tier(name, value)
                directory.apply(AccountChanges(1, **{f"{what}s": {name: value}}))
                known[what] = {**known[what], name: value}

        fresh = Directory(clock)
        there = {what: tuple(value for value in values.values() if value is not None) for what, values in known.items()}
        fresh.load(Accounts(users=there["user"], keys=there["key"], tiers=there["tier"]))
        for request, entitlement in issued:
            if not entitlement.stale and clock.now_s < entitlement.until_s:
                assert summary(entitlement) == summary(fresh.of(*request))
