"""Encoder of a batch of plans as script arguments (lua/runs.lua), and decoder of the reply (lua/decide.lua).

Both stores encode alike; only the representation of a key differs. A batch is joined from keys and specs that each
plan has ready.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from hashlib import blake2b
from struct import pack
from typing import Generic, NamedTuple, TypeVar

from ratelimit_rls.core.calendar import Bounds, bounds
from ratelimit_rls.core.model import (
    Algorithm,
    Charge,
    DescriptorPlan,
    Penalty,
    PlanTemplate,
    Purpose,
    Step,
    StoreResult,
    Watcher,
    construct,
)
from ratelimit_rls.errors import StoreError, UnknownState

MAX_BATCH_STEPS = 128
"""Maximum number of limits that one run of the script decides, so that no run occupies Redis for more than about a
millisecond. Only a single call with more limits exceeds it, since a call is never split."""

IN_SEQUENCE = 0
"""Number in the place of the number of keys, if no key occurs twice and the calls have no options."""

CALL_QUOTA_PASSES = 1
CALL_SHADOWED = 2
CALL_MAX_WAIT = 4
CALL_REFUND = 8
CALL_IDEMPOTENT = 16
CALL_HITS = 32
STEP_ALWAYS = 1
STEP_SHADOW = 2
STEP_QUOTA = 4
STEP_JOINED = 8
STEP_DELAY_US = 16
"""Multiplied by the microseconds that the step may wait."""

VERDICT_UNKNOWN_STATE = -1

MAX_WAIT_US = 2**32 - 1

DEFAULT_IDEMPOTENCY_S = 300
"""Default time in which a call with a request id is counted only once."""

Arg = TypeVar("Arg", bound=Hashable)

Passed = tuple[int, tuple[int, ...]]
"""Result of a part of a call that passes: the time of the decision, and the numbers as in StoreResult."""

PartResult = StoreResult | StoreError | Passed


class PlanLayout(Generic[Arg]):
    """The encoding shared by all plans of one template. It is equal to no other.

    It is no dataclass, because mypyc compiles none that is generic (docs/adr/0035).
    """

    __slots__ = (
        "decode_key",
        "descriptor_plans",
        "encode",
        "flags",
        "frees_capacity",
        "kind",
        "purpose",
        "windows_us",
    )

    def __init__(
        self,
        kind: bytes | CalendarKind,
        windows_us: tuple[int, ...],
        flags: int,
        descriptor_plans: tuple[DescriptorPlan, ...],
        encode: Callable[[bytes], Arg],
        decode_key: Callable[[Arg], bytes],
        frees_capacity: bool = False,
        purpose: Purpose = Purpose.DECIDE,
    ) -> None:
        """`kind` is the line with the flags of a call, and a spec for each step and each watcher.

        `windows_us` has the length of each step's window; 0: not a fixed window since the epoch.
        """
        self.kind = kind
        self.windows_us = windows_us
        self.flags = flags
        self.descriptor_plans = descriptor_plans
        self.encode = encode
        self.decode_key = decode_key
        self.frees_capacity = frees_capacity
        self.purpose = purpose

    @property
    def operation(self) -> bytes:
        """Identify the operation among others on the same counters: the hits and the purpose."""
        costs = [str(step.cost) for descriptor_plan in self.descriptor_plans for step in descriptor_plan.steps]
        return " ".join([self.purpose.value, *costs]).encode()


class EncodedPlan(NamedTuple, Generic[Arg]):
    """A plan as its store sends it: its keys, ready to be joined, and the layout it shares with others."""

    keys: tuple[Arg, ...]
    layout: PlanLayout[Arg]
    max_wait_us: int | None = None
    charged_at_us: int | None = None  # of a refund: when the refunded hits were charged
    hits: int | None = None  # replaces every step's cost: to refund, or to take as many of them as are left
    idempotency_key: Arg | None = None  # where the result for the call's request id is stored

    @property
    def frees_capacity(self) -> bool:
        return self.charged_at_us is not None or self.layout.frees_capacity

    @property
    def own_bytes(self) -> int:
        return 0

    @property
    def is_unmodified(self) -> bool:
        return self.max_wait_us is self.charged_at_us is self.hits is self.idempotency_key is None

    def with_max_wait(self, max_wait_us: int) -> EncodedPlan[Arg]:
        return self._replace(max_wait_us=min(max_wait_us, MAX_WAIT_US))

    def idempotent(self, request_id: bytes, whole: Sequence[Arg] = ()) -> EncodedPlan[Arg]:
        """`whole` are the keys of the call of which this plan is a part."""
        layout = self.layout
        keys = [layout.decode_key(key) for key in (*self.keys, *whole)]
        return self._replace(idempotency_key=layout.encode(make_idempotency_key(keys, layout.operation, request_id)))

    def take_up_to(self, hits: int) -> EncodedPlan[Arg]:
        return self._replace(hits=hits)

    def refund(self, hits: int, charged_at_us: int) -> EncodedPlan[Arg]:
        return self._replace(hits=hits, charged_at_us=charged_at_us)


def make_idempotency_key(keys: Sequence[bytes], operation: bytes, request_id: bytes) -> bytes:
    """Return a key in the slot of the first key that is unique per request id, set of counters and operation."""
    digest = blake2b(digest_size=16)
    for text in (*keys, operation, request_id):
        digest.update(b"%d:%s" % (len(text), text))
    tag, _, _ = keys[0].partition(b"}")
    return b"%s}:once:%s" % (tag, digest.hexdigest().encode())


class ScriptCall(NamedTuple, Generic[Arg]):
    """The arguments of one run of the script."""

    keys: Sequence[Arg]
    text: bytes  # the calls, after a line for each kind of them; a jitter line goes before it


class CalendarSpec:
    """The spec of a calendar limit: the windows around the current time are filled in when a batch is sent."""

    def __init__(self, step: Step, joined: bool) -> None:
        self._step = step
        self._joined = joined
        self._bounds = Bounds(0, 0, 0)
        self._ready: bytes

    def at(self, now_us: int) -> bytes:
        if not self._bounds.start_us <= now_us < self._bounds.next_us:
            limit = self._step.limit
            self._bounds = bounds(limit.unit, limit.timezone, now_us)
            self._ready = limit_spec(self._step, self._joined, b"%d %d %d" % self._bounds)
        return self._ready


class CalendarKind:
    """The line of calls with calendar limits."""

    def __init__(self, flags: int, specs: Sequence[bytes | CalendarSpec]) -> None:
        self._flags = flags
        self._specs = specs

    def at(self, now_us: int) -> bytes:
        return _kind(self._flags, [spec.at(now_us) if isinstance(spec, CalendarSpec) else spec for spec in self._specs])


def _kind(flags: int, specs: Iterable[bytes]) -> bytes:
    return b";".join([b"%d" % flags, *specs])


def limit_spec(step: Step, joined: bool, window: bytes | None = None) -> bytes:
    """Return the spec of a limit. `joined`: the step belongs to the same descriptor as the one before it."""
    limit = step.limit
    flags = STEP_ALWAYS if step.charge is Charge.ALWAYS else 0
    flags += STEP_SHADOW if step.shadow_mode else 0
    flags += STEP_QUOTA if step.quota_mode else 0
    flags += STEP_JOINED if joined else 0
    flags += STEP_DELAY_US * step.max_delay_us
    name = limit.algorithm.value.encode()
    return _join(name, limit.requests_per_unit, window or limit.window_us, limit.burst, step.cost, flags)


def watcher_spec(watcher: Watcher, cost: int) -> bytes:
    if isinstance(watcher, Penalty):
        multipliers = b" ".join(b"%d" % multiplier for multiplier in watcher.multipliers)
        return _join(b"penalty", watcher.after, watcher.within_us, multipliers, cost, STEP_JOINED)
    return _join(b"warning", watcher.permille, 0, watcher.leave_permille, cost, STEP_JOINED)


def _join(*fields: bytes | int) -> bytes:
    return b"|".join([field if isinstance(field, bytes) else b"%d" % field for field in fields])


def make_layout(
    template: PlanTemplate, encode: Callable[[bytes], Arg], decode_key: Callable[[Arg], bytes]
) -> PlanLayout[Arg]:
    """Build the layout of a template. `encode` makes a key what its store sends."""
    flags = CALL_QUOTA_PASSES if template.quota_passes else 0
    flags += CALL_SHADOWED if template.shadow_mode else 0
    specs = [spec for descriptor_plan in template.descriptor_plans for spec in _specs(descriptor_plan)]
    undated = [spec for spec in specs if isinstance(spec, bytes)]
    windows_us = tuple(us for descriptor_plan in template.descriptor_plans for us in _windows_us(descriptor_plan))
    frees_capacity = any(step.cost < 0 for step in template.steps)
    return PlanLayout(
        _kind(flags, undated) if len(undated) == len(specs) else CalendarKind(flags, specs),
        windows_us,
        flags,
        template.descriptor_plans,
        encode,
        decode_key,
        frees_capacity,
        template.purpose,
    )


def _specs(descriptor_plan: DescriptorPlan) -> Iterator[bytes | CalendarSpec]:
    for number, step in enumerate(descriptor_plan.steps):
        yield CalendarSpec(step, number > 0) if step.limit.timezone else limit_spec(step, number > 0)
    for watcher in descriptor_plan.watchers:
        yield watcher_spec(watcher, descriptor_plan.steps[0].cost)


def _windows_us(descriptor_plan: DescriptorPlan) -> Iterator[int]:
    for step in descriptor_plan.steps:
        limit = step.limit
        yield limit.window_us if limit.algorithm is Algorithm.FIXED_WINDOW and not limit.timezone else 0
    for _ in descriptor_plan.watchers:
        yield 0


def jitter_line(jitter_ms: int) -> bytes:
    """Return the first line of a run's text: the limit of what is added to TTLs."""
    return b"%d\n" % jitter_ms


