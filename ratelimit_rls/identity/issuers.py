"""The issuers whose JSON Web Tokens are believed, as RLS_JWT_ISSUERS names them: a YAML file with a list of these.

    - name: accounts                      # what logs and metrics call it
      issuer: https://accounts.example.com
      audiences: [orders-api]
      algorithms: [RS256, ES256]
      jwks: {url: https://accounts.example.com/jwks.json, refresh: 5m, timeout: 5s}   # or {file: keys.json}
      claims: {user: sub, tier: plan, org: org.id}
      user_prefix: "accounts:"             # before every user's name, where issuers or keys may name others alike
      leeway: 30s
      require_expiry: true

For HS256 and its like there is `secret_file` in place of `jwks`. An issuer has public-key algorithms or shared secrets,
never both: whoever may choose between them can take a public key for a secret.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from ratelimit_rls.core.span import span_within
from ratelimit_rls.errors import SettingsError
from ratelimit_rls.identity.written import MOST_BYTES, Mapping, Problems, compose

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
_LEEWAY = span_within(0, 300 * _SECOND_US)
_REFRESH = span_within(_SECOND_US, 86_400 * _SECOND_US)
_TIMEOUT = span_within(_SECOND_US // 10, 60 * _SECOND_US)

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
    """Read again when it changes."""

    path: Path
    is_secret: bool = False  # the whole file is one shared secret; otherwise it is a JSON Web Key Set


@dataclass(frozen=True, slots=True)
class KeysAtUrl:
    url: str
    refresh_s: float = 300.0
    timeout_s: float = 5.0


@dataclass(frozen=True, slots=True)
class ClaimNames:
    """Which claims say who is calling. A dot leads into an object; "": nothing says it."""

    user: str = "sub"
    tier: str = ""
    org: str = ""


@dataclass(frozen=True, slots=True)
class Issuer:
    name: str
    issuer: str  # exactly as tokens write it
    audiences: frozenset[str]  # a token must be for one of them
    algorithms: frozenset[str]
    keys: KeysInFile | KeysAtUrl
    claims: ClaimNames = ClaimNames()
    user_prefix: str = ""
    leeway_s: float = 30.0
    require_expiry: bool = True


def read_issuers(path: Path) -> tuple[Issuer, ...]:
    """All of them; raises SettingsError with everything that is wrong, each with its place."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"RLS_JWT_ISSUERS: {path} cannot be read: {error.strerror}") from error
    problems = Problems(str(path))
    issuers = _issuers(compose(content, problems), path.parent, problems)
    if problems.found:
        raise SettingsError("RLS_JWT_ISSUERS:\n" + "\n".join(str(problem) for problem in sorted(problems.found)))
    return issuers


def _issuers(root: yaml.Node | None, directory: Path, problems: Problems) -> tuple[Issuer, ...]:
    if root is None and problems.found:
        return ()
    if not isinstance(root, yaml.SequenceNode) or not root.value:
        problems.add(root, "this is not a list of issuers; write '- name: …' for each")
        return ()
    issuers = tuple(_issuer(Mapping(node, _KEYS, problems), directory, problems) for node in root.value)
    for field in "name", "issuer":
        seen: set[str] = set()
        for node, issuer in zip(root.value, issuers, strict=True):
            value = getattr(issuer, field)
            if value in seen:
                problems.add(node, f"{field}: another issuer has {value}, too; one issuer may have several audiences")
            seen |= {value} if value else set()
    return issuers


def _issuer(written: Mapping, directory: Path, problems: Problems) -> Issuer:
    written.required("name", "name: accounts")
    written.required("issuer", "issuer: https://accounts.example.com")
    algorithms = _algorithms(written, problems)
    return Issuer(
        name=written.read("name", _name, ""),
        issuer=written.text("issuer"),
        audiences=frozenset(written.texts("audiences", "audiences: [orders-api]")),
        algorithms=algorithms,
        keys=_keys(written, directory, algorithms, problems),
        claims=_claims(written, problems),
        user_prefix=written.read("user_prefix", _name, ""),
        leeway_s=written.read("leeway", _LEEWAY, 30 * _SECOND_US) / _SECOND_US,
        require_expiry=written.read("require_expiry", _truth, True),
    )


