"""Cache of requests seen under the rules in force, with everything that was computed for them.

The meaning of a request depends only on its bytes and the rules, and many clients repeat theirs. All codecs
share one budget in bytes: most codecs get no calls, and one that does must not lose memory to them. When over budget,
random entries of the largest cache are evicted. LRU would tax every hit; FIFO would never hit on a cyclic scan slightly
larger than the cache, where random eviction still hits most of the time. Runs of 16 adjacent entries are evicted: they
were inserted one after the other, so they are adjacent in memory, as are the entries that replace them. Evicting single
random entries touches cold memory each time (2.5 µs a request).
"""

from __future__ import annotations

from random import random
from typing import Any, Generic, NamedTuple, TypeVar, cast

from ratelimit_rls.core.model import PlanTemplate
from ratelimit_rls.pipeline.limiter import PlannedCall

DEFAULT_CACHE_BYTES = 64 * 2**20

MAX_CACHED_MESSAGE_BYTES = 16 * 1024
"""A larger message is not cached: few are repeated, and one would displace hundreds that are."""

# Measured with tracemalloc on CPython 3.11: an entry's objects, and each key of its plan without its bytes.
_ENTRY_BYTES = 340
_KEY_BYTES = 70
_VALIDITY_BYTES = 250  # with the entitlement it references
_USAGE_ENTRY_BYTES = 350

_RECENT_SLOTS = 2**18
"""About how many other messages may come before a repeated one, for it to be cached (`put_if_repeated`)."""

_EVICTION_RUN = 16
"""Adjacent entries evicted together. The hit rate is that of single evictions, unless only a few dozen entries fit."""

W = TypeVar("W")


class PreparedRequest(NamedTuple, Generic[W]):
    """A decoded and planned request, and what is precomputed for its response. Most are cached."""

    call: PlannedCall
    response_template: W
    request_id: bytes | None = None  # in the message itself; such a message is not cached


class CacheBudget:
    """A budget in bytes that several caches share. Templates, which caches also share, are charged to it alone."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.charged_bytes = 0
        self.caches: list[RequestCache[Any]] = []
        self._templates: dict[int, int] = {}  # number of entries by id(template), for templates that use memory

    def retain_plan_template(self, template: PlanTemplate) -> None:
        """Charge an entry's template: subjects with the same limits share one, which is charged once."""
        entries = self._templates.get(id(template), 0)
        self._templates[id(template)] = entries + 1
        if not entries:
            self.charged_bytes += template.own_bytes

    def release_plan_template(self, template: PlanTemplate) -> None:
        entries = self._templates.pop(id(template)) - 1
        if entries:
            self._templates[id(template)] = entries
        else:
            self.charged_bytes -= template.own_bytes

    def evict_over_budget(self, likely: RequestCache[Any]) -> None:
        """Evict from the largest cache: from `likely` if it has more than half of all bytes, without comparing all."""
        while self.charged_bytes > self.max_bytes:
            largest = likely if 2 * likely.charged_bytes > self.charged_bytes else max(self.caches, key=_charged_bytes)
            if not len(largest):
                return
            largest.evict()


class RequestCache(Generic[W]):
    """A cache of prepared requests, by the bytes of their messages or by their content."""

    def __init__(self, budget: CacheBudget) -> None:
        self._budget = budget
        self.charged_bytes = 0
        budget.caches.append(self)
        self._known: dict[bytes, PreparedRequest[W]] = {}
        self._messages: list[bytes] = []  # the same keys, accessible by index
        # By some bits of a message's hash: eight other bits of the hash of the last such message.
        self._recent = bytearray()
        self._next = 0  # index to evict next, unless it begins another run: then a random one is chosen
        self.get = self._known.get

    def __len__(self) -> int:
        return len(self._known)

    def put(self, message: bytes, cached: PreparedRequest[W]) -> None:
        """Add a request, or replace one that is no longer valid."""
        if len(message) > MAX_CACHED_MESSAGE_BYTES:
            return
        before = self._known.get(message)
        if before is None:
            self._messages.append(message)
        else:
            self._dropped(message, before)
        self._known[message] = cached
        template = cached.call.template
        if template.own_bytes:
            self._budget.retain_plan_template(template)
        self._charge(entry_bytes(message, cached))
        if self._budget.charged_bytes > self._budget.max_bytes:
            self._budget.evict_over_budget(self)

    def put_if_repeated(self, message: bytes, cached: PreparedRequest[W]) -> None:
        """Add a request if its message was offered recently: for requests that are cheap to prepare again."""
        digest = hash(message)
        slot, mark = digest % _RECENT_SLOTS, digest >> 32 & 0xFF
        recent = self._recent or self._allocate_recent()
        if recent[slot] == mark:
            self.put(message, cached)
        else:
            recent[slot] = mark

    def _allocate_recent(self) -> bytearray:
        """Allocate the marks of recent messages on first use: most caches stay empty."""
        self._recent = bytearray(_RECENT_SLOTS)
        return self._recent

    def evict(self) -> None:
        """Evict one entry. The newest takes its place in the list."""
        messages, number = self._messages, self._next
        if number % _EVICTION_RUN == 0 or number >= len(messages):
            number = int(random() * len(messages))  # a sixth of the time that `randrange` takes
            number -= number % _EVICTION_RUN
        evicted, messages[number] = messages[number], messages[-1]
        messages.pop()
        self._next = number + 1
        self._dropped(evicted, self._known.pop(evicted))

    def clear(self) -> None:
        for message, cached in self._known.items():
            self._dropped(message, cached)
        self._known.clear()
        self._messages.clear()

    def _dropped(self, message: bytes, cached: PreparedRequest[W]) -> None:
        template = cached.call.template
        if template.own_bytes:
            self._budget.release_plan_template(template)
        self._charge(-entry_bytes(message, cached))

    def _charge(self, more_bytes: int) -> None:
        self.charged_bytes += more_bytes
        self._budget.charged_bytes += more_bytes


def _charged_bytes(cache: RequestCache[Any]) -> int:
    return cache.charged_bytes


def entry_bytes(message: bytes, cached: PreparedRequest[Any]) -> int:
    """Estimate the memory of an entry without its shared template. `response_template` is None or has `own_bytes`."""
    _, _, prepared, valid, usage_entry = cached.call
    size = _ENTRY_BYTES + len(message)
    if cached.response_template is not None:
        size += cached.response_template.own_bytes
    if prepared is not None:
        keys = cast("tuple[str | bytes, ...]", prepared.keys)
        size += _KEY_BYTES * len(keys) + sum(map(len, keys)) + prepared.own_bytes
    if valid is not None:
        size += _VALIDITY_BYTES
    return size if usage_entry is None else size + _USAGE_ENTRY_BYTES
