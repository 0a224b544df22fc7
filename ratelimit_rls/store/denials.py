"""Refusals known to hold, told again without asking the store until the moment they end.

    batch ─► what is refused still ─► told here, with the time gone by taken off
          └► the rest ─► the store ─► refusals that hold are remembered, each until its end

Whoever is refused and asks on costs the store nothing, so a flood of refused calls stays in the process it came to.

Guarantee: a call is answered from here only if the store would refuse it, too, and nothing would be counted by asking.
So a refusal is remembered only if it charges nobody (or as the reference's local cache does it), and only while this
process hears at once of every counter that was given something back. Of limits that refuse, an answer told again says
what the store would say if nobody else had come meanwhile; of others, how they stood when it was asked.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from operator import itemgetter
from random import random
from time import monotonic
from typing import Any

from ratelimit_rls.core.model import (
    Algorithm,
    Answer,
    Charge,
    Outline,
    Penalty,
    Plan,
    Purpose,
    Reading,
    Step,
    filled,
)
from ratelimit_rls.core.plan import per_outline
from ratelimit_rls.core.refund import Refund
from ratelimit_rls.errors import StoreError
from ratelimit_rls.store.base import Prepared, Store
from ratelimit_rls.store.batch import CALL_SHADOWED, Form

LONGEST_US = 600 * 1_000_000
"""For how long a refusal is remembered at most; then the store is asked, and says it again if it is so. Whatever went
wrong with the news of a counter is over by then."""

_SAFE_SHARE = 1 - 500e-6
"""Of the time a refusal holds: so much may a clock that NTP corrects run slower than the store's."""

_MARKS = 1024
_SWEPT_AT_ONCE = 2

# Weighed with tracemalloc on CPython 3.11: an entry's objects with its places in the tables, each key of its plan, and
# the set of those whom a key refuses, as if it refused nobody else.
_ENTRY_BYTES = 650
_KEY_BYTES = 180
_REFUSING_BYTES = 330
# What all entries of one form share, rules and outline included, counted as if nobody else had it.
_FORM_BYTES = 1700
_FORM_KEY_BYTES = 700


class _Entry:
    """A refusal, and until when it holds."""

    __slots__ = ("answer", "asked", "end_s", "place", "received_s", "refusing", "unused", "weight_bytes")

    def __init__(self, asked: Prepared, answer: Answer, received_s: float, end_s: float) -> None:
        self.asked = asked
        self.answer = answer
        self.received_s = received_s
        self.end_s = end_s
        self.refusing = _refusing(asked, answer)
        self.unused = tuple(_unused(asked.form, answer.readings))
        self.weight_bytes = _ENTRY_BYTES + _REFUSING_BYTES * len(self.refusing)
        self.weight_bytes += sum(_KEY_BYTES + len(key) for key in asked.keys if isinstance(key, bytes))
        self.place = -1  # in the list that lots are drawn from

    def told(self, now_s: float) -> Answer:
        """The answer as it is now.

        The time gone by is counted from when the answer was here: the store decided before that, so whoever waits as
        long as it is told comes not before the end, which the store knows exactly.
        """
        gone_us = int((now_s - self.received_s) * 1e6)
        readings = [
            filled(
                Reading,
                (
                    left if retry_us or reset_us > gone_us else unused,
                    retry_us - gone_us if retry_us > 0 else retry_us,
                    reset_us - gone_us if reset_us > gone_us else 0,
                ),
            )
            for (left, retry_us, reset_us), unused in zip(self.answer.readings, self.unused, strict=True)
        ]
        return filled(Answer, (True, self.answer.now_us + gone_us, tuple(readings), 0, True, False, ()))