def _algorithms(written: Mapping, problems: Problems) -> frozenset[str]:
    named = written.texts("algorithms", "algorithms: [RS256]")
    node = written.value("algorithms")
    for name in named:
        if name.lower() == "none":
            problems.add(node, "algorithms: none is no algorithm: anybody can make such a token")
        elif name not in ALGORITHMS:
            problems.add(node, f"algorithms: {name[:60]} is not known; there are {', '.join(ALGORITHMS)}")
    shared = [name for name in named if name in SHARED_SECRET_ALGORITHMS]
    public = [name for name in named if name in PUBLIC_KEY_ALGORITHMS]
    if shared and public:
        problems.add(
            node,
            f"algorithms: {shared[0]} needs a shared secret and {public[0]} a public key, which could then be taken "
            "for one another; name one kind, or make two issuers of them",
        )
    return frozenset(shared + public)


def _keys(written: Mapping, directory: Path, algorithms: frozenset[str], problems: Problems) -> KeysInFile | KeysAtUrl:
    jwks, secret_file = written.value("jwks"), written.value("secret_file")
    none = KeysInFile(directory)  # after a problem, never read
    if (jwks is None) == (secret_file is None):
        if isinstance(written.node, yaml.MappingNode):
            count = "neither" if jwks is None else "both"
            problems.add(written.node, f"there must be one of 'jwks' and 'secret_file', and there are {count}")
        return none
    is_shared = not algorithms.isdisjoint(SHARED_SECRET_ALGORITHMS)
    if jwks is None:
        if not is_shared and algorithms:
            problems.add(secret_file, f"secret_file is for {', '.join(SHARED_SECRET_ALGORITHMS)}; here, write 'jwks'")
        return KeysInFile(directory / written.text("secret_file"), is_secret=True)
    return _jwks(Mapping(jwks, ("file", "url", "refresh", "timeout"), problems), directory, is_shared, problems) or none


def _jwks(jwks: Mapping, directory: Path, is_shared: bool, problems: Problems) -> KeysInFile | KeysAtUrl | None:
    file, url = jwks.value("file"), jwks.value("url")
    if (file is None) == (url is None):
        if isinstance(jwks.node, yaml.MappingNode):
            count = "neither" if file is None else "both"
            problems.add(jwks.node, f"jwks: there must be one of 'file' and 'url', and there are {count}")
        return None
    if url is None:
        for key in "refresh", "timeout":
            if (node := jwks.value(key)) is not None:
                problems.add(node, f"{key} is for a url; a file is read again when it changes")
        return KeysInFile(directory / jwks.text("file"))
    if is_shared:
        problems.add(url, "url: shared secrets are not to be had by whoever asks; write 'file' or 'secret_file'")
    return KeysAtUrl(
        jwks.read("url", key_url, ""),
        jwks.read("refresh", _REFRESH, 300 * _SECOND_US) / _SECOND_US,
        jwks.read("timeout", _TIMEOUT, 5 * _SECOND_US) / _SECOND_US,
    )


def key_url(text: str) -> str:
    """The same, if keys may be fetched from there; raises ValueError with the end of a sentence."""
    try:
        parts = urlsplit(text)
        host = parts.hostname or ""
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"is not a URL: {error}") from error
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("is not a URL: it has characters that must be escaped")
    if parts.username is not None or parts.password is not None:
        raise ValueError("has a password in it, which logs might show")
    if not host or parts.scheme not in ("https", "http"):
        raise ValueError("is not a URL that begins with https://")
    if parts.scheme == "http" and not _is_loopback(host):
        raise ValueError("must begin with https://: over http:// anybody on the way could send keys of their own")
    return text


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _claims(written: Mapping, problems: Problems) -> ClaimNames:
    node = written.value("claims")
    if node is None:
        return ClaimNames()
    claims = Mapping(node, ("user", "tier", "org"), problems)
    return ClaimNames(
        claims.read("user", _claim, "sub"), claims.read("tier", _claim, ""), claims.read("org", _claim, "")
    )


def _claim(text: str) -> str:
    if not all(text.split(".")):
        raise ValueError("is not the name of a claim; write e.g. plan, or account.plan for one within an object")
    return text


def _name(text: str) -> str:
    if len(text) > 64 or not text.isprintable():
        raise ValueError("is not a name of at most 64 printable characters")
    return text


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("is not true or false")
    return text == "true"
