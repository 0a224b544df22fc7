"""The file of issuers: what it says, and everything that is refused in it before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratelimit_rls.errors import SettingsError
from ratelimit_rls.identity.issuers import ClaimNames, Issuer, KeysAtUrl, KeysInFile, key_url, read_issuers

USUAL = {
    "name": "accounts",
    "issuer": "https://accounts.example.com",
    "audiences": "[api]",
    "algorithms": "[RS256]",
    "jwks": "{file: keys.json}",
}


def written(tmp_path: Path, **changed: str | None) -> Path:
    """One issuer, a line for each key; None takes a line away."""
    fields = {key: value for key, value in {**USUAL, **changed}.items() if value is not None}
    path = tmp_path / "issuers.yaml"
    path.write_text("-\n" + "".join(f"  {key}: {value}\n" for key, value in fields.items()))
    return path


def test_what_is_left_out_has_a_default(tmp_path: Path) -> None:
    (issuer,) = read_issuers(written(tmp_path))

    assert issuer == Issuer(
        "accounts",
        "https://accounts.example.com",
        frozenset({"api"}),
        frozenset({"RS256"}),
        KeysInFile(tmp_path / "keys.json"),
        ClaimNames("sub", "", ""),
        "",
        30.0,
        True,
    )


def test_all_can_be_said(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        jwks="{url: 'https://accounts.example.com/jwks', refresh: 1m, timeout: 500ms}",
        claims="{user: account.id, tier: 'https://example.com/plan', org: org_id}",
        user_prefix='"accounts:"',
        leeway="0",
        require_expiry="false",
    )

    (issuer,) = read_issuers(path)

    assert issuer.keys == KeysAtUrl("https://accounts.example.com/jwks", 60.0, 0.5)
    assert issuer.claims == ClaimNames("account.id", "https://example.com/plan", "org_id")
    assert (issuer.user_prefix, issuer.leeway_s, issuer.require_expiry) == ("accounts:", 0.0, False)


def test_a_shared_secret_is_in_a_file(tmp_path: Path) -> None:
    (issuer,) = read_issuers(written(tmp_path, algorithms="[HS256]", jwks=None, secret_file="/run/secrets/hs"))

    assert issuer.keys == KeysInFile(Path("/run/secrets/hs"), is_secret=True)


@pytest.mark.parametrize(
    ("changed", "place", "message"),
    [
        ({"name": None}, "2:3", "'name' is missing"),
        ({"name": "x" * 65}, "2:9", "not a name"),
        ({"issuer": None}, "2:3", "'issuer' is missing"),
        ({"issuer": "[a]"}, "3:11", "issuer: a list is not text"),
        ({"audiences": None}, "2:3", "'audiences' is missing"),
        ({"audiences": "api"}, "4:14", "not a list with something in it"),
        ({"audiences": "[]"}, "4:14", "not a list with something in it"),
        ({"audiences": "['']"}, "4:15", "audiences: nothing is not text"),
        ({"algorithms": None}, "2:3", "'algorithms' is missing"),
        ({"algorithms": "[none]"}, "5:15", "none is no algorithm"),
        ({"algorithms": "[RS256, None]"}, "5:15", "none is no algorithm"),
        ({"algorithms": "[RS257]"}, "5:15", "RS257 is not known; there are HS256, HS384"),
        ({"algorithms": "[ES256K]"}, "5:15", "ES256K is not known"),
        ({"algorithms": "[HS256, RS256]"}, "5:15", "HS256 needs a shared secret and RS256 a public key"),
        ({"jwks": None}, "2:3", "one of 'jwks' and 'secret_file', and there are neither"),
        ({"secret_file": "x"}, "2:3", "one of 'jwks' and 'secret_file', and there are both"),
        ({"jwks": None, "secret_file": "x"}, "6:16", "secret_file is for HS256"),
        ({"jwks": "keys.json"}, "6:9", "not a mapping; its keys are file, url"),
        ({"jwks": "{}"}, "6:9", "one of 'file' and 'url', and there are neither"),
        ({"jwks": "{file: a, url: https://b}"}, "6:9", "one of 'file' and 'url', and there are both"),
        ({"jwks": "{file: a, refresh: 5m}"}, "6:28", "refresh is for a url"),
        ({"jwks": "{url: http://accounts.example.com}"}, "6:15", "must begin with https://"),
        ({"jwks": "{url: file:///etc/passwd}"}, "6:15", "not a URL that begins with https://"),
        ({"jwks": "{url: https://}"}, "6:15", "not a URL that begins with https://"),
        ({"jwks": "{url: https://u:p@host}"}, "6:15", "has a password in it"),
        ({"jwks": "{url: https://a, refresh: 10ms}"}, "6:35", "is not between 1s and 24h"),
        ({"jwks": "{url: https://a, timeout: soon}"}, "6:35", "is not a duration"),
        ({"algorithms": "[HS256]", "jwks": "{url: https://a}"}, "6:15", "shared secrets are not to be had"),
        ({"leeway": "1h"}, "7:11", "is not between 0s and 5m"),
        ({"claims": "{user: a..b}"}, "7:18", "not the name of a claim"),
        ({"claims": "{name: a}"}, "7:12", "name is not known here; the keys are user, tier, org"),
        ({"require_expiry": "maybe"}, "7:19", "not true or false"),
        ({"kyes": "x"}, "7:3", "kyes is not known here; the keys are name, issuer"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(
    tmp_path: Path, changed: dict[str, str | None], place: str, message: str
) -> None:
    path = written(tmp_path, **changed)

    with pytest.raises(SettingsError) as refused:
        read_issuers(path)

    head, *problems = str(refused.value).splitlines()
    assert head == "RLS_JWT_ISSUERS:"
    assert any(one.startswith(f"{path}:{place}: error: ") and message in one for one in problems), problems


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    path = written(tmp_path, name=None, algorithms="[none]", leeway="never")

    with pytest.raises(SettingsError) as refused:
        read_issuers(path)

    assert len(str(refused.value).splitlines()) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a list of issuers"),
        ("name: accounts", "not a list of issuers"),
        ("[]", "not a list of issuers"),
        ("- [", "this is not YAML"),
        ("- just text", "not a mapping"),
        ("[" * 1_000, "this is not YAML"),
        ("- name: a\n  name: b", "'name' is written twice"),
        ("- !!python/object/apply:os.system [true]", "not a mapping"),
        ("#" * (2**20 + 1), "larger than 1 MiB"),
    ],
)
def test_what_is_no_list_of_issuers_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "issuers.yaml"
    path.write_text(text)

    with pytest.raises(SettingsError, match=message):
        read_issuers(path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "issuers.yaml"
    path.write_bytes(b"- name: \xff")

    with pytest.raises(SettingsError, match="this is not YAML"):
        read_issuers(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"RLS_JWT_ISSUERS: .*missing.yaml cannot be read: No such file"):
        read_issuers(tmp_path / "missing.yaml")


def test_one_issuer_is_written_once(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_text(path.read_text() * 2)

    with pytest.raises(SettingsError) as refused:
        read_issuers(path)

    told = str(refused.value)
    assert "8:3: error: name: another issuer has accounts, too" in told
    assert "8:3: error: issuer: another issuer has https://accounts.example.com, too" in told


@pytest.mark.parametrize("url", ["http://localhost:8/k", "http://127.0.0.1/k", "http://[::1]:80/k", "https://h/k?x=1"])
def test_keys_may_be_fetched_safely_or_from_the_machine_itself(url: str) -> None:
    assert key_url(url) == url


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1.example.com",
        "http://localhost.example.com",
        "https://a b",
        "https://ä",
        "https://h:x",
        "ftp://h",
    ],
)
def test_keys_may_not_be_fetched_from_elsewhere(url: str) -> None:
    with pytest.raises(ValueError, match=r"URL|https"):
        key_url(url)