NO_JITTER = jitter_line(0)


def encode_batch(
    batch: Sequence[EncodedPlan[Arg]],
    now_us: int,
    idempotency_s: int = DEFAULT_IDEMPOTENCY_S,
    *,
    spans_slots: bool = False,
) -> ScriptCall[Arg]:
    """Encode a batch whose keys are on one server. `spans_slots`: on a cluster, they are not all in one slot.

    `now_us` selects calendar windows: it may differ from the decision's time by less than one.
    """
    keys: list[Arg] = []
    kinds: dict[bytes | CalendarKind, int] = {}
    numbers = [IN_SEQUENCE]
    for plan_keys, layout, max_wait_us, charged_at_us, hits, idempotency_key in batch:
        if not (max_wait_us is charged_at_us is hits is idempotency_key is None):
            return _encode_in_full(batch, now_us, idempotency_s, spans_slots)
        keys += plan_keys
        numbers.append(kinds.setdefault(layout.kind, len(kinds)))
    if len(set(keys)) < len(keys):
        return _encode_in_full(batch, now_us, idempotency_s, spans_slots)
    return ScriptCall(keys, _text(kinds, now_us, numbers))


def _encode_in_full(
    batch: Sequence[EncodedPlan[Arg]], now_us: int, idempotency_s: int, spans_slots: bool
) -> ScriptCall[Arg]:
    """Encode a batch in which keys occur twice, or calls have options."""
    keys: dict[Arg, int] = {}
    kinds: dict[bytes | CalendarKind, int] = {}
    numbers: list[int] = []
    groups: list[int] = []  # each of one slot: the keys that a plan is the first to use
    for plan in batch:
        keys_before = len(keys)
        numbers += kinds.setdefault(plan.layout.kind, len(kinds)), *_options(plan, keys, idempotency_s)
        numbers += [keys.setdefault(key, len(keys)) for key in plan.keys]
        if len(keys) > keys_before:
            groups.append(len(keys) - keys_before)
    head = [len(groups), *groups] if spans_slots else [0]
    return ScriptCall(list(keys), _text(kinds, now_us, [len(keys), *head, *numbers]))


