"""Decoder: messages of RateLimiter ─► Requests with descriptors of a domain.

    USER, alice, /search?q=1          ─►  [user=alice]  [user=alice, path=/search]  [path=/search]  …
    API_KEY, rlk_… (bob's, on gold)   ─►  the same for api_key=…, for user=bob, and with tier=gold before them

A request contains only those descriptors that match a rule. Others would count nothing, but under the global quota mode
they would allow every call. An API key is verified here and passed no further, and never becomes part of an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import time
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from ratelimit_rls.core.client_ip import DIRECT, canonical
from ratelimit_rls.core.credential_resolution import IP, UNAUTHORIZED, UNKNOWN_ADDRESS
from ratelimit_rls.core.entitlements import block_rejection
from ratelimit_rls.core.identity import BLOCKED_STATUS, CredentialKind, Identity, UnauthenticatedPolicy, Verifier
from ratelimit_rls.core.match import match_descriptor
from ratelimit_rls.core.model import Descriptor, Entry, Purpose, Rejection, Request
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.errors import BadRequest
from ratelimit_rls.identity import key_format
from ratelimit_rls.pipeline.message_bounds import MAX_LIMITER_FIELDS
from ratelimit_rls.protos.scan import MIN_FIELD_BYTES, MessageScan, decode_error
from ratelimit_rls.rules.targeting import GLOBAL_ENTRY

USER, ADDRESS, API_KEY = "user", IP, "api_key"
PATH, TIER = "path", "tier"

DIMENSIONS = {1: USER, 2: ADDRESS, 3: API_KEY}
"""Keys of descriptor entries, by the number of the dimension in rate_limiter.proto."""

_SECRET_PREFIXES = ("rlk_", "rla_")
"""Prefixes of the API keys and tokens that this service creates (identity/key_format.py)."""

_INVALID_KEY = Rejection("unauthorized", "the API key is invalid, revoked or expired", UNAUTHORIZED)

_EVERYONE = (Entry(*GLOBAL_ENTRY),)

Entries = tuple[Entry, ...]


class LimiterTarget(NamedTuple):
    """The caller and path that a message is about."""

    domain: str
    subjects: Entries  # identities of the caller, each counted separately
    path: str = ""  # empty: none
    tier: str = ""  # empty: unknown
    rejection: Rejection | None = None  # set if the caller is blocked or its API key is invalid

    def request(self, tree: Tree, cost: int) -> Request:
        """Return the request to decide. With a cost of 0 it only looks, without counting."""
        shared = (self._path, self._tier, (*self._tier, *self._path), _EVERYONE)
        return self._matching(tree, (*self._subject_entries(), *shared), cost)

    def subject_request(self, tree: Tree) -> Request:
        """Return the request without descriptors whose counters are shared with other callers."""
        return self._matching(tree, self._subject_entries(), 1)

    def _subject_entries(self) -> list[Entries]:
        """Return the entries of each descriptor, in the order of a stored rule's levels (rules/targeting.py) and in the
        order that people write."""
        path, tier = self._path, self._tier
        return [
            entries
            for subject in self.subjects
            for entries in (
                (subject,),
                (subject, *path),
                (*path, subject),
                (*tier, subject),
                (*tier, *path, subject),
            )
        ]

    @property
    def _path(self) -> Entries:
        return (Entry(PATH, self.path),) if self.path else ()

    @property
    def _tier(self) -> Entries:
        return (Entry(TIER, self.tier),) if self.tier else ()

    def _matching(self, tree: Tree, shapes: Sequence[Entries], cost: int) -> Request:
        candidates = [Descriptor(entries) for entries in dict.fromkeys(shapes) if entries]
        root = tree.domains.get(self.domain)
        matching = [] if root is None else [one for one in candidates if match_descriptor(root, one).rule is not None]
        # If no descriptor matches a rule, keep the first, so that the call is counted as one without a rule.
        return Request(self.domain, tuple(matching or candidates[:1]), cost, Purpose.DECIDE if cost else Purpose.LOOK)


class LimiterDecoder:
    """Turns messages of RateLimiter into targets."""

    def __init__(
        self, default_domain: str = "", verifier: Verifier | None = None, clock: Callable[[], float] = time
    ) -> None:
        """`default_domain` is used for messages without a domain. The clock is in seconds since the epoch."""
        self._default_domain = default_domain
        self._verifier = verifier
        self._clock = clock

    def target(self, message: Any, tree: Tree) -> LimiterTarget:
        """Return the target of a message. Raises BadRequest if a field is missing or invalid."""
        domain = message.domain or self._default_domain
        if not domain:
            raise BadRequest("no domain: set it in the request, or set a default with RLS_LIMITER_DOMAIN")
        dimension = DIMENSIONS.get(message.dimension)
        if dimension is None:
            raise BadRequest("no dimension: it must be USER, IP or API_KEY")
        if not message.identifier:
            raise BadRequest("no identifier: it must be a user, an IP address or an API key")
        path = message.endpoint.partition("?")[0]
        identifier = message.identifier
        if dimension == API_KEY and self._is_key(identifier):
            return self._target_of_key(domain, identifier, path, tree)
        if identifier.startswith(_SECRET_PREFIXES) or key_format.contains_secret(identifier):
            raise BadRequest("the identifier is an API key or a token: use the dimension API_KEY")
        if dimension == ADDRESS:
            identifier = _address(identifier, domain, tree)
        return LimiterTarget(domain, (Entry(dimension, identifier),), path)

    def _is_key(self, identifier: str) -> bool:
        """Return whether the identifier is a secret key.

        With a verifier, everything but a public id counts as a key: otherwise any string would be a valid caller.
        """
        return identifier.startswith(_SECRET_PREFIXES) or (
            self._verifier is not None and not key_format.is_public_id(identifier)
        )

    def _target_of_key(self, domain: str, key: str, path: str, tree: Tree) -> LimiterTarget:
        if self._verifier is None:
            raise BadRequest(
                "the identifier is an API key, and this service has no database to verify it: set RLS_DATABASE_URL"
            )
        now_s = self._clock()
        identity = self._verifier.identify(CredentialKind.API_KEY, key, now_s)
        config = tree.identities.get(domain)
        if identity is not None:
            block = self._verifier.block_of(identity, now_s)
            status = config.blocked_status if config is not None else BLOCKED_STATUS
            rejection = None if block is None else block_rejection(block, status)
            return LimiterTarget(domain, _subjects(identity), path, identity.tier, rejection)
        # The address is unknown here, so all such callers share one counter: an invalid key must not evade limits.
        is_allowed = config is not None and config.on_invalid is UnauthenticatedPolicy.IP
        return LimiterTarget(
            domain, (Entry(ADDRESS, UNKNOWN_ADDRESS),), path, rejection=None if is_allowed else _INVALID_KEY
        )


def parse(kind: Any, message: bytes, scan: MessageScan | None = None) -> Any:
    """Parse bytes as a message of class `kind`, after checking the bounds of `scan`. Raises BadRequest."""
    if scan is not None and len(message) > MIN_FIELD_BYTES * MAX_LIMITER_FIELDS:
        scan.check(message)
    try:
        return kind.FromString(message)
    except DecodeError:
        raise decode_error(kind.DESCRIPTOR.full_name) from None


def _subjects(identity: Identity) -> Entries:
    identifiers = ((API_KEY, identity.api_key), (USER, identity.user), ("org", identity.org))
    return tuple([Entry(key, value) for key, value in identifiers if value])


def _address(text: str, domain: str, tree: Tree) -> str:
    """Return the canonical spelling of an address, cut to the domain's IPv6 prefix. Raises BadRequest."""
    mapping = tree.mappings.get(domain)
    address = canonical(text, (mapping.client_ip if mapping is not None else DIRECT).ipv6_prefix)
    if address is None:
        raise BadRequest("the identifier must be an IP address, e.g. 192.0.2.1 or 2001:db8::1")
    return address
