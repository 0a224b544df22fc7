"""The door for RateLimitRequests: ShouldRateLimit, and Kuadrant's two halves of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import time

from ratelimit_rls.core.credentials import resolve
from ratelimit_rls.core.identity import IdentityTerms, Verifier
from ratelimit_rls.core.model import Decision, Purpose, Request
from ratelimit_rls.core.plan import check
from ratelimit_rls.service import NO_LIMIT, RateLimiter
from ratelimit_rls.telemetry.metrics import Metrics
from ratelimit_rls.telemetry.refusals import RefusalLog
from ratelimit_rls.transport.answers import AnswerOptions
from ratelimit_rls.transport.grpc.cache import DEFAULT_BYTES, Budget, CallCache, Known
from ratelimit_rls.transport.grpc.decode import decode
from ratelimit_rls.transport.grpc.door import Failure
from ratelimit_rls.transport.grpc.encode import Encoder, Wording
from ratelimit_rls.transport.grpc.limiter_door import LimiterDoor
from ratelimit_rls.transport.grpc.request_id import identified
from ratelimit_rls.transport.grpc.waiting import WaitingRoom


class RlsDoor(LimiterDoor[Wording]):
    def __init__(
        self,
        limiter: RateLimiter,
        metrics: Metrics,
        options: AnswerOptions | None = None,
        *,
        room: WaitingRoom,
        purpose: Purpose = Purpose.DECIDE,
        request_id_entry: str = "",
        budget: Budget | None = None,
        refusal_log: RefusalLog | None = None,
        verifier: Verifier | None = None,
    ) -> None:
        """`request_id_entry` is the key of descriptor entries that say which call it is, and not what to count."""
        super().__init__(limiter, metrics, room, refusal_log, verifier)
        budget = budget or Budget(DEFAULT_BYTES)
        self.cache: CallCache[Wording] = CallCache(budget)
        self._proved: CallCache[None] = CallCache(budget)  # requests that came with a credential, without it
        self._encoder = Encoder(options or AnswerOptions())
        self._purpose = purpose
        self._request_id_entry = request_id_entry
        self.messages_have_ids = bool(request_id_entry)

    def forget(self) -> None:
        self.cache.clear()
        self._proved.clear()

    def known(self, messages: Sequence[bytes]) -> list[Known[Wording] | Failure]:
        recall = self.cache.get
        if not self.limiter.knows_callers:
            return [recall(message) or self.understood(message) for message in messages]
        now_s = time()
        ready: list[Known[Wording] | Failure] = []
        for message in messages:
            known = recall(message)
            if known is None or not ((valid := known.call.valid) is None or valid.holds(now_s)):
                ready.append(self.understood(message))
            else:
                ready.append(known)
        return ready

    def read(self, message: bytes) -> Known[Wording]:
        request = decode(message, self._purpose)
        had_credential = False
        terms = self._terms(request.domain)
        if terms is not None:
            # From here on with who is calling in place of credentials.
            request, refusal, had_credential = resolve(request, terms, self.verifier, time())
            if refusal is not None:
                call = self.limiter.refuse(request, refusal)
                return Known(call, self._encoder.wording(request, call.outline))
        if self._request_id_entry:
            known = self._read_identified(request)
        else:
            call = self.call_of(request, self._proved) if had_credential else self.limiter.prepare(request)
            known = Known(call, self._encoder.wording(request, call.outline))
        # One that has an id is not seen again but in a retry, and one that has a credential is not kept.
        if known.request_id is None and not had_credential:
            self.cache.put(message, known)
        return known

    def _terms(self, domain: str) -> IdentityTerms | None:
        """Which entries carry credentials, if some of the domain do."""
        loaded = self.limiter.rules
        terms = loaded.tree.identities.get(domain) if loaded is not None else None
        return terms if terms is not None and terms.entries else None

    def _read_identified(self, request: Request) -> Known[Wording]:
        """A descriptor that had nothing but the id is not decided about, and told that no limit applied."""
        check(request)
        rest, request_id, dropped = identified(request, self._request_id_entry)
        call = self.limiter.prepare(rest) if rest.descriptors else NO_LIMIT
        wording = self._encoder.wording(rest, call.outline)
        return Known(call, replace(wording, undecided=dropped) if dropped else wording, request_id)

    def word(self, decision: Decision, wording: Wording) -> bytes:
        return self._encoder.encode(decision, wording)
