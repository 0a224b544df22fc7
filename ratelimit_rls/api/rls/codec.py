"""Codec of RateLimitRequest messages: ShouldRateLimit, and Kuadrant's CheckRateLimit and Report."""

from __future__ import annotations

from dataclasses import replace
from time import time

from ratelimit_rls.api.responses import ResponseOptions
from ratelimit_rls.api.rls.compiled_reader import CompiledReader, DomainRules
from ratelimit_rls.api.rls.decode import decode as decode_request
from ratelimit_rls.api.rls.encode import ResponseTemplate, RlsEncoder
from ratelimit_rls.api.rls.request_shapes import RequestShapes
from ratelimit_rls.core.credential_resolution import resolve_credentials
from ratelimit_rls.core.identity import IdentityConfig, Verifier
from ratelimit_rls.core.model import Purpose, Request
from ratelimit_rls.core.plan import validate_request
from ratelimit_rls.pipeline.codec import Codec
from ratelimit_rls.pipeline.limiter import NO_LIMIT, RateLimiter
from ratelimit_rls.pipeline.message_bounds import DEFAULT_BOUNDS, MessageBounds
from ratelimit_rls.pipeline.request_cache import DEFAULT_CACHE_BYTES, CacheBudget, PreparedRequest, RequestCache
from ratelimit_rls.pipeline.request_id import extract_request_id


class RlsCodec(Codec[ResponseTemplate]):
    """Decodes, prepares and caches RateLimitRequests, and encodes their responses."""

    def __init__(
        self,
        limiter: RateLimiter,
        options: ResponseOptions | None = None,
        *,
        purpose: Purpose = Purpose.DECIDE,
        request_id_entry: str = "",
        budget: CacheBudget | None = None,
        verifier: Verifier | None = None,
        bounds: MessageBounds = DEFAULT_BOUNDS,
    ) -> None:
        """`request_id_entry` is the key of descriptor entries that carry the request id instead of a value to count."""
        super().__init__(limiter, verifier, bounds)
        budget = budget or CacheBudget(DEFAULT_CACHE_BYTES)
        self.cache: RequestCache[ResponseTemplate] = RequestCache(budget)
        self.lookup = self._lookup_valid if limiter.entitlements is not None else self.cache.get
        self._authenticated: RequestCache[None] = RequestCache(budget)  # requests with a credential, keyed without it
        self._encoder = RlsEncoder(options or ResponseOptions())
        self.encode = self._encoder.encode
        self.encode_pass = self._encoder.encode_pass  # type: ignore[method-assign]  # saves a Python call
        self._purpose = purpose
        self._request_id_entry = request_id_entry
        self.messages_carry_request_ids = bool(request_id_entry)
        self._shapes = RequestShapes(limiter)
        # Whether prepared requests of one shape differ only in the keys of counters and in what is recorded.
        self._shapes_are_uniform = not (request_id_entry or self._encoder.describes_requests)
        self._reader = self._make_reader()

    @property
    def max_message_bytes(self) -> int:
        return self.bounds.message_bytes

    def clear_cache(self) -> None:
        self.cache.clear()
        self._authenticated.clear()
        self._shapes.clear()
        self._reader = self._make_reader()

    def _make_reader(self) -> CompiledReader | None:
        """Return the reader for the rules in force, if it covers any requests."""
        loaded = self.limiter.rules
        if loaded is None or not self._shapes_are_uniform:
            return None
        planner = self.limiter.planner
        domains = {
            name: DomainRules(root, planner.tag_encoder(name))
            for name, root in loaded.tree.domains.items()
            if self._identity_config(name) is None
        }
        return CompiledReader(
            domains,
            max_bytes=self.bounds.plain_bytes,
            max_descriptors=self.bounds.descriptors,
            recorded_keys=self.limiter.recorded_keys,
            entitlements=self.limiter.entitlements,
        )

    def _lookup_valid(self, message: bytes) -> PreparedRequest[ResponseTemplate] | None:
        """Look up a message where subjects have limits of their own, which may end before the rules change."""
        cached = self.cache.get(message)
        if cached is None or (valid := cached.call.valid) is None or valid.holds(time()):
            return cached
        return None

    def decode(self, message: bytes) -> PreparedRequest[ResponseTemplate]:
        read = self._reader.read(message) if self._reader is not None else None
        if read is None:
            return self._decode_any(message)
        prepared = self._shapes.prepare(read)
        if prepared is None:
            prepared = self._decode_any(message)
            self._shapes.learn(read, prepared)
        else:
            self.cache.put_if_repeated(message, prepared)
        return prepared

    def _decode_any(self, message: bytes) -> PreparedRequest[ResponseTemplate]:
        """Decode a message in general: not only those that the compiled reader covers."""
        request = decode_request(message, self._purpose, self.bounds)
        had_credential = False
        identity = self._identity_config(request.domain)
        if identity is not None:
            # From here on, the request contains the caller's identity instead of the credentials.
            request, rejection, had_credential = resolve_credentials(request, identity, self.verifier, time())
            if rejection is not None:
                call = self.limiter.reject(request, rejection)
                return PreparedRequest(call, self._encoder.response_template(request, call.template))
        if self._request_id_entry:
            prepared = self._read_identified(request)
        else:
            call = (
                self.prepare_cached(request, self._authenticated) if had_credential else self.limiter.prepare(request)
            )
            prepared = PreparedRequest(call, self._encoder.response_template(request, call.template))
        # A request with an id is repeated only by a retry, and one with a credential must not be cached.
        if prepared.request_id is None and not had_credential:
            self.cache.put(message, prepared)
        return prepared

    def _identity_config(self, domain: str) -> IdentityConfig | None:
        """Return the domain's identity config, or None if no entry of the domain carries credentials."""
        loaded = self.limiter.rules
        identity = loaded.tree.identities.get(domain) if loaded is not None else None
        return identity if identity is not None and identity.entries else None

    def _read_identified(self, request: Request) -> PreparedRequest[ResponseTemplate]:
        """Prepare a request with an id. A descriptor that has only the id is not decided; its status is OK without a
        limit."""
        validate_request(request)
        rest, request_id, dropped = extract_request_id(request, self._request_id_entry)
        call = self.limiter.prepare(rest) if rest.descriptors else NO_LIMIT
        template = self._encoder.response_template(rest, call.template)
        return PreparedRequest(call, replace(template, undecided=dropped) if dropped else template, request_id)
