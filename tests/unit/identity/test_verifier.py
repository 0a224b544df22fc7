"""The credential verifier and its counters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ratelimit_rls.core.entitlements import Block
from ratelimit_rls.core.identity import CredentialKind, Identity, Verifier
from ratelimit_rls.identity.accounts import AccountChanges, Accounts, ApiKey, User
from ratelimit_rls.identity.api_keys import ApiKeyVerifier
from ratelimit_rls.identity.directory import Directory
from ratelimit_rls.identity.jwt import JwtVerifier
from ratelimit_rls.identity.key_format import digest, new_secret
from ratelimit_rls.identity.verifier import CredentialVerifier
from tests.support.jwt_factory import NOW, issuer, mint

SECRET = b"0123456789abcdef"
MADE = new_secret("rlk")


def test_each_kind_is_verified_and_counted(tmp_path: Path) -> None:
    directory = Directory()
    directory.load(Accounts(keys=(ApiKey(MADE.public_id, digest(SECRET, MADE.text), "bob"),)))
    verifier: Verifier = CredentialVerifier(
        ApiKeyVerifier(directory, SECRET), JwtVerifier([issuer(tmp_path)]), directory
    )
    token = mint()

    assert verifier.identify(CredentialKind.API_KEY, MADE.text, NOW) == Identity("bob", api_key=MADE.public_id)
    assert verifier.identify(CredentialKind.JWT, token, NOW) == Identity("alice")
    assert verifier.identify(CredentialKind.JWT, MADE.text, NOW) is None
    assert verifier.identify(CredentialKind.API_KEY, token, NOW) is None
    assert verifier.identify(CredentialKind.API_KEY, "", NOW) is None

    assert isinstance(verifier, CredentialVerifier)
    assert verifier.counts() == {
        ("api_key", "valid"): 1,
        ("api_key", "invalid"): 2,
        ("jwt", "valid"): 1,
        ("jwt", "invalid"): 1,
    }
    assert {reason: count for reason, count in verifier.rejected_tokens().items() if count} == {"malformed": 1}
    assert verifier.token_keys() == {"one": 1}


def test_block_applies_until_it_ends() -> None:
    directory = Directory()
    users = (User("ann", block=Block("spam", NOW + 5)), User("bob", block=Block()), User("carol"))
    directory.load(Accounts(users=users))
    verifier = CredentialVerifier(None, None, directory)
    blocked = {
        user: verifier.block_of(Identity(user), NOW + 4.9) is not None for user in ("ann", "bob", "carol", "dan")
    }
    assert blocked == {"ann": True, "bob": True, "carol": False, "dan": False}
    assert verifier.block_of(Identity("ann"), NOW + 5) is None
    assert CredentialVerifier(None, None).block_of(Identity("ann"), NOW) is None


def test_block_follows_changes_of_its_user() -> None:
    directory = Directory()
    directory.load(Accounts(users=(User("ann"), User("bob", block=Block()), User("carol", block=Block()))))
    directory.apply(AccountChanges(2, users={"ann": User("ann", block=Block()), "bob": User("bob"), "carol": None}))
    verifier = CredentialVerifier(None, None, directory)
    blocked = [user for user in ("ann", "bob", "carol") if verifier.block_of(Identity(user), NOW) is not None]
    assert blocked == ["ann"]


async def test_kind_without_verifier_is_invalid() -> None:
    verifier = CredentialVerifier(None, None)
    await verifier.start()

    assert verifier.identify(CredentialKind.API_KEY, MADE.text, NOW) is None
    assert verifier.identify(CredentialKind.JWT, "x", NOW) is None

    assert verifier.counts()["jwt", "invalid"] == 1
    assert (verifier.rejected_tokens(), verifier.token_keys()) == ({}, {})
    await verifier.close()


def test_account_takes_precedence_over_token(tmp_path: Path) -> None:
    directory = Directory()
    verifier = CredentialVerifier(None, JwtVerifier([issuer(tmp_path)]), directory)
    token = mint(plan="free", org={"id": "acme"})
    assert verifier.identify(CredentialKind.JWT, token, NOW) == Identity("alice", "free", "acme")

    directory.load(Accounts(users=(User("alice", "gold"),)))

    assert verifier.identify(CredentialKind.JWT, token, NOW) == Identity("alice", "gold", "acme")


@pytest.mark.slow
def test_cryptography_is_not_imported_without_issuers() -> None:
    code = "import sys, ratelimit_rls.identity.verifier, ratelimit_rls.identity.issuers; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()

    assert not {"jwt", "cryptography", "sqlalchemy", "urllib.request"} & set(loaded)