class Denials:
    """`most_bytes` bounds what is kept; when full, one that is drawn by lot goes.

    Dropping those that end soonest would let refusals that hold for a day, of callers that never come back, keep out
    those of everybody who is hammering now.
    """

    decides_here = False

    def __init__(
        self,
        store: Store,
        most_bytes: int,
        *,
        as_the_reference: bool,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`as_the_reference`: hits on a fixed window that is over are not counted, even under `charge: always`.

        Nothing is remembered until `listening` says that news of freed counters comes. The clock is in seconds.
        """
        self._store = store
        self._most_bytes = most_bytes
        self._as_the_reference = as_the_reference
        self._clock = clock
        self._listens = False
        self._some_give_back = False  # as far as plans were seen
        self._entries: dict[Prepared, _Entry] = {}
        self._drawn_from: list[_Entry] = []
        self._refused_by: dict[Hashable, set[_Entry]] = {}  # a counter's key: whoever it refuses
        self._forms: dict[Form[object], int] = {}  # how many entries each has
        self._held_bytes = 0
        # What was sent before a counter was freed must not be remembered after it. Each news has a number; by the hash
        # of a key, the number of the last that may have concerned it.
        self._news = 0
        self._all_freed_at = 0
        self._freed_at = [0] * _MARKS
        self._answered = 0
        self._forgotten = 0
        self._evicted = 0

    def prepare(self, plan: Plan) -> Prepared:
        if not self._some_give_back and _may_give_back(plan.outline):
            self._some_give_back = True
        return self._store.prepare(plan)

    def opposite(self, prepared: Prepared, refund: Refund) -> Prepared:
        self._some_give_back = True
        return self._store.opposite(prepared, refund)

    async def spend(self, batch: Sequence[Prepared]) -> list[Answer | StoreError]:
        if self._some_give_back:
            freed = [key for asked in batch if asked.gives_back for key in asked.keys]
            if freed:
                return await self._spend_and_free(batch, freed)
        if self._entries:
            return await self._tell_or_ask(batch)
        return await self._ask(batch)

    async def _spend_and_free(self, batch: Sequence[Prepared], freed: list[Hashable]) -> list[Answer | StoreError]:
        self._drop_refused_by(freed)  # for those behind it in the batch
        try:
            return await self._tell_or_ask(batch)
        finally:
            self.forget(freed)  # whatever came of it: it may have been given back

    async def _tell_or_ask(self, batch: Sequence[Prepared]) -> list[Answer | StoreError]:
        now_s = self._clock()
        self._sweep(now_s)
        found = list(map(self._entries.get, batch))
        if not any(found):
            return await self._ask(batch)
        answers: list[Any] = []
        unknown = []
        for asked, entry in zip(batch, found, strict=True):
            if entry is not None and now_s < entry.end_s:
                answers.append(entry.told(now_s))
                continue
            if entry is not None and entry.place >= 0:
                self._drop(entry)
            answers.append(None)
            unknown.append(asked)
        self._answered += len(batch) - len(unknown)
        if not unknown:
            return answers
        replies = iter(await self._ask(unknown))
        return [next(replies) if answer is None else answer for answer in answers]

    async def _ask(self, batch: Sequence[Prepared]) -> list[Answer | StoreError]:
        sent_s, news = self._clock(), self._news
        answers = await self._store.spend(batch)
        if self._listens and _some_refused(answers):
            for asked, answer in zip(batch, answers, strict=True):
                if isinstance(answer, Answer) and answer.refused:
                    self._remember(asked, answer, sent_s, news)
        return answers

    def _remember(self, asked: Prepared, answer: Answer, sent_s: float, news: int) -> None:
        """`news` is the number of the last there was when it was sent."""
        holds_us = min(self._holds_us(asked, answer), LONGEST_US)
        now_s = self._clock()
        # Counted from when it was sent: the store decided later, so here it ends first.
        end_s = sent_s + holds_us * _SAFE_SHARE / 1e6
        if end_s <= now_s:
            return
        entry = _Entry(asked, _as_counted(asked, answer), now_s, end_s)
        if self._all_freed_at > news or any(self._freed_at[hash(key) % _MARKS] > news for key in entry.refusing):
            return
        before = self._entries.get(asked)
        if before is not None:
            self._drop(before)
        self._keep(entry)
        while self._held_bytes > self._most_bytes:
            self._drop(self._drawn())
            self._evicted += 1

    def _holds_us(self, asked: Prepared, answer: Answer) -> int:
        """For how long asking again would be answered alike, and would count nothing; 0: it would not.

        That is until the first of the limits that refuse does so no more: what is told would be another thing then,
        and who is charged may be, too. Only a cooldown that holds keeps refusals from being violations.
        """
        form = asked.form
        if form.flags & CALL_SHADOWED or form.purpose is Purpose.REPORT or not asked.is_plain:
            return 0
        readings = iter(answer.readings)
        waits_us = []
        for slot in form.slots:
            for step in slot.steps:
                reading = next(readings)
                if step.quota_mode or not self._charges_nothing(step, reading):
                    return 0
                if not reading.allowed:  # what is never let in is told when its limit is whole again
                    waits_us.append(reading.retry_us if reading.retry_us > 0 else reading.reset_us)
            for watcher in slot.watchers:
                reading = next(readings)
                if isinstance(watcher, Penalty):
                    if reading.retry_us <= 0:
                        return 0
                    waits_us.append(reading.retry_us)
        return min((wait_us for wait_us in waits_us if wait_us > 0), default=0)

    def _charges_nothing(self, step: Step, reading: Reading) -> bool:
        """Of a call that is refused."""
        if step.charge is Charge.ADMITTED or step.cost == 0:
            return True
        is_window = step.limit.algorithm is Algorithm.FIXED_WINDOW
        return self._as_the_reference and is_window and not reading.allowed and reading.left < 0

    def forget(self, keys: Iterable[Hashable]) -> None:
        """These counters (as `Prepared.keys` has them) were given something back, or forgotten."""
        self._news += 1
        freed = list(keys)
        for key in freed:
            self._freed_at[hash(key) % _MARKS] = self._news
        self._drop_refused_by(freed)

    def forget_all(self) -> None:
        """The rules have changed, or nobody knows what was given back."""
        self._news += 1
        self._all_freed_at = self._news
        self._forgotten += len(self._entries)
        self._entries.clear()
        self._drawn_from.clear()
        self._refused_by.clear()
        self._forms.clear()
        self._held_bytes = 0

    def listening(self, up: bool) -> None:
        """Whether all that is freed from now on will be told to `forget`. If not, nothing is remembered."""
        self._listens = up
        self.forget_all()

    def gauges(self) -> Iterator[tuple[str, int]]:
        """`answered`: calls answered from here. `evicted` that grows fast says that the budget is too small."""
        yield "ratelimit.denials.remembered", len(self._entries)
        yield "ratelimit.denials.bytes", self._held_bytes
        yield "ratelimit.denials.answered", self._answered
        yield "ratelimit.denials.forgotten", self._forgotten
        yield "ratelimit.denials.evicted", self._evicted

    async def close(self) -> None:
        await self._store.close()

    def _keep(self, entry: _Entry) -> None:
        self._entries[entry.asked] = entry
        entry.place = len(self._drawn_from)
        self._drawn_from.append(entry)
        for key in entry.refusing:
            self._refused_by.setdefault(key, set()).add(entry)
        form = entry.asked.form
        users = self._forms[form] = self._forms.get(form, 0) + 1
        self._held_bytes += entry.weight_bytes + (_form_bytes(form) if users == 1 else 0)

    def _drop(self, entry: _Entry) -> None:
        del self._entries[entry.asked]
        last = self._drawn_from.pop()
        if last is not entry:
            self._drawn_from[entry.place] = last
            last.place = entry.place
        entry.place = -1
        for key in entry.refusing:
            refused = self._refused_by[key]
            refused.remove(entry)
            if not refused:
                del self._refused_by[key]
        form = entry.asked.form
        users = self._forms[form] = self._forms[form] - 1
        if not users:
            del self._forms[form]
        self._held_bytes -= entry.weight_bytes + (0 if users else _form_bytes(form))

    def _drop_refused_by(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            for entry in list(self._refused_by.get(key, ())):
                self._drop(entry)
                self._forgotten += 1

    def _drawn(self) -> _Entry:
        return self._drawn_from[int(random() * len(self._drawn_from))]

    def _sweep(self, now_s: float) -> None:
        """Look at some, by lot, so that those whose callers never came back do not pile up when they are over."""
        for _ in range(_SWEPT_AT_ONCE):
            if self._drawn_from:
                entry = self._drawn()
                if entry.end_s <= now_s:
                    self._drop(entry)


@per_outline
def _may_give_back(outline: Outline) -> bool:
    """At once, or later: of what is leased some is returned."""
    gives_back = any(step.cost < 0 for step in outline.steps)
    return gives_back or any(slot.rule is not None and slot.rule.hot is not None for slot in outline.slots)


_first = itemgetter(0)


def _some_refused(answers: Sequence[Any]) -> bool:
    """False: none of them is. Most batches are so, and are looked through several times faster than one by one."""
    try:
        return any(map(_first, answers))  # Answer.refused
    except TypeError:  # there is a StoreError among them
        return True


def _refusing(asked: Prepared, answer: Answer) -> tuple[Hashable, ...]:
    """The counters that refuse: while none of them is freed, whatever happens to others lets nobody in."""
    pairs = zip(asked.keys, answer.readings, strict=True)
    return tuple({key: None for key, reading in pairs if not reading.allowed})


def _as_counted(asked: Prepared, answer: Answer) -> Answer:
    """What the next call would be told of limits that it would have been charged: each is as far over as this one."""
    steps = [step for slot in asked.form.slots for step in (*slot.steps, *(None for _ in slot.watchers))]
    return answer._replace(
        readings=tuple(
            reading._replace(left=reading.left - step.cost)
            if step is not None and step.charge is Charge.ALWAYS
            else reading
            for step, reading in zip(steps, answer.readings, strict=True)
        )
    )


def _unused(form: Form[object], readings: Sequence[Reading]) -> Iterator[int]:
    """For each reading what is left when its reset has come; a watcher has nothing to reset."""
    at = 0
    for slot in form.slots:
        for step in slot.steps:
            yield step.limit.burst or step.limit.requests_per_unit
            at += 1
        for _ in slot.watchers:
            yield readings[at].left
            at += 1


def _form_bytes(form: Form[object]) -> int:
    return _FORM_BYTES + _FORM_KEY_BYTES * len(form.specs)