def _text(kinds: Iterable[bytes | CalendarKind], now_us: int, numbers: Sequence[int]) -> bytes:
    lines = [kind if isinstance(kind, bytes) else kind.at(now_us) for kind in kinds]
    return b"%s\n\n%s" % (b"\n".join(lines), pack(f">{len(numbers)}H", *numbers))


def _options(plan: EncodedPlan[Arg], keys: dict[Arg, int], idempotency_s: int) -> Iterator[int]:
    """Yield the flags of a call beyond those of its kind, and the options that they add."""
    flags, more = 0, list[int]()
    if plan.max_wait_us is not None and plan.charged_at_us is None:
        flags += CALL_MAX_WAIT
        more += _halves(plan.max_wait_us)
    if plan.charged_at_us is not None:
        flags += CALL_REFUND
        more += _halves(plan.charged_at_us >> 32, plan.charged_at_us)
    if plan.idempotency_key is not None:
        flags += CALL_IDEMPOTENT
        more += keys.setdefault(plan.idempotency_key, len(keys)), idempotency_s
    if plan.hits is not None:
        flags += CALL_HITS
        more += _halves(plan.hits)
    yield from (flags, *more)


def _halves(*numbers: int) -> Iterator[int]:
    """Yield the lowest 32 bits of each number as two 16-bit halves."""
    for number in numbers:
        yield from (number >> 16 & 0xFFFF, number & 0xFFFF)


