"""Prepares requests by reusing the prepared result of the first request of the same shape (compiled_reader.py)."""

from __future__ import annotations

from operator import add
from typing import NamedTuple

from ratelimit_rls.api.rls.compiled_reader import ReadRequest, Shape
from ratelimit_rls.api.rls.encode import ResponseTemplate
from ratelimit_rls.core.entitlements import Entitlement
from ratelimit_rls.core.model import construct
from ratelimit_rls.core.plan import KeySuffixes, key_suffixes, template_bytes
from ratelimit_rls.pipeline.limiter import PlannedCall, RateLimiter
from ratelimit_rls.pipeline.request_cache import PreparedRequest

MAX_SHAPES_BYTES = 8 * 2**20
"""Memory of the learned shapes. When they exceed it, all of them are dropped and learned again.

Rules and hits produce few shapes. Metrics with values produce many, which are not worth keeping for long.
"""


class _LearnedShape(NamedTuple):
    call: PlannedCall  # of the request that it was learned from
    response_template: ResponseTemplate
    suffixes: KeySuffixes
    single_suffixes: tuple[bytes, ...] | None  # if each descriptor has exactly one; else None
    entitlements: tuple[Entitlement, ...]  # kept, because the shape has the id() of their limits


class RequestShapes:
    """Prepares requests of known shapes."""

    def __init__(self, limiter: RateLimiter) -> None:
        self._limiter = limiter
        self._learned: dict[Shape, _LearnedShape] = {}
        self._bytes = 0

    def prepare(self, read: ReadRequest) -> PreparedRequest[ResponseTemplate] | None:
        """Prepare a request; None if its shape is not known."""
        shape, tags, recorded, entitlements = read
        learned = self._learned.get(shape)
        if learned is None:
            return None
        call, response_template, suffixes, single_suffixes, _ = learned
        if single_suffixes is not None:
            keys = tuple(map(add, tags, single_suffixes))
        else:
            keys = tuple([tag + suffix for tag, own in zip(tags, suffixes, strict=True) for suffix in own])
        return construct(
            PreparedRequest, (self._limiter.prepare_like(call, keys, recorded, entitlements), response_template, None)
        )

    def learn(self, read: ReadRequest, prepared: PreparedRequest[ResponseTemplate]) -> None:
        """Learn a shape from a request that the general reader has prepared."""
        template = prepared.call.template
        self._bytes += template_bytes(template)
        if self._bytes > MAX_SHAPES_BYTES:
            self.clear()
            return
        suffixes = key_suffixes(template)
        single = tuple([own[0] for own in suffixes]) if all(len(own) == 1 for own in suffixes) else None
        self._learned[read.shape] = _LearnedShape(
            prepared.call, prepared.response_template, suffixes, single, tuple(read.entitlements)
        )

    def clear(self) -> None:
        self._learned.clear()
        self._bytes = 0
