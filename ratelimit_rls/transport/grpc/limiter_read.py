"""The messages of RateLimiter ─► Requests: whom they name, as descriptors of a domain.

    USER, alice, /search?q=1          ─►  [user=alice]  [user=alice, path=/search]  [path=/search]  …
    API_KEY, rlk_… (bob's, on gold)   ─►  the same of api_key=…, of user=bob, and with tier=gold before them

Of these, a request has those that the rules speak of: one that meets no rule would count nothing, but under the global
quota mode it would let everything pass. An API key is verified here and goes no further, least of all into an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import time
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from ratelimit_rls.core.client_ip import DIRECT, canonical
from ratelimit_rls.core.credentials import IP, UNAUTHORIZED, UNKNOWN_ADDRESS
from ratelimit_rls.core.identity import BLOCKED_STATUS, CredentialKind, Identity, Otherwise, Verifier
from ratelimit_rls.core.match import match_descriptor
from ratelimit_rls.core.model import Descriptor, Entry, Purpose, Refusal, Request
from ratelimit_rls.core.standing import refusal_of
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.errors import BadRequest
from ratelimit_rls.identity import secrets
from ratelimit_rls.rules.targeting import EVERYBODY

USER, ADDRESS, API_KEY = "user", IP, "api_key"
PATH, TIER = "path", "tier"

DIMENSIONS = {1: USER, 2: ADDRESS, 3: API_KEY}
"""By their numbers in rate_limiter.proto, the keys of their entries."""

_SECRETS = ("rlk_", "rla_")
"""How the keys and tokens begin that this service makes (identity/secrets.py)."""

_NOBODYS = Refusal("unauthorized", "the API key is not valid, or not any more", UNAUTHORIZED)

_FOR_ALL = (Entry(*EVERYBODY),)

Entries = tuple[Entry, ...]


class Asked(NamedTuple):
    """Whom a message asks about."""

    domain: str
    subjects: Entries  # what the caller is known by, each counted by itself
    path: str = ""  # empty: none was named
    tier: str = ""  # empty: not known
    refusal: Refusal | None = None  # whoever it is, it proves nothing

    def request(self, tree: Tree, cost: int) -> Request:
        """What is to be decided. At a cost of 0 it only looks."""
        shared = (self._path, self._tier, (*self._tier, *self._path), _FOR_ALL)
        return self._met_by(tree, (*self._own(), *shared), cost)

    def own_request(self, tree: Tree) -> Request:
        """The same without what is counted for others, too."""
        return self._met_by(tree, self._own(), 1)

    def _own(self) -> list[Entries]:
        """The longer ones in the order of a stored rule's levels (rules/targeting.py), and as people write them."""
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

    def _met_by(self, tree: Tree, shapes: Sequence[Entries], cost: int) -> Request:
        every = [Descriptor(entries) for entries in dict.fromkeys(shapes) if entries]
        root = tree.domains.get(self.domain)
        met = [] if root is None else [one for one in every if match_descriptor(root, one).rule is not None]
        # The first stands for all where the rules speak of none, so that the call is counted as one without a rule.
        return Request(self.domain, tuple(met or every[:1]), cost, Purpose.DECIDE if cost else Purpose.LOOK)


class Reader:
    def __init__(
        self, default_domain: str = "", verifier: Verifier | None = None, clock: Callable[[], float] = time
    ) -> None:
        """`default_domain` is that of messages that name none. The clock is in seconds since the epoch."""
        self._default_domain = default_domain
        self._verifier = verifier
        self._clock = clock

    def asked(self, message: Any, tree: Tree) -> Asked:
        """Raises BadRequest if that has no meaning."""
        domain = message.domain or self._default_domain
        if not domain:
            raise BadRequest("no domain: name one in the request, or a default in RLS_LIMITER_DOMAIN")
        dimension = DIMENSIONS.get(message.dimension)
        if dimension is None:
            raise BadRequest("no dimension: say whether the identifier is a USER, an IP or an API_KEY")
        if not message.identifier:
            raise BadRequest("no identifier: say which user, address or API key it is")
        path = message.endpoint.partition("?")[0]
        identifier = message.identifier
        if dimension == API_KEY and self._is_key(identifier):
            return self._asked_by_key(domain, identifier, path, tree)
        if identifier.startswith(_SECRETS) or secrets.is_within(identifier):
            raise BadRequest("the identifier is an API key or a token: ask about it with the dimension API_KEY")
        if dimension == ADDRESS:
            identifier = _address(identifier, domain, tree)
        return Asked(domain, (Entry(dimension, identifier),), path)

    def _is_key(self, identifier: str) -> bool:
        """Where keys are known, whatever is not a public id is taken for one: else anything would be somebody."""
        return identifier.startswith(_SECRETS) or (self._verifier is not None and not secrets.is_public_id(identifier))

    def _asked_by_key(self, domain: str, key: str, path: str, tree: Tree) -> Asked:
        if self._verifier is None:
            raise BadRequest("the identifier is an API key, and this service knows none: it has no RLS_DATABASE_URL")
        now_s = self._clock()
        identity = self._verifier.identify(CredentialKind.API_KEY, key, now_s)
        terms = tree.identities.get(domain)
        if identity is not None:
            block = self._verifier.block_of(identity, now_s)
            status = terms.blocked_status if terms is not None else BLOCKED_STATUS
            refusal = None if block is None else refusal_of(block, status)
            return Asked(domain, _subjects(identity), path, identity.tier, refusal)
        # Its address is not known here, so all of these are one caller: proving nothing is no way around limits.
        is_let_in = terms is not None and terms.on_invalid is Otherwise.IP
        return Asked(domain, (Entry(ADDRESS, UNKNOWN_ADDRESS),), path, refusal=None if is_let_in else _NOBODYS)


def parse(kind: Any, message: bytes) -> Any:
    """`kind` is the message's class. Raises BadRequest if the bytes are something else."""
    try:
        return kind.FromString(message)
    except DecodeError:
        raise BadRequest(
            f"the message cannot be read as {kind.DESCRIPTOR.full_name}: "
            "it is cut short, not protobuf, or has a text that is not UTF-8"
        ) from None


def _subjects(identity: Identity) -> Entries:
    known = ((API_KEY, identity.api_key), (USER, identity.user), ("org", identity.org))
    return tuple([Entry(key, value) for key, value in known if value])


def _address(text: str, domain: str, tree: Tree) -> str:
    """In its one spelling, and as the domain counts IPv6 networks behind Envoy."""
    mapping = tree.mappings.get(domain)
    address = canonical(text, (mapping.client_ip if mapping is not None else DIRECT).ipv6_prefix)
    if address is None:
        raise BadRequest("the identifier of an IP is not an address: write 192.0.2.1 or 2001:db8::1")
    return address
