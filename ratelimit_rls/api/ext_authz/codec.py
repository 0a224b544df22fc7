"""Codec of ext_authz's Check: the mapping in the rules builds descriptors from the request, and the same rules
decide.

Every CheckRequest is different (ids, times, ports), so the cache key is the descriptors and not the message.
"""

from __future__ import annotations

from time import time

from ratelimit_rls.api.ext_authz.decode import attributes, parse
from ratelimit_rls.api.ext_authz.encode import AuthzEncoder, CheckContext
from ratelimit_rls.api.responses import ResponseOptions
from ratelimit_rls.core.attributes import AttributeMapping, Attributes, client_address
from ratelimit_rls.core.credential_resolution import IP, UNKNOWN_ADDRESS, authenticate
from ratelimit_rls.core.identity import ANONYMOUS, IdentityConfig, Verifier
from ratelimit_rls.core.model import Descriptor, Entry, Rejection, Request
from ratelimit_rls.errors import BadRequest, NotReady
from ratelimit_rls.pipeline.codec import Codec
from ratelimit_rls.pipeline.limiter import NO_LIMIT, PlannedCall, RateLimiter
from ratelimit_rls.pipeline.message_bounds import DEFAULT_BOUNDS, MAX_MESSAGE_BYTES, MessageBounds
from ratelimit_rls.pipeline.request_cache import DEFAULT_CACHE_BYTES, CacheBudget, PreparedRequest, RequestCache

DOMAIN_EXTENSION = "ratelimit_domain"
"""Key in the filter's context_extensions that selects the domain. Only Envoy's configuration can set it."""

BAD_REQUEST = 400

SMALL_CHECK_BYTES = 4096
"""The descriptors that are built from a smaller request are not measured: a mapping has at most 32."""

MAX_LISTED_DOMAINS = 5
"""Maximum number of domains that an error message lists."""


MALFORMED_PATH = Rejection("malformed", "the path must not contain a line break or NUL", BAD_REQUEST)


class ExtAuthzCodec(Codec[CheckContext]):
    """Decodes CheckRequests, authenticates their callers, and encodes the responses."""

    def __init__(
        self,
        limiter: RateLimiter,
        options: ResponseOptions | None = None,
        *,
        default_domain: str = "",
        budget: CacheBudget | None = None,
        verifier: Verifier | None = None,
        bounds: MessageBounds = DEFAULT_BOUNDS,
    ) -> None:
        """`default_domain` is used if Envoy selects none; if it is empty, the only domain with a mapping is used."""
        super().__init__(limiter, verifier, bounds)
        self.cache: RequestCache[None] = RequestCache(budget or CacheBudget(DEFAULT_CACHE_BYTES))
        self._encoder = AuthzEncoder(options or ResponseOptions())
        self.encode = self._encoder.encode
        self._default_domain = default_domain

    @property
    def max_message_bytes(self) -> int:
        """Large, because a CheckRequest may contain the body of a request."""
        return MAX_MESSAGE_BYTES

    def decode(self, message: bytes) -> PreparedRequest[CheckContext]:
        context = parse(message, self.bounds)
        domain, mapping = self._select_mapping(context.context_extensions.get(DOMAIN_EXTENSION, ""))
        if mapping is None:
            return PreparedRequest(NO_LIMIT, CheckContext(None))
        attrs = attributes(context, mapping.metadata)
        header = attrs.headers.get
        request_id, is_grpc = header("x-request-id", ""), header("content-type", "").startswith("application/grpc")
        identity = self._identity_config(domain)
        rejection: Rejection | None = None
        if identity is None:
            check = CheckContext(mapping, request_id, is_grpc)
        else:
            caller, rejection = authenticate(attrs, identity, self.verifier, time())
            attrs = attrs.of(caller)
            address = client_address(mapping.client_ip, attrs) or ""
            # Also for denials: in the global shadow mode they are allowed, and forged headers must still be removed.
            check = CheckContext(mapping, request_id, is_grpc, caller, address, identity.hidden)
        if attrs.has_control_in_path:
            return PreparedRequest(self.limiter.reject(_address_request(domain, mapping, attrs), MALFORMED_PATH), check)
        if rejection is not None:
            return PreparedRequest(self._deny(domain, mapping, attrs, rejection), check)
        request = mapping.request(domain, attrs)
        if request is not None and len(message) > SMALL_CHECK_BYTES:
            self.bounds.check_descriptors(request)
        return PreparedRequest(NO_LIMIT if request is None else self.prepare_cached(request, self.cache), check)

    def _identity_config(self, domain: str) -> IdentityConfig | None:
        loaded = self.limiter.rules
        return loaded.tree.identities.get(domain) if loaded is not None else None

    def _deny(self, domain: str, mapping: AttributeMapping, attrs: Attributes, rejection: Rejection) -> PlannedCall:
        """Deny a request. It is reported with its own descriptors if the caller is known, otherwise with its
        address."""
        request = mapping.request(domain, attrs) if attrs.caller is not ANONYMOUS else None
        return self.limiter.reject(request or _address_request(domain, mapping, attrs), rejection)

    def clear_cache(self) -> None:
        self.cache.clear()

    def _select_mapping(self, selected: str) -> tuple[str, AttributeMapping | None]:
        """Return the domain and its mapping; the mapping is None if Envoy selects a domain that has none.

        If no domain can be selected, the call fails and Envoy's `failure_mode_allow` decides. If it were allowed, a
        missing or misspelt mapping would look like a limit that is never reached.
        """
        loaded = self.limiter.rules
        if loaded is None:
            raise NotReady("no rate limit configuration loaded")
        mappings = loaded.tree.mappings
        if selected:
            return selected, mappings.get(selected)
        if self._default_domain:
            if self._default_domain not in mappings:
                raise NotReady(
                    f"RLS_EXT_AUTHZ_DOMAIN is '{self._default_domain}', whose rules have no 'ext_authz': "
                    "it defines how descriptors are built from a request (docs/ext_authz.md)"
                )
            return self._default_domain, mappings[self._default_domain]
        if not mappings:
            raise NotReady(
                "no rules have 'ext_authz', which defines the descriptors of a request: add, next to 'domain', "
                "ext_authz: {descriptors: [{entries: [{key: remote_address, from: client_ip}]}]}"
            )
        if len(mappings) > 1:
            names = [*list(mappings)[:MAX_LISTED_DOMAINS], *(["…"] if len(mappings) > MAX_LISTED_DOMAINS else [])]
            raise BadRequest(
                f"several domains have 'ext_authz' ({', '.join(names)}): select one with '{DOMAIN_EXTENSION}' in the "
                "filter's context_extensions, or with RLS_EXT_AUTHZ_DOMAIN"
            )
        return next(iter(mappings.items()))


def _address_request(domain: str, mapping: AttributeMapping, attrs: Attributes) -> Request:
    address = client_address(mapping.client_ip, attrs) or UNKNOWN_ADDRESS
    return Request(domain, (Descriptor((Entry(IP, address),)),))
