"""A batch behind a rate limiter's door, from the moment it was read until each of its calls has its answer.

read ─► at once   cannot be read, needs no store, has no time left, or is one too many
     ─► asked ─► the store's word              in time
             └─► what the rules say without it      late
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from functools import partial
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from ratelimit_rls.core.model import Decision
from ratelimit_rls.errors import BadRequest, Late, Overloaded, StoreError
from ratelimit_rls.service import Call
from ratelimit_rls.telemetry.traces import TracedBatch
from ratelimit_rls.transport.grpc.cache import Known
from ratelimit_rls.transport.grpc.door import Answered, Failure, Held
from ratelimit_rls.transport.grpc.request_id import checked

if TYPE_CHECKING:
    from ratelimit_rls.transport.grpc.limiter_door import LimiterDoor

_AT_ONCE_S = -1.0
"""Before every moment of the monotonic clock."""

_NOT_NEEDED = StoreError("the store has nothing to say of this call")

W = TypeVar("W")


class AskedLimiter(Generic[W]):
    """A batch of calls that the rate limiter decides, except those that it need not or cannot be asked about.

    A call that is late is told what its rules say of a store that does not answer. The store is still waited for: its
    hits are counted there, too, if it was admitted, since whether it was is not known. Only a slot that it was to wait
    for is given back.
    """

    __slots__ = (
        "_answered",
        "_asked",
        "_at_once",
        "_begun_s",
        "_calls",
        "_deadlines_s",
        "_door",
        "_numbers",
        "_request_ids",
        "_size",
        "_traced",
        "due_s",
    )

    def __init__(
        self,
        door: LimiterDoor[W],
        ready: list[Known[W] | Failure],
        deadlines_s: Sequence[float],
        request_ids: Sequence[bytes | None] | None,
        traced: TracedBatch | None = None,
    ) -> None:
        self._begun_s = monotonic()
        self._traced = traced
        self._door = door
        self._deadlines_s = deadlines_s
        self._size = len(ready)
        self._calls = [known.call for known in ready if isinstance(known, Known)]
        self._asked = cast("list[Known[W]]", ready)  # unless they are sifted
        self._numbers: Sequence[int] = range(self._size)  # of those asked about, in the batch
        self._request_ids: list[bytes | None] | None = None  # theirs
        self._at_once: list[tuple[int, bytes | Failure]] = []  # what `due` has not handed out yet
        self._answered: set[int] = set()  # who was late, by the number among those asked about
        self.due_s = min(deadlines_s, default=inf) - door.room.margin_s
        if traced is not None:
            for number in traced.spans:
                known = ready[number]
                if isinstance(known, Known):
                    traced.asked(number, known.call.outline)
        if (
            len(self._calls) < self._size
            or self._size > door.limiter.places_left
            or self.due_s <= self._begun_s
            or request_ids is not None
            or door.messages_have_ids
            or (door.some_ask_nothing and not door.limiter.decides_here)
        ):
            self._sift(ready, request_ids or [None] * self._size)

    def _sift(self, ready: list[Known[W] | Failure], request_ids: Sequence[bytes | None]) -> None:
        """Answer those who need not wait, and note the ids of the others."""
        door = self._door
        places = door.limiter.places_left
        asked: list[Known[W]] = []
        numbers: list[int] = []
        ids: list[bytes | None] = []
        without: list[tuple[int, Known[W], StoreError]] = []
        for number, (known, sent_id) in enumerate(zip(ready, request_ids, strict=True)):
            if isinstance(known, Failure):
                self._at_once.append((number, known))
            elif (failure := self._refused_id(sent_id)) is not None:
                self._at_once.append((number, failure))
            elif known.call.prepared is None:
                without.append((number, known, _NOT_NEEDED))
            elif (why := self._not_asked(self._deadlines_s[number], places)) is not None:
                without.append((number, known, why))
            else:
                asked.append(known)
                numbers.append(number)
                ids.append(known.request_id or sent_id)
                places -= 1
        self._asked, self._numbers, self._request_ids = asked, numbers, ids
        self._calls = [known.call for known in asked]
        self._at_once += self._instead(without)
        if self._at_once:
            self.due_s = _AT_ONCE_S

    def _refused_id(self, sent_id: bytes | None) -> Failure | None:
        try:
            if sent_id is not None:
                checked(sent_id)
        except BadRequest as fault:
            return self._door.failure(fault)
        return None

    def _not_asked(self, deadline_s: float, places: int) -> StoreError | None:
        """Why the store is not even asked about a call of which it has something to say."""
        door = self._door
        if deadline_s - door.room.margin_s <= self._begun_s and not door.limiter.decides_here:
            return Late("the call came too late for an answer before its deadline")
        return Overloaded("too many calls wait for the store; try again later") if places <= 0 else None

    def _instead(self, without: Sequence[tuple[int, Known[W], StoreError]]) -> Iterator[tuple[int, bytes | Failure]]:
        if not without:
            return
        decisions = self._door.instead([(known.call, why) for _, known, why in without])
        self._tell_of([number for number, _, _ in without], decisions)
        for (number, known, _), decision in zip(without, decisions, strict=True):
            yield number, self._door.told(known, decision)

    def due(self, now_s: float) -> list[tuple[int, bytes | Failure]]:
        due, self._at_once = self._at_once, []
        margin_s = self._door.room.margin_s
        why = Late("no answer from the store in time for the caller's deadline")
        late: list[tuple[int, Known[W], StoreError]] = []
        self.due_s = inf
        for index, (number, known) in enumerate(zip(self._numbers, self._asked, strict=True)):
            if index in self._answered:
                continue
            due_s = self._deadlines_s[number] - margin_s
            if due_s > now_s:
                self.due_s = min(self.due_s, due_s)
            else:
                self._answered.add(index)
                late.append((number, known, why))
        return [*due, *self._instead(late)]

    async def answers(self) -> Sequence[Answered | None]:
        door = self._door
        waits_us, reserved = self._waits() if door.some_can_wait else (None, 0)
        try:
            decisions = await door.limiter.check(self._calls, waits_us, self._request_ids, self._answered)
            self._tell_of(self._numbers, decisions, self._answered)
            told = self._told(decisions, waits_us)
        except Exception as fault:
            # Whether the batch was counted is unknown, so it is not tried again call by call.
            told = [door.failure(fault)] * len(self._calls)
        finally:
            door.room.release(reserved)
        if self._answered or len(told) < self._size:
            return self._those_left(told)
        return told

    def _tell_of(
        self,
        numbers: Sequence[int],
        decisions: Sequence[Decision | StoreError | Failure],
        but: Collection[int] = (),
    ) -> None:
        """Tell the traces of every decision that is theirs, and the log of a few.

        `numbers` are the calls' in the batch. Not told of are those of `but`, by index, who were told something else.
        """
        traced, log = self._traced, self._door.refusal_log
        if (traced is None or not traced.spans) and not log.has_room:
            return
        told = [
            (number, decision)
            for index, (number, decision) in enumerate(zip(numbers, decisions, strict=True))
            if isinstance(decision, Decision) and index not in but
        ]
        if traced is not None:
            for number, decision in told:
                traced.decided(number, decision)
        if log.has_room:
            log.note(told, traced.ids if traced is not None else lambda _: None)

    def _those_left(self, told: list[Answered]) -> list[Answered | None]:
        """In their places in the batch, without those who were answered meanwhile."""
        answers: list[Answered | None] = [None] * self._size
        for number, answer in self._at_once:
            answers[number] = answer
        for index, (number, one) in enumerate(zip(self._numbers, told, strict=True)):
            if index not in self._answered:
                answers[number] = one
            elif isinstance(one, Held):
                self._door.room.decline(one)
        return answers

    def _told(self, decisions: list[Decision | StoreError], waits_us: list[int | None] | None) -> list[Answered]:
        asked = self._asked
        if waits_us is None:
            told = self._door.told
            return [told(known, decision) for known, decision in zip(asked, decisions, strict=True)]
        under_way_s = monotonic() - self._begun_s
        request_ids = self._request_ids or [None] * len(asked)
        return [
            self._told_or_held(known, decision, wait_us, under_way_s, request_id is not None)
            for known, decision, wait_us, request_id in zip(asked, decisions, waits_us, request_ids, strict=True)
        ]

    def _waits(self) -> tuple[list[int | None], int]:
        """How long each call can be held, as the rate limiter is told it, and how many places that has reserved."""
        waits_us: list[int | None] = []
        reserved = 0
        for number, known in zip(self._numbers, self._asked, strict=True):
            wait_us = None
            if known.call.outline.can_wait:
                deadline_s = self._deadlines_s[number]
                wait_us = self._door.room.reserve(None if deadline_s == inf else deadline_s - self._begun_s)
                reserved += wait_us != 0
            waits_us.append(wait_us)
        return waits_us, reserved

    def _told_or_held(
        self,
        known: Known[W],
        decision: Decision | StoreError,
        longest_us: int | None,
        under_way_s: float,
        has_id: bool,
    ) -> Answered:
        """A wait is counted from now.

        The store said how long from its own moment, which lies between sending and now. Later is the safe side:
        counted from sending, a call could be answered before its slot. What that is too late by must not cost a caller
        its deadline, so there the time under way is taken off.

        A caller with an id that leaves may come again, and is not charged for its slot then: the slot stays its own.
        """
        answer = self._door.told(known, decision)
        if isinstance(answer, Failure) or isinstance(decision, StoreError) or not decision.wait_us:
            return answer
        latest_s = inf if longest_us is None else longest_us / 1e6 - under_way_s
        wait_s = min(decision.wait_us / 1e6, latest_s)
        if has_id and decision.without_store is None:  # what is decided here is not known by its id
            return Held(answer, wait_s, object(), _nothing_back, latest_s)
        return Held(
            answer,
            wait_s,
            _queue(known.call, decision),
            partial(self._door.limiter.give_back, known.call, decision),
            latest_s,
        )


async def _nothing_back() -> None: ...


def _queue(call: Call, decision: Decision) -> Hashable:
    """Calls that wait for slots of one limit, all of the same size: each can take the other's.

    A call that waits for several limits at once stands by itself, since moving up for one may be too early for another.
    """
    assert call.prepared is not None
    sizes = [
        step.cost
        for status in decision.statuses
        for step, reading in zip(status.slot.steps, status.readings, strict=True)
        if reading.wait_us
    ]
    return (call.prepared.keys[decision.held_by], sizes[0]) if len(sizes) == 1 else object()
