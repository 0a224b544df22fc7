"""API keys: identity, validity and usage counts."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.entitlements import Block
from ratelimit_rls.core.identity import Identity
from ratelimit_rls.identity.accounts import AccountChanges, Accounts, ApiKey, User
from ratelimit_rls.identity.api_keys import ApiKeyVerifier, KeyUsage
from ratelimit_rls.identity.directory import Directory
from ratelimit_rls.identity.key_format import digest, new_secret

SECRET = b"0123456789abcdef"
MADE = new_secret("rlk")
NOW = 1_000.0


def api_keys(user: User | None = None, **fields: object) -> ApiKeyVerifier:
    directory = Directory(lambda: NOW)
    key = ApiKey(MADE.public_id, digest(SECRET, MADE.text), "alice", **fields)  # type: ignore[arg-type]
    directory.load(Accounts(users=(user,) if user else (), keys=(key,)))
    return ApiKeyVerifier(directory, SECRET)


def test_key_identifies_its_user() -> None:
    keys = api_keys(User("alice", "gold", org="acme"))

    assert keys.identify(MADE.text, NOW) == Identity("alice", "gold", "acme", MADE.public_id)


def test_tier_of_key_precedes_tier_of_user() -> None:
    assert api_keys(User("alice", "gold"), tier="free").identify(MADE.text, NOW) == Identity(
        "alice", "free", "", MADE.public_id
    )


def test_user_of_key_need_not_be_known() -> None:
    assert api_keys(tier="free").identify(MADE.text, NOW) == Identity("alice", "free", "", MADE.public_id)


def test_key_of_blocked_user_is_valid() -> None:
    assert api_keys(User("alice", block=Block("spam"))).identify(MADE.text, NOW) is not None


@pytest.mark.parametrize(("end", "is_valid"), [(NOW + 0.1, True), (NOW, False), (NOW - 1, False)])
@pytest.mark.parametrize("how", ["expires_s", "revoked_s"])
def test_expired_or_revoked_key_is_invalid(how: str, end: float, is_valid: bool) -> None:
    assert (api_keys(**{how: end}).identify(MADE.text, NOW) is not None) == is_valid  # type: ignore[arg-type]


def test_other_texts_are_not_keys() -> None:
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
    assert keys.take_usage() == {}


def test_revoked_key_is_invalid_at_once() -> None:
    directory = Directory(lambda: NOW)
    directory.load(Accounts(keys=(ApiKey(MADE.public_id, digest(SECRET, MADE.text), "alice"),)))
    keys = ApiKeyVerifier(directory, SECRET)
    assert keys.identify(MADE.text, NOW) is not None

    directory.apply(AccountChanges(2, keys={MADE.public_id: None}))

    assert keys.identify(MADE.text, NOW) is None


def test_usage_is_counted_until_taken() -> None:
    keys = api_keys()
    keys.identify(MADE.text, NOW)
    keys.identify(MADE.text, NOW + 5)

    assert keys.take_usage() == {MADE.public_id: KeyUsage(2, NOW + 5)}
    assert keys.take_usage() == {}


def test_usage_put_back_is_added() -> None:
    keys = api_keys()
    keys.identify(MADE.text, NOW)
    taken = keys.take_usage()
    keys.identify(MADE.text, NOW + 5)

    keys.put_back(taken)

    assert keys.take_usage() == {MADE.public_id: KeyUsage(2, NOW + 5)}


def test_usage_survives_cache_clear_and_is_in_whole_seconds() -> None:
    directory = Directory(lambda: NOW)
    directory.load(Accounts(keys=(ApiKey(MADE.public_id, digest(SECRET, MADE.text), "alice"),)))
    keys = ApiKeyVerifier(directory, SECRET)
    keys.identify(MADE.text, NOW)
    directory.apply(AccountChanges(2, users={"alice": User("alice")}))
    keys.identify(MADE.text, NOW + 5.75)
    assert keys.take_usage() == {MADE.public_id: KeyUsage(2, NOW + 5)}


def test_cache_ends_with_key_and_with_every_change() -> None:
    directory = Directory(lambda: NOW)
    key = ApiKey(MADE.public_id, digest(SECRET, MADE.text), "alice", expires_s=NOW + 5)
    directory.load(Accounts(keys=(key,)))
    keys = ApiKeyVerifier(directory, SECRET)
    assert keys.identify(MADE.text, NOW) == Identity("alice", api_key=MADE.public_id)
    directory.apply(AccountChanges(2, users={"alice": User("alice", org="acme")}))
    assert keys.identify(MADE.text, NOW) == Identity("alice", "", "acme", MADE.public_id)
    assert keys.identify(MADE.text, NOW + 5) is None
    directory.load(Accounts())
    assert keys.identify(MADE.text, NOW) is None


def test_invalid_keys_are_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ratelimit_rls.identity.api_keys.MAX_CACHED_KEYS", 2)
    made = [new_secret("rlk") for _ in range(5)]
    directory = Directory(lambda: NOW)
    directory.load(Accounts(keys=tuple(ApiKey(one.public_id, digest(SECRET, one.text), "alice") for one in made)))
    keys = ApiKeyVerifier(directory, SECRET)
    assert all(keys.identify(one.text, NOW) for one in made)
    for _ in range(10):
        keys.identify(new_secret("rlk").text, NOW)
    assert len(keys._cache) == 2
    assert all(one.text.encode() not in known for one in made for known in keys._cache._entries)


def test_usage_of_evicted_keys_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ratelimit_rls.identity.api_keys.MAX_CACHED_KEYS", 2)
    made = [new_secret("rlk") for _ in range(5)]
    directory = Directory(lambda: NOW)
    directory.load(Accounts(keys=tuple(ApiKey(one.public_id, digest(SECRET, one.text), "alice") for one in made)))
    keys = ApiKeyVerifier(directory, SECRET)
    for number in range(20):
        for one in made:
            assert keys.identify(one.text, NOW + number)
            assert len(keys._in_use) <= 2
    assert keys.take_usage() == {one.public_id: KeyUsage(20, NOW + 19) for one in made}
