"""The issuers file: its content, and errors that prevent the start."""

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


def write_issuers(tmp_path: Path, **changed: str | None) -> Path:
    """Write one issuer with a line for each key; None removes the line."""
    fields = {key: value for key, value in {**USUAL, **changed}.items() if value is not None}
    path = tmp_path / "issuers.yaml"
    path.write_text("-\n" + "".join(f"  {key}: {value}\n" for key, value in fields.items()))
    return path


def test_defaults(tmp_path: Path) -> None:
    (issuer,) = read_issuers(write_issuers(tmp_path))

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


def test_all_keys(tmp_path: Path) -> None:
    path = write_issuers(
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


def test_secret_file(tmp_path: Path) -> None:
    (issuer,) = read_issuers(write_issuers(tmp_path, algorithms="[HS256]", jwks=None, secret_file="/run/secrets/hs"))

    assert issuer.keys == KeysInFile(Path("/run/secrets/hs"), is_secret=True)


@pytest.mark.parametrize(
    ("changed", "place", "message"),
    [
        ({"name": None}, "2:3", "'name' is missing"),
        ({"name": "x" * 65}, "2:9", "must have at most 64 printable characters"),
        ({"issuer": None}, "2:3", "'issuer' is missing"),
        ({"issuer": "[a]"}, "3:11", "issuer: a list is not text"),
        ({"audiences": None}, "2:3", "'audiences' is missing"),
        ({"audiences": "api"}, "4:14", "must be a list with at least one text"),
        ({"audiences": "[]"}, "4:14", "must be a list with at least one text"),
        ({"audiences": "['']"}, "4:15", "audiences: nothing is not text"),
        ({"algorithms": None}, "2:3", "'algorithms' is missing"),
        ({"algorithms": "[none]"}, "5:15", "none is not allowed"),
        ({"algorithms": "[RS256, None]"}, "5:15", "none is not allowed"),
        ({"algorithms": "[RS257]"}, "5:15", "RS257 is not supported; use HS256, HS384"),
        ({"algorithms": "[ES256K]"}, "5:15", "ES256K is not supported"),
        ({"algorithms": "[HS256, RS256]"}, "5:15", "HS256 needs a shared secret and RS256 a public key"),
        ({"jwks": None}, "2:3", "one of 'jwks' and 'secret_file' must be set; neither is set"),
        ({"secret_file": "x"}, "2:3", "one of 'jwks' and 'secret_file' must be set; both are set"),
        ({"jwks": None, "secret_file": "x"}, "6:16", "secret_file is for HS256"),
        ({"jwks": "keys.json"}, "6:9", "this must be a mapping with the keys file, url"),
        ({"jwks": "{}"}, "6:9", "one of 'file' and 'url' must be set; neither is set"),
        ({"jwks": "{file: a, url: https://b}"}, "6:9", "one of 'file' and 'url' must be set; both are set"),
        ({"jwks": "{file: a, refresh: 5m}"}, "6:28", "refresh is for 'url' only"),
        ({"jwks": "{url: http://accounts.example.com}"}, "6:15", "must begin with https://"),
        ({"jwks": "{url: file:///etc/passwd}"}, "6:15", "not a URL that begins with https://"),
        ({"jwks": "{url: https://}"}, "6:15", "not a URL that begins with https://"),
        ({"jwks": "{url: https://u:p@host}"}, "6:15", "must not contain a user or password"),
        ({"jwks": "{url: https://a, refresh: 10ms}"}, "6:35", "is not between 1s and 24h"),
        ({"jwks": "{url: https://a, timeout: soon}"}, "6:35", "is not a duration"),
        ({"algorithms": "[HS256]", "jwks": "{url: https://a}"}, "6:15", "shared secrets must not be published"),
        ({"user_prefix": '" accounts:"'}, "7:16", "must not begin with a space"),
        ({"leeway": "1h"}, "7:11", "is not between 0s and 5m"),
        ({"claims": "{user: a..b}"}, "7:18", "not a claim name"),
        ({"claims": "{name: a}"}, "7:12", "name is not a valid key; use user, tier, org"),
        ({"require_expiry": "maybe"}, "7:19", "must be true or false"),
        ({"kyes": "x"}, "7:3", "kyes is not a valid key; use name, issuer"),
    ],
)
def test_invalid_value_is_reported_with_position(
    tmp_path: Path, changed: dict[str, str | None], place: str, message: str
) -> None:
    path = write_issuers(tmp_path, **changed)

    with pytest.raises(SettingsError) as raised:
        read_issuers(path)

    head, *problems = str(raised.value).splitlines()
    assert head == "RLS_JWT_ISSUERS:"
    assert any(one.startswith(f"{path}:{place}: error: ") and message in one for one in problems), problems


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    path = write_issuers(tmp_path, name=None, algorithms="[none]", leeway="never")

    with pytest.raises(SettingsError) as raised:
        read_issuers(path)

    assert len(str(raised.value).splitlines()) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a list of issuers"),
        ("name: accounts", "must be a list of issuers"),
        ("[]", "must be a list of issuers"),
        ("- [", "this is not YAML"),
        ("- just text", "must be a mapping"),
        ("[" * 1_000, "this is not YAML"),
        ("- name: a\n  name: b", ":2:3: error: 'name' is written twice"),
        ("- !!python/object/apply:os.system [true]", "this is not YAML: tag .* has no meaning here"),
        ("#" * (2**20 + 1), "larger than 1 MiB"),
    ],
)
def test_file_must_be_a_list_of_issuers(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "issuers.yaml"
    path.write_text(text)

    with pytest.raises(SettingsError, match=message):
        read_issuers(path)


def test_file_must_be_utf8(tmp_path: Path) -> None:
    path = tmp_path / "issuers.yaml"
    path.write_bytes(b"- name: \xff")

    with pytest.raises(SettingsError, match="this is not YAML"):
        read_issuers(path)


def test_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"RLS_JWT_ISSUERS: .*missing.yaml cannot be read: No such file"):
        read_issuers(tmp_path / "missing.yaml")


def test_duplicate_issuers_are_rejected(tmp_path: Path) -> None:
    path = write_issuers(tmp_path)
    path.write_text(path.read_text() * 2)

    with pytest.raises(SettingsError) as raised:
        read_issuers(path)

    message = str(raised.value)
    assert "8:3: error: name: another issuer has accounts too" in message
    assert "8:3: error: issuer: another issuer has https://accounts.example.com too" in message


@pytest.mark.parametrize("url", ["http://localhost:8/k", "http://127.0.0.1/k", "http://[::1]:80/k", "https://h/k?x=1"])
def test_https_and_loopback_key_urls_are_allowed(url: str) -> None:
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
def test_other_key_urls_are_rejected(url: str) -> None:
    with pytest.raises(ValueError, match=r"URL|https"):
        key_url(url)
