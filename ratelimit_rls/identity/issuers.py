"""Trusted issuers of JSON Web Tokens. RLS_JWT_ISSUERS names a YAML file with a list of them:

    - name: accounts                      # name in logs and metrics
      issuer: https://accounts.example.com
      audiences: [orders-api]
      algorithms: [RS256, ES256]
      jwks: {url: https://accounts.example.com/jwks.json, refresh: 5m, timeout: 5s}   # or {file: keys.json}
      claims: {user: sub, tier: plan, org: org.id}
      user_prefix: "accounts:"             # prepended to user names, if issuers or keys may use the same ones
      leeway: 30s
      require_expiry: true

For HS256, HS384 and HS512, `secret_file` replaces `jwks`. An issuer has public-key algorithms or shared secrets, never
both: otherwise a token could select an algorithm that uses a public key as a shared secret.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ratelimit_rls.core.duration import duration_parser
from ratelimit_rls.core.model import Position
from ratelimit_rls.yaml.findings import Findings
from ratelimit_rls.yaml.nodes import YamlList, YamlMap, YamlNode, excerpt
from ratelimit_rls.yaml.settings_file import read_settings_file
from ratelimit_rls.yaml.strict_mapping import StrictMapping

SHARED_SECRET_ALGORITHMS = ("HS256", "HS384", "HS512")
PUBLIC_KEY_ALGORITHMS = (
    "RS256",
    "RS384",
    "RS512",
    "PS256",
    "PS384",
    "PS512",
    "ES256",
    "ES384",
    "ES512",
    "EdDSA",
)
ALGORITHMS = SHARED_SECRET_ALGORITHMS + PUBLIC_KEY_ALGORITHMS

_SECOND_US = 1_000_000
_LEEWAY = duration_parser(0, 300 * _SECOND_US)
_REFRESH = duration_parser(_SECOND_US, 86_400 * _SECOND_US)
_TIMEOUT = duration_parser(_SECOND_US // 10, 60 * _SECOND_US)

_KEYS = (
    "name",
    "issuer",
    "audiences",
    "algorithms",
    "leeway",
    "jwks",
    "secret_file",
    "claims",
    "user_prefix",
    "require_expiry",
)


@dataclass(frozen=True, slots=True)
class KeysInFile:
    """Keys in a file, which is read again when it changes."""

    path: Path
    is_secret: bool = False  # True: the whole file is one shared secret; False: it is a JSON Web Key Set


@dataclass(frozen=True, slots=True)
class KeysAtUrl:
    url: str
    refresh_s: float = 300.0
    timeout_s: float = 5.0


@dataclass(frozen=True, slots=True)
class ClaimNames:
    """Names of the claims that identify the caller. A dot selects a member of an object; "": no claim."""

    user: str = "sub"
    tier: str = ""
    org: str = ""


@dataclass(frozen=True, slots=True)
class Issuer:
    name: str
    issuer: str  # `iss` of its tokens, compared exactly
    audiences: frozenset[str]  # `aud` of a token must contain one of them
    algorithms: frozenset[str]
    keys: KeysInFile | KeysAtUrl
    claims: ClaimNames = ClaimNames()
    user_prefix: str = ""
    leeway_s: float = 30.0
    require_expiry: bool = True


class _IssuerMapping(StrictMapping):
    """A mapping of the issuers file. A text that is present is not empty."""

    accepts_empty_text = False

    def not_a_mapping(self, keys: Sequence[str]) -> str:
        return f"this must be a mapping with the keys {', '.join(keys)}"

    def unknown_key(self, key: str, keys: Sequence[str]) -> str:
        return f"{key} is not a valid key; use {', '.join(keys)}"

    def required_texts(self, key: str, example: str) -> tuple[str, ...]:
        """Return a list with at least one text."""
        node = self.required(key, example)
        if node is not None and not (isinstance(node, YamlList) and node.items):
            message = f"{key}: {excerpt(node)} must be a list with at least one text; write '{example}'"
            self.found.error(node, message)
            return ()
        return self.texts(key)

    def require_one(self, first: str, second: str, prefix: str = "") -> bool:
        """Report it and return False if not exactly one of two keys is set."""
        if self.has(first) != self.has(second):
            return True
        if isinstance(self.node, YamlMap):
            state = "both are" if self.has(first) else "neither is"
            self.found.error(self.node, f"{prefix}exactly one of '{first}' and '{second}' must be set; {state} set")
        return False


def read_issuers(path: Path) -> tuple[Issuer, ...]:
    """Read the issuers file. Raises SettingsError with all problems and their positions."""
    return read_settings_file("RLS_JWT_ISSUERS", path, lambda root, found: _issuers(root, path.parent, found))


def _issuers(root: YamlNode | None, directory: Path, found: Findings) -> tuple[Issuer, ...]:
    if not isinstance(root, YamlList) or not root.items:
        start = root or Position(found.file, 1, 1)
        found.error(start, "this must be a list of issuers; write '- name: …' for each")
        return ()
    issuers = tuple(_issuer(_IssuerMapping(node, _KEYS, found), directory) for node in root.items)
    for field in "name", "issuer":
        seen: set[str] = set()
        for node, issuer in zip(root.items, issuers, strict=True):
            value = getattr(issuer, field)
            if value in seen:
                found.error(node, f"{field}: another issuer has {value} too; one issuer may have several audiences")
            seen |= {value} if value else set()
    return issuers


def _issuer(mapping: _IssuerMapping, directory: Path) -> Issuer:
    mapping.required("name", "name: accounts")
    mapping.required("issuer", "issuer: https://accounts.example.com")
    algorithms = _algorithms(mapping)
    return Issuer(
        name=mapping.read("name", _name, ""),
        issuer=mapping.read("issuer", str, ""),
        audiences=frozenset(mapping.required_texts("audiences", "audiences: [orders-api]")),
        algorithms=algorithms,
        keys=_keys(mapping, directory, algorithms),
        claims=_claims(mapping),
        user_prefix=mapping.read("user_prefix", _user_prefix, ""),
        leeway_s=mapping.read("leeway", _LEEWAY, 30 * _SECOND_US) / _SECOND_US,
        require_expiry=mapping.read("require_expiry", _parse_bool, True),
    )


def _algorithms(mapping: _IssuerMapping) -> frozenset[str]:
    named = mapping.required_texts("algorithms", "algorithms: [RS256]")
    node = mapping.value("algorithms") or mapping.node
    for name in named:
        if name.lower() == "none":
            mapping.found.error(node, "algorithms: none is not allowed: such tokens have no signature")
        elif name not in ALGORITHMS:
            mapping.found.error(node, f"algorithms: {name[:60]} is not supported; use {', '.join(ALGORITHMS)}")
    shared = [name for name in named if name in SHARED_SECRET_ALGORITHMS]
    public = [name for name in named if name in PUBLIC_KEY_ALGORITHMS]
    if shared and public:
        mapping.found.error(
            node,
            f"algorithms: {shared[0]} needs a shared secret and {public[0]} a public key, which must not be mixed; "
            "use one kind, or configure two issuers",
        )
    return frozenset(shared + public)


def _keys(mapping: _IssuerMapping, directory: Path, algorithms: frozenset[str]) -> KeysInFile | KeysAtUrl:
    none = KeysInFile(directory)  # placeholder after a problem, never read
    if not mapping.require_one("jwks", "secret_file"):
        return none
    is_shared = not algorithms.isdisjoint(SHARED_SECRET_ALGORITHMS)
    jwks, secret_file = mapping.value("jwks"), mapping.value("secret_file")
    if jwks is not None:
        keys = _IssuerMapping(jwks, ("file", "url", "refresh", "timeout"), mapping.found)
        return _jwks(keys, directory, is_shared) or none
    if secret_file is not None and not is_shared and algorithms:
        mapping.found.error(
            secret_file,
            f"secret_file is for {', '.join(SHARED_SECRET_ALGORITHMS)}; use 'jwks' for the other algorithms",
        )
    return KeysInFile(directory / mapping.read("secret_file", str, ""), is_secret=True)


def _jwks(jwks: _IssuerMapping, directory: Path, is_shared: bool) -> KeysInFile | KeysAtUrl | None:
    if not jwks.require_one("file", "url", "jwks: "):
        return None
    url = jwks.value("url")
    if url is None:
        for key in "refresh", "timeout":
            if (node := jwks.value(key)) is not None:
                jwks.found.error(node, f"{key} is for 'url' only; a file is read again when it changes")
        return KeysInFile(directory / jwks.read("file", str, ""))
    if is_shared:
        jwks.found.error(url, "url: shared secrets must not be published; use 'file' or 'secret_file'")
    return KeysAtUrl(
        jwks.read("url", key_url, ""),
        jwks.read("refresh", _REFRESH, 300 * _SECOND_US) / _SECOND_US,
        jwks.read("timeout", _TIMEOUT, 5 * _SECOND_US) / _SECOND_US,
    )


def key_url(text: str) -> str:
    """Return the URL if keys may be fetched from it; raises ValueError with the end of a sentence otherwise."""
    try:
        parts = urlsplit(text)
        host = parts.hostname or ""
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"is not a URL: {error}") from error
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("is not a URL: it has characters that must be percent-encoded")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must not contain a user or password, which logs might show")
    if not host or parts.scheme not in ("https", "http"):
        raise ValueError("is not a URL that begins with https://")
    if parts.scheme == "http" and not _is_loopback(host):
        raise ValueError("must begin with https://: keys sent over http:// can be replaced on the way")
    return text


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _claims(mapping: _IssuerMapping) -> ClaimNames:
    node = mapping.value("claims")
    if node is None:
        return ClaimNames()
    claims = _IssuerMapping(node, ("user", "tier", "org"), mapping.found)
    return ClaimNames(
        claims.read("user", _claim, "sub"), claims.read("tier", _claim, ""), claims.read("org", _claim, "")
    )


def _claim(text: str) -> str:
    if not all(text.split(".")):
        raise ValueError("is not a claim name; use e.g. plan, or account.plan for a member of an object")
    return text


def _name(text: str) -> str:
    if len(text) > 64 or not text.isprintable():
        raise ValueError("must have at most 64 printable characters")
    return text


def _user_prefix(text: str) -> str:
    if text.startswith(" "):
        raise ValueError("must not begin with a space, since user names cannot")
    return _name(text)


def _parse_bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("must be true or false")
    return text == "true"
