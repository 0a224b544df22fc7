"""The door for ext_authz's Check: the rules' own mapping makes descriptors of the request, and the same rules decide.

Every Check is different (ids, times, ports), so what was worked out is kept by the descriptors made of it.
"""

from __future__ import annotations

from time import time

from ratelimit_rls.core.attributes import AttributeMapping, Attributes, client_address
from ratelimit_rls.core.credentials import IP, UNKNOWN_ADDRESS, prove
from ratelimit_rls.core.identity import ANONYMOUS, IdentityTerms, Verifier
from ratelimit_rls.core.model import Decision, Descriptor, Entry, Refusal, Request
from ratelimit_rls.errors import BadRequest, NotReady
from ratelimit_rls.service import NO_LIMIT, Call, RateLimiter
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.telemetry.refusals import RefusalLog
from ratelimit_rls.transport.answers import AnswerOptions
from ratelimit_rls.transport.grpc.authz_decode import attributes, parse
from ratelimit_rls.transport.grpc.authz_encode import Asked, AuthzEncoder
from ratelimit_rls.transport.grpc.cache import DEFAULT_BYTES, Budget, CallCache, Known
from ratelimit_rls.transport.grpc.limiter_door import LimiterDoor
from ratelimit_rls.transport.grpc.waiting import WaitingRoom

DOMAIN_EXTENSION = "ratelimit_domain"
"""Of the filter's context_extensions: the domain whose rules decide. Only Envoy's configuration can set it."""

MOST_NAMED = 5
"""Domains that a message lists."""


class ExtAuthzDoor(LimiterDoor[Asked]):
    def __init__(
        self,
        limiter: RateLimiter,
        metrics: Metrics,
        options: AnswerOptions | None = None,
        *,
        room: WaitingRoom,
        default_domain: str = "",
        budget: Budget | None = None,
        refusal_log: RefusalLog | None = None,
        verifier: Verifier | None = None,
    ) -> None:
        """`default_domain` is whose rules decide where Envoy names none; empty: the only one that has a mapping."""
        super().__init__(limiter, metrics, room, refusal_log, verifier)
        self.cache: CallCache[None] = CallCache(budget or Budget(DEFAULT_BYTES))
        self._encoder = AuthzEncoder(options or AnswerOptions())
        self._default_domain = default_domain

    def read(self, message: bytes) -> Known[Asked]:
        context = parse(message)
        domain, mapping = self._chosen(context.context_extensions.get(DOMAIN_EXTENSION, ""))
        if mapping is None:
            return Known(NO_LIMIT, Asked(None))
        told = attributes(context, mapping.metadata)
        header = told.headers.get
        request_id, is_grpc = header("x-request-id", ""), header("content-type", "").startswith("application/grpc")
        terms = self._terms(domain)
        if terms is None:
            asked = Asked(mapping, request_id, is_grpc)
        else:
            told.caller, refusal = prove(told, terms, self.verifier, time())
            address = client_address(mapping.client_ip, told) or ""
            # Of refusals, too: under the global shadow mode they pass, and what a client wrote must not pass with them.
            asked = Asked(mapping, request_id, is_grpc, told.caller, address, terms.hidden)
            if refusal is not None:
                return Known(self._refused(domain, mapping, told, refusal), asked)
        request = mapping.request(domain, told)
        return Known(NO_LIMIT if request is None else self.call_of(request, self.cache), asked)

    def _terms(self, domain: str) -> IdentityTerms | None:
        loaded = self.limiter.rules
        return loaded.tree.identities.get(domain) if loaded is not None else None

    def _refused(self, domain: str, mapping: AttributeMapping, told: Attributes, refusal: Refusal) -> Call:
        """Told of as what it is known to be: who is blocked, or, of others, where they come from."""
        request = mapping.request(domain, told) if told.caller is not ANONYMOUS else None
        if request is None:
            address = client_address(mapping.client_ip, told) or UNKNOWN_ADDRESS
            request = Request(domain, (Descriptor((Entry(IP, address),)),))
        return self.limiter.refuse(request, refusal)

    def forget(self) -> None:
        self.cache.clear()

    def word(self, decision: Decision, wording: Asked) -> bytes:
        return self._encoder.encode(decision, wording)

    def _chosen(self, named: str) -> tuple[str, AttributeMapping | None]:
        """The domain whose rules decide, with its mapping: None if Envoy itself names one that has none.

        With nothing to go by the call fails, and Envoy's `failure_mode_allow` decides: were it let through, a mapping
        that was forgotten or misspelt would look like a limit that is never reached.
        """
        loaded = self.limiter.rules
        if loaded is None:
            raise NotReady("no rate limit configuration loaded")
        mappings = loaded.tree.mappings
        if named:
            return named, mappings.get(named)
        if self._default_domain:
            if self._default_domain not in mappings:
                raise NotReady(
                    f"RLS_EXT_AUTHZ_DOMAIN is '{self._default_domain}', whose rules have no 'ext_authz': "
                    "it says how descriptors are made of a request (docs/ext_authz.md)"
                )
            return self._default_domain, mappings[self._default_domain]
        if not mappings:
            raise NotReady(
                "no rules have 'ext_authz', which says how descriptors are made of a request: write, beside 'domain', "
                "ext_authz: {descriptors: [{entries: [{key: remote_address, from: client_ip}]}]}"
            )
        if len(mappings) > 1:
            names = [*list(mappings)[:MOST_NAMED], *(["…"] if len(mappings) > MOST_NAMED else [])]
            raise BadRequest(
                f"several domains have 'ext_authz' ({', '.join(names)}): name one as '{DOMAIN_EXTENSION}' in the "
                "filter's context_extensions, or in RLS_EXT_AUTHZ_DOMAIN"
            )
        return next(iter(mappings.items()))
