"""How callers stand: one order decides, and no standing is believed beyond the change that touches it."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimit_rls.core.accounts import Accounts, ApiKey, Block, Changed, Override, Tier, User
from ratelimit_rls.core.model import Limit, Subject, Unit
from ratelimit_rls.core.standing import Standing, Validity
from ratelimit_rls.identity.directory import Directory, Index
from ratelimit_rls.identity.order import EXPIRED, REVOKED

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


def told(standing: Standing) -> tuple[object, ...]:
    return standing.source, standing.limits, standing.block, standing.until_s


USERS = {
    "nobody knows them": (None, "", ("", None, None, inf)),
    "nobody knows them, but the request names a tier": (None, "gold", ("tier gold", GOLD, None, inf)),
    "nobody knows the tier either": (None, "platinum", ("", None, None, inf)),
    "a record that says nothing": (User("u"), "", ("", None, None, inf)),
    "a record without a tier": (User("u"), "free", ("tier free", FREE, None, inf)),
    "the record's tier before the request's": (User("u", "gold"), "free", ("tier gold", GOLD, None, inf)),
    "a tier that is not there any more": (User("u", "gone"), "free", ("", None, None, inf)),
    "a tier without limits": (User("u", "named only"), "free", ("", None, None, inf)),
    "custom limits before the tier": (User("u", "gold", CUSTOM), "", ("custom", CUSTOM, None, inf)),
    "an override before custom limits": (
        User("u", "gold", CUSTOM, Override(RAISED, NOW + 5)),
        "",
        ("override", RAISED, None, NOW + 5),
    ),
    "an override that ends now": (User("u", "gold", CUSTOM, Override(RAISED, NOW)), "", ("custom", CUSTOM, None, inf)),
    "an override of nothing": (User("u", "gold", (), Override((), NOW + 5)), "", ("tier gold", GOLD, None, inf)),
    "a block before everything": (
        User("u", "gold", CUSTOM, Override(RAISED, NOW + 5), BLOCK),
        "",
        ("override", RAISED, BLOCK, NOW + 5),
    ),
    "a block until it is lifted": (User("u", block=Block("x")), "", ("", None, Block("x"), inf)),
    "a block that ends now": (
        User("u", "gold", block=Block("x", until_s=NOW)),
        "",
        ("tier gold", GOLD, None, inf),
    ),
}


@pytest.mark.parametrize(("user", "tier", "expected"), USERS.values(), ids=USERS)
def test_the_order_for_users(directory: Directory, user: User | None, tier: str, expected: tuple[object, ...]) -> None:
    directory.load(Accounts(tiers=TIERS, users=(user,) if user else ()))

    assert told(directory.of(Subject.USER, "u", tier)) == expected


KEY = ApiKey("k", b"", "u")

KEYS = {
    "nobody knows it": (None, User("u", "gold"), "", ("", None, None, inf)),
    "nobody knows its user": (KEY, None, "", ("", None, None, inf)),
    "its user's tier": (KEY, User("u", "gold"), "free", ("tier gold", GOLD, None, inf)),
    "its own tier first": (replace(KEY, tier="free"), User("u", "gold"), "", ("tier free", FREE, None, inf)),
    "its own limits before any tier": (
        replace(KEY, tier="free", limits=CUSTOM),
        User("u", "gold"),
        "",
        ("custom", CUSTOM, None, inf),
    ),
    "its user's limits are its user's": (
        KEY,
        User("u", "gold", CUSTOM, Override(RAISED, NOW + 5)),
        "",
        ("tier gold", GOLD, None, inf),
    ),
    "it will expire": (
        replace(KEY, expires_s=NOW + 1),
        User("u", "gold"),
        "",
        ("tier gold", GOLD, None, NOW + 1),
    ),
    "with limits, it will, too": (
        replace(KEY, expires_s=NOW + 1, limits=CUSTOM),
        None,
        "",
        ("custom", CUSTOM, None, NOW + 1),
    ),
    "and so where the rule's hold": (replace(KEY, expires_s=NOW + 1), None, "", ("", None, None, NOW + 1)),
    "it expires now": (replace(KEY, expires_s=NOW, limits=CUSTOM), None, "", ("custom", CUSTOM, EXPIRED, inf)),
    "it was revoked": (replace(KEY, revoked_s=NOW - 1), None, "", ("", None, REVOKED, inf)),
    "its user is blocked": (
        replace(KEY, expires_s=NOW + 1, limits=CUSTOM),
        User("u", block=BLOCK),
        "",
        ("custom", CUSTOM, BLOCK, NOW + 1),
    ),
}


@pytest.mark.parametrize(("key", "user", "tier", "expected"), KEYS.values(), ids=KEYS)
def test_the_order_for_keys(
    directory: Directory, key: ApiKey | None, user: User | None, tier: str, expected: tuple[object, ...]
) -> None:
    directory.load(Accounts(tiers=TIERS, users=(user,) if user else (), keys=(key,) if key else ()))

    assert told(directory.of(Subject.API_KEY, "k", tier)) == expected


def test_equal_questions_share_one_standing_for_as_long_as_somebody_holds_it(directory: Directory) -> None:
    directory.load(Accounts(tiers=TIERS, users=(User("u", "gold"),)))

    held = directory.of(Subject.USER, "u", "")

    assert directory.of(Subject.USER, "u", "") is held
    assert directory.sizes.standings == 1
    del held
    assert directory.sizes.standings == 0


def test_invented_tiers_make_no_standings(directory: Directory) -> None:
    held = [directory.of(Subject.USER, "u", f"tier {number}") for number in range(100)]

    assert len(set(map(id, held))) == 1


def test_a_change_marks_whom_it_touches_and_nobody_else(directory: Directory) -> None:
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

    directory.apply(Changed(2, users={"a": User("a", "free")}))
    assert (a.stale, b.stale, ka.stale, kb.stale) == (True, False, True, False)
    assert directory.of(Subject.USER, "a", "").limits == directory.of(Subject.API_KEY, "ka", "").limits == FREE

    directory.apply(Changed(3, keys={"kb": replace(keys[1], revoked_s=NOW)}))
    assert (b.stale, kb.stale) == (False, True)
    assert directory.of(Subject.API_KEY, "kb", "").block == REVOKED

    directory.apply(Changed(4, users={"b": None}, keys={"kb": None}))
    assert b.stale
    assert directory.sizes[:3] == (3, 1, 1)
    assert directory.sequence == 4


def test_whoever_becomes_known_was_touched(directory: Directory) -> None:
    user, key = directory.of(Subject.USER, "u", ""), directory.of(Subject.API_KEY, "k", "platinum")

    directory.apply(Changed(1, users={"u": User("u", limits=CUSTOM)}, keys={"k": KEY}))

    assert user.stale
    assert key.stale
    assert directory.of(Subject.USER, "u", "").limits == CUSTOM


def test_a_tier_marks_those_who_came_from_it(directory: Directory) -> None:
    users = (User("gold", "gold"), User("free", "free"), User("custom", "gold", CUSTOM), User("later", "later"))
    directory.load(Accounts(tiers=TIERS, users=users))
    held = {user.user_id: directory.of(Subject.USER, user.user_id, "") for user in users}
    held["named"] = directory.of(Subject.USER, "unknown", "gold")
    held["unknown tier"] = directory.of(Subject.USER, "unknown", "later")

    directory.apply(Changed(2, tiers={"gold": Tier("gold", RAISED)}))
    assert {name for name, standing in held.items() if standing.stale} == {"gold", "named"}
    assert directory.of(Subject.USER, "gold", "").limits == RAISED

    directory.apply(Changed(3, tiers={"later": Tier("later", GOLD)}))
    assert {name for name, standing in held.items() if standing.stale} == {"gold", "named", "later", "unknown tier"}

    directory.apply(Changed(4, tiers={"free": None}))
    assert held["free"].stale
    assert not held["custom"].stale


def test_a_standing_asked_for_under_a_tier_that_went_is_still_found(directory: Directory) -> None:
    directory.load(Accounts(tiers=TIERS, users=(User("u", limits=CUSTOM),)))
    held = directory.of(Subject.USER, "u", "gold")

    directory.apply(Changed(2, tiers={"gold": None}))
    directory.apply(Changed(3, users={"u": User("u", limits=RAISED)}))

    assert held.stale


def test_loading_marks_all(directory: Directory) -> None:
    held = [directory.of(Subject.USER, name, "") for name in "abc"]

    directory.load(Index(Accounts(5, tiers=TIERS)))

    assert all(standing.stale for standing in held)
    assert directory.sequence == 5


def test_what_ends_is_asked_for_anew(directory: Directory, clock: Clock) -> None:
    directory.load(Accounts(tiers=TIERS, users=(User("u", "gold", override=Override(RAISED, NOW + 5)),)))
    held = directory.of(Subject.USER, "u", "")
    plan = Validity((held,))
    assert plan.holds(NOW + 4.9)

    clock.now_s = NOW + 5

    assert not plan.holds(clock.now_s)
    assert directory.of(Subject.USER, "u", "").limits == GOLD
    assert held.stale


def test_equal_limits_are_held_once(directory: Directory) -> None:
    users = tuple(User(f"u{number}", limits=(Limit(7, Unit.HOUR),)) for number in range(10))
    directory.load(Accounts(users=users))
    directory.apply(Changed(2, users={"u0": User("u0", limits=(Limit(7, Unit.HOUR),))}))

    held = [directory.user(f"u{number}") for number in range(10)]

    assert len({id(user.limits) for user in held if user}) == 1


def test_effective_limits_tell_every_candidate_and_why_it_did_not_win(directory: Directory) -> None:
    block, override = Block("spam", NOW - 1), Override(RAISED, NOW + 5, "launch")
    directory.load(Accounts(tiers=TIERS, users=(User("u", "gold", CUSTOM, override, block),)))

    effective = directory.effective("u", NOW)

    assert effective[:4] == (RAISED, "override", NOW + 5, None)
    assert [(one.source, one.limits, one.why_not) for one in effective.considered] == [
        ("block", None, "it has ended"),
        ("override", RAISED, ""),
        ("custom", CUSTOM, "override comes first"),
        ("tier gold", GOLD, "override comes first"),
        ("", None, "override comes first"),
    ]


def test_effective_limits_of_somebody_unknown_are_the_rules(directory: Directory) -> None:
    effective = directory.effective("nobody", NOW)

    assert effective[:4] == (None, "", inf, None)
    assert [one.why_not for one in effective.considered] == [
        "there is none",
        "there is none",
        "there are none",
        "there is none",
        "",
    ]


def test_a_blocked_user_is_told_as_such(directory: Directory) -> None:
    directory.load(Accounts(users=(User("u", limits=CUSTOM, block=BLOCK),)))

    effective = directory.effective("u", NOW)

    assert (effective.block, effective.source, effective.until_s) == (BLOCK, "block", BLOCK.until_s)


# --- whatever happens, in whatever order

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
def test_a_standing_handed_out_is_true_until_it_is_marked_or_ends(steps: list[tuple[object, ...]]) -> None:
    clock = Clock()
    clock.now_s = 0.0
    directory = Directory(clock)
    known: dict[str, dict[str, object]] = {"user": {}, "key": {}, "tier": {}}
    handed_out: list[tuple[tuple[Subject, str, str], Standing]] = []
    for step in steps:
        match step:
            case ("of", kind, name, tier):
                handed_out.append(((kind, name, tier), directory.of(kind, name, tier)))
            case ("later",):
                clock.now_s += 1
            case (what, name, value):
                if what == "user" and value is not None:
                    value = replace(value, user_id=name)
                elif what == "key" and value is not None:
                    value = replace(value, key_id=name)
                elif what == "tier" and value is not None:
                    value = Tier(name, value)
                directory.apply(Changed(1, **{f"{what}s": {name: value}}))
                known[what] = {**known[what], name: value}

        fresh = Directory(clock)
        there = {what: tuple(value for value in values.values() if value is not None) for what, values in known.items()}
        fresh.load(Accounts(users=there["user"], keys=there["key"], tiers=there["tier"]))
        for asked, standing in handed_out:
            if not standing.stale and clock.now_s < standing.until_s:
                assert told(standing) == told(fresh.of(*asked))