def split_runs(batch: Sequence[EncodedPlan[Arg]]) -> Iterator[Sequence[EncodedPlan[Arg]]]:
    """Split a batch, in order, into runs of at most MAX_BATCH_STEPS limits."""
    start = steps = 0
    sizes = [len(plan.keys) for plan in batch]
    if sum(sizes) > MAX_BATCH_STEPS:
        for end, size in enumerate(sizes):
            if steps and steps + size > MAX_BATCH_STEPS:
                yield batch[start:end]
                start, steps = end, 0
            steps += size
    if start < len(batch):
        yield batch[start:]


def decode_reply(batch: Sequence[EncodedPlan[Arg]], reply: Sequence[int]) -> list[StoreResult | StoreError]:
    reply = tuple(reply)
    if is_short(reply, batch):
        now_us = reply[0]
        return [
            construct(StoreResult, (False, now_us, numbers, 0, False, False, ()))
            for numbers in _short_numbers(batch, reply)
        ]
    now_us = reply[0]
    results: list[StoreResult | StoreError] = []
    at = 1
    for plan in batch:
        verdict = reply[at]
        first, at = at + 1, at + 1 + 3 * len(plan.keys)
        numbers = reply[first:at]
        if len(numbers) != at - first:
            raise IndexError("the reply is too short")
        if verdict == VERDICT_UNKNOWN_STATE:
            results.append(_unknown_state(plan, numbers[::3]))
        elif plan.hits is None or plan.charged_at_us is not None:
            results.append(construct(StoreResult, (verdict % 2 == 1, now_us, numbers, 0, False, verdict > 1, ())))
        else:
            results.append(StoreResult(verdict == 0, now_us, numbers, granted=verdict))
    return results


def is_short(reply: Sequence[int], batch: Sequence[EncodedPlan[Arg]]) -> bool:
    """Return True if the reply has only what is left of each limit: all are fixed windows that allow."""
    return len(reply) == 1 + sum([len(plan.keys) for plan in batch])


def decode_parts(batch: Sequence[EncodedPlan[Arg]], reply: Sequence[int]) -> Sequence[PartResult]:
    """Decode a reply to parts of calls: of those that pass, only what the result of the call needs."""
    reply = tuple(reply)
    if is_short(reply, batch):
        return [(reply[0], numbers) for numbers in _short_numbers(batch, reply)]
    return decode_reply(batch, reply)


def _short_numbers(batch: Sequence[EncodedPlan[Arg]], reply: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the numbers of each result for a short reply."""
    now_us, *left = reply
    windows_us = [plan.layout.windows_us for plan in batch]
    if len(left) == len(batch):  # one limit each, as nearly all parts of calls have
        return [(one, 0, window_us - now_us % window_us) for one, (window_us,) in zip(left, windows_us, strict=True)]
    results: list[tuple[int, ...]] = []
    at = 0
    for own in windows_us:
        numbers: tuple[int, ...] = ()
        for window_us in own:
            numbers += left[at], 0, window_us - now_us % window_us
            at += 1
        results.append(numbers)
    return results


def _unknown_state(plan: EncodedPlan[Arg], left: Sequence[int]) -> UnknownState:
    """Return the error of a call that was not decided. `left` is 1 for each key whose state is unknown."""
    marked = [key for key, is_unknown in zip(plan.keys, left, strict=True) if is_unknown]
    if not marked and plan.idempotency_key is not None:
        marked = [plan.idempotency_key]
    return UnknownState(b", ".join(map(plan.layout.decode_key, marked)).decode(errors="replace"))
