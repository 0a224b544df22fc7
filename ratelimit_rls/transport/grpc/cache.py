"""Requests seen before under the rules in force, with everything that was worked out for them.

Clients ask the same few questions again and again, and what a request means depends on nothing but its bytes and the
rules. Bounded in bytes, which all doors have together: most doors are not asked at all, and one that is must not go
short because of them. When full, some that are drawn by lot go, of the door that holds most. Keeping order of use would
cost every hit, and going by age would never hit when slightly more requests than fit come round and round; the lot
still hits most of them. It falls on neighbours, one after the other, which came one after the other, too: their memory
is near, and what takes their place is again. With a lot for each, all that is touched is cold (2.5 µs a request).
"""

from __future__ import annotations

from random import random
from typing import Any, Generic, NamedTuple, TypeVar

from ratelimit_rls.core.model import Outline
from ratelimit_rls.service import Call

DEFAULT_BYTES = 64 * 2**20

LARGEST_MESSAGE_BYTES = 16 * 1024
"""A larger message is not kept: few are repeated, and one would drive out hundreds that are."""

# Weighed with tracemalloc on CPython 3.11: an entry's objects, and each key of its plan. A descriptor's texts are held
# again in each of its keys, where escaping may triple them.
_ENTRY_BYTES = 340
_KEY_BYTES = 70
_VALID_BYTES = 250  # with the standing it holds
_LINE_BYTES = 350  # what it is recorded under

_NEIGHBOURS = 16
"""That go on one lot. As many requests are hit as with a lot for each, unless only a few dozen fit altogether."""

W = TypeVar("W")


class Known(NamedTuple, Generic[W]):
    """A request made ready: what to ask, and how its answer will be worded."""

    call: Call
    wording: W
    request_id: bytes | None = None  # that the message itself has; such a message is not kept


class Budget:
    """So many bytes for several caches."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.held_bytes = 0
        self.caches: list[CallCache[Any]] = []
        self._outlines: dict[int, int] = {}  # entries by the identity of their outline, where that weighs something

    def keep_outline(self, outline: Outline) -> int:
        """What it adds: requests of callers with the same limits of their own have one, which weighs once."""
        entries = self._outlines.get(id(outline), 0)
        self._outlines[id(outline)] = entries + 1
        return 0 if entries else outline.own_bytes

    def drop_outline(self, outline: Outline) -> int:
        entries = self._outlines.pop(id(outline)) - 1
        if entries:
            self._outlines[id(outline)] = entries
        return 0 if entries else outline.own_bytes

    def make_room(self, likely: CallCache[Any]) -> None:
        """`likely` is the one that probably holds most. Whoever has more than half of all does; else all are asked."""
        while self.held_bytes > self.most_bytes:
            most = likely if 2 * likely.held_bytes > self.held_bytes else max(self.caches, key=_held_bytes)
            most.evict()


class CallCache(Generic[W]):
    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.held_bytes = 0
        budget.caches.append(self)
        self._known: dict[bytes, Known[W]] = {}
        self._messages: list[bytes] = []  # the same keys, where one can be drawn by its number
        self._next = 0  # that goes, unless it is the first of its neighbours: then there is a lot
        self.get = self._known.get

    def __len__(self) -> int:
        return len(self._known)

    def put(self, message: bytes, known: Known[W]) -> None:
        """A message that is there already is known anew: what was known of it does not hold any more."""
        if len(message) > LARGEST_MESSAGE_BYTES:
            return
        before = self._known.get(message)
        if before is None:
            self._messages.append(message)
        else:
            self._dropped(message, before)
        self._known[message] = known
        outline = known.call.outline
        self._hold(weight_bytes(message, known) + (self._budget.keep_outline(outline) if outline.own_bytes else 0))
        if self._budget.held_bytes > self._budget.most_bytes:
            self._budget.make_room(self)

    def evict(self) -> None:
        """One of those that are held. The newest takes its place in the list."""
        messages, number = self._messages, self._next
        if number % _NEIGHBOURS == 0 or number >= len(messages):
            number = int(random() * len(messages))  # a sixth of the time that `randrange` takes
            number -= number % _NEIGHBOURS
        drawn, messages[number] = messages[number], messages[-1]
        messages.pop()
        self._next = number + 1
        self._dropped(drawn, self._known.pop(drawn))

    def clear(self) -> None:
        for message, known in self._known.items():
            self._dropped(message, known)
        self._known.clear()
        self._messages.clear()

    def _dropped(self, message: bytes, known: Known[W]) -> None:
        outline = known.call.outline
        self._hold(-weight_bytes(message, known) - (self._budget.drop_outline(outline) if outline.own_bytes else 0))

    def _hold(self, more_bytes: int) -> None:
        self.held_bytes += more_bytes
        self._budget.held_bytes += more_bytes


def _held_bytes(cache: CallCache[Any]) -> int:
    return cache.held_bytes


def weight_bytes(message: bytes, known: Known[Any]) -> int:
    """Without its outline, which others may share."""
    outline, _, prepared, valid, line = known.call
    weight = _ENTRY_BYTES + len(message)
    if prepared is not None:
        keys = len(prepared.keys)
        weight += _KEY_BYTES * keys + prepared.own_bytes + -(-keys // len(outline.slots)) * len(message)
    if valid is not None:
        weight += _VALID_BYTES
    return weight if line is None else weight + _LINE_BYTES
