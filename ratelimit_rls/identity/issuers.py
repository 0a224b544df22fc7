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
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from ratelimit_rls.core.duration import duration_parser
from ratelimit_rls.errors import SettingsError
from ratelimit_rls.identity.yaml_mapping import MAX_BYTES, ProblemCollector, YamlMapping, compose

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


def read_issuers(path: Path) -> tuple[Issuer, ...]:
    """Read the issuers file. Raises SettingsError with all problems and their positions."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"RLS_JWT_ISSUERS: {path} cannot be read: {error.strerror}") from error
    problems = ProblemCollector(str(path))
    issuers = _issuers(compose(content, problems), path.parent, problems)
    if problems.found:
        raise SettingsError("RLS_JWT_ISSUERS:\n" + "\n".join(str(problem) for problem in sorted(problems.found)))
    return issuers


def _issuers(root: yaml.Node | None, directory: Path, problems: ProblemCollector) -> tuple[Issuer, ...]:
    if root is None and problems.found:
        return ()
    if not isinstance(root, yaml.SequenceNode) or not root.value:
        problems.add(root, "this must be a list of issuers; write '- name: …' for each")
        return ()
    issuers = tuple(_issuer(YamlMapping(node, _KEYS, problems), directory, problems) for node in root.value)
    for field in "name", "issuer":
        seen: set[str] = set()
        for node, issuer in zip(root.value, issuers, strict=True):
            value = getattr(issuer, field)
            if value in seen:
                problems.add(node, f"{field}: another issuer has {value} too; one issuer may have several audiences")
            seen |= {value} if value else set()
    return issuers


def _issuer(mapping: YamlMapping, directory: Path, problems: ProblemCollector) -> Issuer:
    mapping.required("name", "name: accounts")
    mapping.required("issuer", "issuer: https://accounts.example.com")
    algorithms = _algorithms(mapping, problems)
    return Issuer(
        name=mapping.read("name", _name, ""),
        issuer=mapping.text("issuer"),
        audiences=frozenset(mapping.texts("audiences", "audiences: [orders-api]")),
        algorithms=algorithms,
        keys=_keys(mapping, directory, algorithms, problems),
        claims=_claims(mapping, problems),
        user_prefix=mapping.read("user_prefix", _user_prefix, ""),
        leeway_s=mapping.read("leeway", _LEEWAY, 30 * _SECOND_US) / _SECOND_US,
        require_expiry=mapping.read("require_expiry", _parse_bool, True),
    )


def _algorithms(mapping: YamlMapping, problems: ProblemCollector) -> frozenset[str]:
    named = mapping.texts("algorithms", "algorithms: [RS256]")
    node = mapping.value("algorithms")
    for name in named:
        if name.lower() == "none":
            problems.add(node, "algorithms: none is not allowed: such tokens have no signature")
        elif name not in ALGORITHMS:
            problems.add(node, f"algorithms: {name[:60]} is not supported; use {', '.join(ALGORITHMS)}")
    shared = [name for name in named if name in SHARED_SECRET_ALGORITHMS]
    public = [name for name in named if name in PUBLIC_KEY_ALGORITHMS]
    if shared and public:
        problems.add(
            node,
            f"algorithms: {shared[0]} needs a shared secret and {public[0]} a public key, which must not be mixed; "
            "use one kind, or configure two issuers",
        )
    return frozenset(shared + public)


def _keys(
    mapping: YamlMapping, directory: Path, algorithms: frozenset[str], problems: ProblemCollector
) -> KeysInFile | KeysAtUrl:
    jwks, secret_file = mapping.value("jwks"), mapping.value("secret_file")
    none = KeysInFile(directory)  # placeholder after a problem, never read
    if (jwks is None) == (secret_file is None):
        if isinstance(mapping.node, yaml.MappingNode):
            found = "neither is" if jwks is None else "both are"
            problems.add(mapping.node, f"exactly one of 'jwks' and 'secret_file' must be set; {found} set")
        return none
    is_shared = not algorithms.isdisjoint(SHARED_SECRET_ALGORITHMS)
    if jwks is None:
        if not is_shared and algorithms:
            problems.add(
                secret_file,
                f"secret_file is for {', '.join(SHARED_SECRET_ALGORITHMS)}; use 'jwks' for the other algorithms",
            )
        return KeysInFile(directory / mapping.text("secret_file"), is_secret=True)
    return (
        _jwks(YamlMapping(jwks, ("file", "url", "refresh", "timeout"), problems), directory, is_shared, problems)
        or none
    )


def _jwks(
    jwks: YamlMapping, directory: Path, is_shared: bool, problems: ProblemCollector
) -> KeysInFile | KeysAtUrl | None:
    file, url = jwks.value("file"), jwks.value("url")
    if (file is None) == (url is None):
        if isinstance(jwks.node, yaml.MappingNode):
            found = "neither is" if file is None else "both are"
            problems.add(jwks.node, f"jwks: exactly one of 'file' and 'url' must be set; {found} set")
        return None
    if url is None:
        for key in "refresh", "timeout":
            if (node := jwks.value(key)) is not None:
                problems.add(node, f"{key} is for 'url' only; a file is read again when it changes")
        return KeysInFile(directory / jwks.text("file"))
    if is_shared:
        problems.add(url, "url: shared secrets must not be published; use 'file' or 'secret_file'")
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


def _claims(mapping: YamlMapping, problems: ProblemCollector) -> ClaimNames:
    node = mapping.value("claims")
    if node is None:
        return ClaimNames()
    claims = YamlMapping(node, ("user", "tier", "org"), problems)
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
