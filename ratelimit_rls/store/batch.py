"""Many plans as one set of script arguments, and the one reply as many answers (lua/decide.lua has the layout).

Both stores pack alike; they differ only in what a key and a spec look like on the way to Lua. So a batch is joined
from parts that each plan has ready, never put together argument by argument.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from struct import pack
from typing import Generic, NamedTuple, TypeVar

from ratelimit_rls.core.calendar import Bounds, bounds
from ratelimit_rls.core.model import Answer, Charge, Outline, Penalty, Purpose, Reading, Slot, Step, Watcher, filled

LARGEST_BATCH_STEPS = 128
"""Limits decided by one run of the script, so that no run holds Redis for more than about a millisecond. Only a single
call with more limits than this exceeds it, since a call is never split."""

CALL_QUOTA_PASSES = 1
CALL_SHADOWED = 2
CALL_PATIENCE = 4
CALL_GIVES_BACK = 8
CALL_COUNTS_ONCE = 16
CALL_TAKES_HITS = 32
STEP_ALWAYS = 1
STEP_SHADOW = 2
STEP_QUOTA = 4
STEP_JOINED = 8
STEP_DELAY_US = 16
"""For each microsecond that the step may wait."""

MOST_PATIENCE_US = 2**32 - 1

COUNTED_ONCE_S = 300
"""For how long a call that carries an id is counted once, unless a store is told otherwise."""

Part = TypeVar("Part", bound=Hashable)


@dataclass(frozen=True, slots=True, eq=False)
class Form(Generic[Part]):
    """What all plans of one outline send alike: a spec for each step and each watcher, ready to be joined."""

    specs: tuple[Part | DatedSpec[Part], ...]
    flags: int
    slots: tuple[Slot, ...]
    part_of_key: Callable[[bytes], Part]
    key_of_part: Callable[[Part], bytes]
    gives_back: bool = False
    purpose: Purpose = Purpose.DECIDE

    @property
    def asked(self) -> bytes:
        """What tells a question from another about the same counters: how many hits, and what for."""
        costs = [str(step.cost) for slot in self.slots for step in slot.steps]
        return " ".join([self.purpose.value, *costs]).encode()


class PackedPlan(NamedTuple, Generic[Part]):
    """A plan as its store sends it: its keys, ready to be joined, and the form it shares with others."""

    keys: tuple[Part, ...]
    form: Form[Part]
    patience_us: int | None = None
    charged_at_us: int | None = None  # of a plan that gives back: the moment at which was charged what it gives
    hits: int | None = None  # in place of every step's cost: to give back, or to take as many of them as there are
    record: Part | None = None  # the key of what was answered under the call's id

    @property
    def gives_back(self) -> bool:
        return self.charged_at_us is not None or self.form.gives_back

    @property
    def own_bytes(self) -> int:
        return 0

    @property
    def is_plain(self) -> bool:
        return self.patience_us is self.charged_at_us is self.hits is self.record is None

    def within(self, patience_us: int) -> PackedPlan[Part]:
        return self._replace(patience_us=min(patience_us, MOST_PATIENCE_US))

    def once(self, request_id: bytes, whole: Sequence[Part] = ()) -> PackedPlan[Part]:
        """`whole` are the keys of the call of which this is a part."""
        form = self.form
        keys = [form.key_of_part(key) for key in (*self.keys, *whole)]
        return self._replace(record=form.part_of_key(record_key(keys, form.asked, request_id)))

    def at_most(self, hits: int) -> PackedPlan[Part]:
        return self._replace(hits=hits)

    def returned(self, hits: int, charged_at_us: int) -> PackedPlan[Part]:
        return self._replace(hits=hits, charged_at_us=charged_at_us)


def record_key(keys: Sequence[bytes], asked: bytes, request_id: bytes) -> bytes:
    """On the slot of the first key, and no other's: neither another id's, nor of other counters or another question."""
    digest = blake2b(digest_size=16)
    for text in (*keys, asked, request_id):
        digest.update(b"%d:%s" % (len(text), text))
    tag, _, _ = keys[0].partition(b"}")
    return b"%s}:once:%s" % (tag, digest.hexdigest().encode())


@dataclass(frozen=True, slots=True)
class Packed(Generic[Part]):
    """The arguments of one run of the script."""

    keys: Sequence[Part]
    specs: Sequence[Part]
    calls: bytes


Spec = tuple[bytes, int, int | bytes, int | bytes, int, int]
"""The six arguments that describe what a step asks of its counter, or a watcher of its state."""


class DatedSpec(Generic[Part]):
    """The spec of a limit by the calendar: which windows are around now is filled in when a batch is sent."""

    def __init__(self, step: Step, joined: bool, part: Callable[[Spec], Part]) -> None:
        self._step = step
        self._joined = joined
        self._part = part
        self._bounds = Bounds(0, 0, 0)
        self._ready: Part

    def at(self, now_us: int) -> Part:
        if not self._bounds.start_us <= now_us < self._bounds.next_us:
            limit = self._step.limit
            self._bounds = bounds(limit.unit, limit.timezone, now_us)
            self._ready = self._part(spec_of(self._step, self._joined, b"%d %d %d" % self._bounds))
        return self._ready


def spec_of(step: Step, joined: bool, window: bytes | None = None) -> Spec:
    """`joined`: the step belongs to the same descriptor as the one before it."""
    limit = step.limit
    flags = STEP_ALWAYS if step.charge is Charge.ALWAYS else 0
    flags += STEP_SHADOW if step.shadow_mode else 0
    flags += STEP_QUOTA if step.quota_mode else 0
    flags += STEP_JOINED if joined else 0
    flags += STEP_DELAY_US * step.max_delay_us
    name = limit.algorithm.value.encode()
    return name, limit.requests_per_unit, window or limit.window_us, limit.burst, step.cost, flags


def watcher_spec(watcher: Watcher, cost: int) -> Spec:
    if isinstance(watcher, Penalty):
        multipliers = b" ".join(b"%d" % multiplier for multiplier in watcher.multipliers)
        return b"penalty", watcher.after, watcher.within_us, multipliers, cost, STEP_JOINED
    return b"warning", watcher.permille, 0, watcher.leave_permille, cost, STEP_JOINED


def form_of(
    outline: Outline,
    part: Callable[[Spec], Part],
    part_of_key: Callable[[bytes], Part],
    key_of_part: Callable[[Part], bytes],
) -> Form[Part]:
    """`part` makes a spec what its store sends; the other two do so for a key, and the other way round."""
    flags = CALL_QUOTA_PASSES if outline.quota_passes else 0
    flags += CALL_SHADOWED if outline.shadow_mode else 0
    specs = [spec for slot in outline.slots for spec in _specs(slot, part)]
    gives_back = any(step.cost < 0 for step in outline.steps)
    return Form(tuple(specs), flags, outline.slots, part_of_key, key_of_part, gives_back, outline.purpose)


def _specs(slot: Slot, part: Callable[[Spec], Part]) -> Iterator[Part | DatedSpec[Part]]:
    for number, step in enumerate(slot.steps):
        yield DatedSpec(step, number > 0, part) if step.limit.timezone else part(spec_of(step, number > 0))
    for watcher in slot.watchers:
        yield part(watcher_spec(watcher, slot.steps[0].cost))


def pack_batch(batch: Sequence[PackedPlan[Part]], now_us: int, once_s: int = COUNTED_ONCE_S) -> Packed[Part]:
    """`now_us` need not be the moment of the decision, only within a window of it."""
    keys: dict[Part, int] = {}
    specs: dict[Part | DatedSpec[Part], int] = {}
    numbers: list[int] = []
    for plan in batch:
        plan_keys, form, patience_us, charged_at_us, hits, record = plan
        if patience_us is charged_at_us is hits is record is None:
            numbers += len(plan_keys), form.flags
        else:
            numbers += _header(plan, keys, once_s)
        form_specs = form.specs
        # By number: `zip(…, strict=True)` would cost every call a quarter of a microsecond.
        for number, key in enumerate(plan_keys):
            numbers += keys.setdefault(key, len(keys)), specs.setdefault(form_specs[number], len(specs))
    dated = [spec.at(now_us) if isinstance(spec, DatedSpec) else spec for spec in specs]
    return Packed(list(keys), dated, pack(f">{len(numbers)}H", *numbers))


def _header(plan: PackedPlan[Part], keys: dict[Part, int], once_s: int) -> Iterator[int]:
    """Of a call that says more than what it asks for."""
    flags, more = plan.form.flags, list[int]()
    if plan.patience_us is not None and plan.charged_at_us is None:
        flags += CALL_PATIENCE
        more += _halves(plan.patience_us)
    if plan.charged_at_us is not None:
        flags += CALL_GIVES_BACK
        more += _halves(plan.charged_at_us >> 32, plan.charged_at_us)
    if plan.record is not None:
        flags += CALL_COUNTS_ONCE
        more += keys.setdefault(plan.record, len(keys)), once_s
    if plan.hits is not None:
        flags += CALL_TAKES_HITS
        more += _halves(plan.hits)
    yield from (len(plan.keys), flags, *more)


def _halves(*numbers: int) -> Iterator[int]:
    """The lowest 32 bits of each, as 16 and 16."""
    for number in numbers:
        yield from (number >> 16 & 0xFFFF, number & 0xFFFF)


def runs(batch: Sequence[PackedPlan[Part]]) -> Iterator[Sequence[PackedPlan[Part]]]:
    """The batch cut into pieces that one run of the script may decide, in order."""
    start = steps = 0
    for end, plan in enumerate(batch):
        if steps and steps + len(plan.keys) > LARGEST_BATCH_STEPS:
            yield batch[start:end]
            start, steps = end, 0
        steps += len(plan.keys)
    if start < len(batch):
        yield batch[start:]


def unpack(batch: Sequence[PackedPlan[Part]], reply: Sequence[int]) -> list[Answer]:
    now_us = reply[0]
    answers = []
    at = 1
    for plan in batch:
        verdict = reply[at]
        first, at = at + 1, at + 1 + 3 * len(plan.keys)
        readings = tuple([filled(Reading, (reply[i], reply[i + 1], reply[i + 2])) for i in range(first, at, 3)])
        if plan.hits is None or plan.charged_at_us is not None:
            answers.append(filled(Answer, (verdict % 2 == 1, now_us, readings, 0, False, verdict > 1, ())))
        else:
            answers.append(Answer(verdict == 0, now_us, readings, granted=verdict))
    return answers
