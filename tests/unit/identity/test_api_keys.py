"""API keys: whose they are, and that they were used."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.accounts import Accounts, ApiKey, Block, Changed, User
from ratelimit_rls.core.identity import Identity
from ratelimit_rls.identity.api_keys import ApiKeys, Used
from ratelimit_rls.identity.directory import Directory
from ratelimit_rls.identity.secrets import digest, new_secret

SECRET = b"0123456789abcdef"
MADE = new_secret("rlk")
NOW = 1_000.0


def api_keys(user: User | None = None, **fields: object) -> ApiKeys:
    directory = Directory(lambda: NOW)
    key = ApiKey(MADE.public_id, digest(SECRET, MADE.text), "alice", **fields)  # type: ignore[arg-type]
    directory.load(Accounts(users=(user,) if user else (), keys=(key,)))
    return ApiKeys(directory, SECRET)


def test_a_key_says_who_its_user_is() -> None:
    keys = api_keys(User("alice", "gold", org="acme"))

    assert keys.identify(MADE.text, NOW) == Identity("alice", "gold", "acme", MADE.public_id)


def test_its_own_tier_comes_before_its_users() -> None:
    assert api_keys(User("alice", "gold"), tier="free").identify(MADE.text, NOW) == Identity(
        "alice", "free", "", MADE.public_id
    )


def test_its_user_need_not_be_known() -> None:
    assert api_keys(tier="free").identify(MADE.text, NOW) == Identity("alice", "free", "", MADE.public_id)


def test_the_key_of_a_blocked_user_is_still_theirs() -> None:
    assert api_keys(User("alice", block=Block("spam"))).identify(MADE.text, NOW) is not None


@pytest.mark.parametrize(("end", "is_valid"), [(NOW + 0.1, True), (NOW, False), (NOW - 1, False)])
@pytest.mark.parametrize("how", ["expires_s", "revoked_s"])
def test_a_key_ends(how: str, end: float, is_valid: bool) -> None:
    assert (api_keys(**{how: end}).identify(MADE.text, NOW) is not None) == is_valid


def test_nothing_else_is_a_key() -> None:
    keys = api_keys()
    others = [
        new_secret("rlk").text,
        new_secret("rla").text,
        MADE.text[:-1] + ("A" if MADE.text[-1] != "A" else "B"),
        MADE.text + "=",
        "",
        "\ud800",
        "x" * 1_000_000,
    ]

    assert [keys.identify(other, NOW) for other in others] == [None] * len(others)
    assert keys.take_used() == {}


def test_a_revoked_key_is_nobodys_at_once() -> None:
    directory = Directory(lambda: NOW)
    directory.load(Accounts(keys=(ApiKey(MADE.public_id, digest(SECRET, MADE.text), "alice"),)))
    keys = ApiKeys(directory, SECRET)
    assert keys.identify(MADE.text, NOW) is not None

    directory.apply(Changed(2, keys={MADE.public_id: None}))

    assert keys.identify(MADE.text, NOW) is None


def test_uses_are_counted_until_they_are_taken() -> None:
    keys = api_keys()
    keys.identify(MADE.text, NOW)
    keys.identify(MADE.text, NOW + 5)

    assert keys.take_used() == {MADE.public_id: Used(2, NOW + 5)}
    assert keys.take_used() == {}


def test_uses_that_could_not_be_written_are_counted_on() -> None:
    keys = api_keys()
    keys.identify(MADE.text, NOW)
    taken = keys.take_used()
    keys.identify(MADE.text, NOW + 5)

    keys.put_back(taken)

    assert keys.take_used() == {MADE.public_id: Used(2, NOW + 5)}


def test_uses_outlive_what_is_remembered_of_a_key_and_are_told_to_the_second() -> None:
    directory = Directory(lambda: NOW)
    directory.load(Accounts(keys=(ApiKey(MADE.public_id, digest(SECRET, MADE.text), "alice"),)))
    keys = ApiKeys(directory, SECRET)
    keys.identify(MADE.text, NOW)
    directory.apply(Changed(2, users={"alice": User("alice")}))
    keys.identify(MADE.text, NOW + 5.75)
    assert keys.take_used() == {MADE.public_id: Used(2, NOW + 5)}


def test_what_is_remembered_ends_with_the_key_and_with_every_change() -> None:
    directory = Directory(lambda: NOW)
    key = ApiKey(MADE.public_id, digest(SECRET, MADE.text), "alice", expires_s=NOW + 5)
    directory.load(Accounts(keys=(key,)))
    keys = ApiKeys(directory, SECRET)
    assert keys.identify(MADE.text, NOW) == Identity("alice", api_key=MADE.public_id)
    directory.apply(Changed(2, users={"alice": User("alice", org="acme")}))
    assert keys.identify(MADE.text, NOW) == Identity("alice", "", "acme", MADE.public_id)
    assert keys.identify(MADE.text, NOW + 5) is None
    directory.load(Accounts())
    assert keys.identify(MADE.text, NOW) is None


def test_keys_that_are_nobody_s_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ratelimit_rls.identity.api_keys.MOST_REMEMBERED", 2)
    made = [new_secret("rlk") for _ in range(5)]
    directory = Directory(lambda: NOW)
    directory.load(Accounts(keys=tuple(ApiKey(one.public_id, digest(SECRET, one.text), "alice") for one in made)))
    keys = ApiKeys(directory, SECRET)
    assert all(keys.identify(one.text, NOW) for one in made)
    for _ in range(10):
        keys.identify(new_secret("rlk").text, NOW)
    assert len(keys._remembered) <= 3
    assert all(one.text.encode() not in known for one in made for known in keys._remembered)
