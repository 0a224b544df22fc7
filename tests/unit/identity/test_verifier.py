"""Callers by any credential, and the count of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ratelimit_rls.core.accounts import Accounts, ApiKey, Block, Changed, User
from ratelimit_rls.core.identity import CredentialKind, Identity, Verifier
from ratelimit_rls.identity.api_keys import ApiKeys
from ratelimit_rls.identity.directory import Directory
from ratelimit_rls.identity.jwt import Tokens
from ratelimit_rls.identity.secrets import digest, new_secret
from ratelimit_rls.identity.verifier import Callers
from tests.unit.identity.minted import NOW, issuer, mint

SECRET = b"0123456789abcdef"
MADE = new_secret("rlk")


def test_each_kind_is_asked_of_its_own_and_counted(tmp_path: Path) -> None:
    directory = Directory()
    directory.load(Accounts(keys=(ApiKey(MADE.public_id, digest(SECRET, MADE.text), "bob"),)))
    callers: Verifier = Callers(ApiKeys(directory, SECRET), Tokens([issuer(tmp_path)]), directory)
    token = mint()

    assert callers.identify(CredentialKind.API_KEY, MADE.text, NOW) == Identity("bob", api_key=MADE.public_id)
    assert callers.identify(CredentialKind.JWT, token, NOW) == Identity("alice")
    assert callers.identify(CredentialKind.JWT, MADE.text, NOW) is None
    assert callers.identify(CredentialKind.API_KEY, token, NOW) is None
    assert callers.identify(CredentialKind.API_KEY, "", NOW) is None

    assert isinstance(callers, Callers)
    assert callers.counts() == {
        ("api_key", "valid"): 1,
        ("api_key", "invalid"): 2,
        ("jwt", "valid"): 1,
        ("jwt", "invalid"): 1,
    }
    assert {reason: count for reason, count in callers.refused_tokens().items() if count} == {"malformed": 1}
    assert callers.token_keys() == {"one": 1}


def test_a_block_is_one_until_it_ends() -> None:
    directory = Directory()
    users = (User("ann", block=Block("spam", NOW + 5)), User("bob", block=Block()), User("carol"))
    directory.load(Accounts(users=users))
    callers = Callers(None, None, directory)
    blocked = {user: callers.block_of(Identity(user), NOW + 4.9) is not None for user in ("ann", "bob", "carol", "dan")}
    assert blocked == {"ann": True, "bob": True, "carol": False, "dan": False}
    assert callers.block_of(Identity("ann"), NOW + 5) is None
    assert Callers(None, None).block_of(Identity("ann"), NOW) is None


def test_a_block_comes_and_goes_with_changes_of_its_user() -> None:
    directory = Directory()
    directory.load(Accounts(users=(User("ann"), User("bob", block=Block()), User("carol", block=Block()))))
    directory.apply(Changed(2, users={"ann": User("ann", block=Block()), "bob": User("bob"), "carol": None}))
    callers = Callers(None, None, directory)
    blocked = [user for user in ("ann", "bob", "carol") if callers.block_of(Identity(user), NOW) is not None]
    assert blocked == ["ann"]


async def test_a_kind_that_nobody_is_there_for_is_invalid() -> None:
    callers = Callers(None, None)
    await callers.start()

    assert callers.identify(CredentialKind.API_KEY, MADE.text, NOW) is None
    assert callers.identify(CredentialKind.JWT, "x", NOW) is None

    assert callers.counts()["jwt", "invalid"] == 1
    assert (callers.refused_tokens(), callers.token_keys()) == ({}, {})
    await callers.close()


def test_what_the_record_says_comes_before_what_the_token_says(tmp_path: Path) -> None:
    directory = Directory()
    callers = Callers(None, Tokens([issuer(tmp_path)]), directory)
    token = mint(plan="free", org={"id": "acme"})
    assert callers.identify(CredentialKind.JWT, token, NOW) == Identity("alice", "free", "acme")

    directory.load(Accounts(users=(User("alice", "gold"),)))

    assert callers.identify(CredentialKind.JWT, token, NOW) == Identity("alice", "gold", "acme")


@pytest.mark.slow
def test_without_issuers_no_cryptography_is_imported() -> None:
    code = "import sys, ratelimit_rls.identity.verifier, ratelimit_rls.identity.issuers; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()

    assert not {"jwt", "cryptography", "sqlalchemy", "urllib.request"} & set(loaded)
