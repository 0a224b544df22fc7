"""The store without Redis: the same Lua under LuaJIT, over a keyspace in this process.

It is the default store, and what tests of rules run on with a clock of their own. Its counters are one process's own
and end with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from lupa.luajit21 import LuaRuntime

from ratelimit_rls.core.model import Answer, Outline, Plan
from ratelimit_rls.core.plan import per_outline
from ratelimit_rls.core.refund import Refund
from ratelimit_rls.errors import StoreError
from ratelimit_rls.store.base import Prepared
from ratelimit_rls.store.batch import COUNTED_ONCE_S, DatedSpec, Form, PackedPlan, form_of, pack_batch, runs, unpack
from ratelimit_rls.store.script import definitions, read

DEFAULT_BUDGET_BYTES = 256 * 2**20

MOST_SPECS = 1000
"""Kept as Lua has read them. Rules make few; hits and limits that requests bring make many, and all are read again."""

# Arguments arrive as one flat list, since building tables across the language border costs more than the decision. A
# spec once read is found again by its arguments, one after the other: reading it anew costs as much as using it.
_PROGRAM = """
{keyspace}
return function(budget_bytes)
  local redis, set_now, size, settle = new_keyspace(budget_bytes)
  {definitions}
  local read_new_spec, specs_read, count = read_spec, {{}}, 0
  local function read_spec(algorithms, argv, at)
    local found = specs_read
    for i = at, at + 5 do
      local next_found = found[argv[i]]
      if not next_found then
        next_found = {{}}
        found[argv[i]] = next_found
      end
      found = next_found
    end
    if not found.spec then
      found.spec = read_new_spec(algorithms, argv, at)
      count = count + 1
    end
    return found.spec
  end
  local function decide(KEYS, ARGV)
    {decide}
  end
  local function run(now, calls, keys, ...)
    local KEYS, ARGV = {{}}, {{ now, 0, calls, select(keys + 1, ...) }}
    for i = 1, keys do
      KEYS[i] = (select(i, ...))
    end
    set_now(now)
    local reply = decide(KEYS, ARGV)
    settle()
    if count > {most_specs} then
      specs_read, count = {{}}, 0
    end
    return unpack(reply)
  end
  local function forget(now, key)
    set_now(now)
    return redis.call("DEL", key)
  end
  local function present(now, key)
    set_now(now)
    return redis.call("MGET", key)[1] ~= false or redis.call("LLEN", key) > 0
  end
  return run, size, forget, present
end
"""

_Part = Any  # a key (bytes) or a spec (a tuple of six)


class Alone(NamedTuple):
    """A plan that goes without others, as it would have to be packed every time."""

    plan: PackedPlan[_Part]
    arguments: tuple[_Part, ...]  # of its run; none, if they depend on the moment or two of its keys are the same


class Size(NamedTuple):
    keys: int
    bytes: int
    evicted: int  # states dropped for room while they still mattered


def wall_clock_us() -> int:
    return time.time_ns() // 1000


class EmbeddedStore:
    """Decides in the calling thread, in a few microseconds a call."""

    decides_here = True

    def __init__(
        self,
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
        clock: Callable[[], int] = wall_clock_us,
        once_s: int = COUNTED_ONCE_S,
    ) -> None:
        """`once_s`: for how long a call that carries an id is counted once."""
        self._clock = clock
        self._once_s = once_s
        lua = LuaRuntime(encoding=None, unpack_returned_tuples=True, register_eval=False, register_builtins=False)
        program = _PROGRAM.format(
            keyspace=read("keyspace"), definitions=definitions(), decide=read("decide"), most_specs=MOST_SPECS
        )
        self._run, self._size, self._forget, self._present = lua.execute(program.encode())(budget_bytes)

    def prepare(self, plan: Plan) -> PackedPlan[_Part]:
        return PackedPlan(plan.keys, _form(plan.outline))

    def opposite(self, prepared: Prepared, refund: Refund) -> Prepared:
        charged = cast("PackedPlan[_Part]", prepared)
        own = tuple(charged.keys[number] for number in refund.numbers)
        # The earliest, since what is given back must not go to a window that was never charged.
        moment_us = min(refund.charged_at_us)
        return PackedPlan(own, _form(refund.outline), charged_at_us=moment_us, record=charged.record)

    async def spend(self, batch: Sequence[Prepared]) -> list[Answer | StoreError]:
        return self.decide(cast("Sequence[PackedPlan[_Part]]", batch))

    def decide(self, batch: Sequence[PackedPlan[_Part]]) -> list[Answer | StoreError]:
        answers: list[Answer | StoreError] = []
        now_us = self._clock()
        for run in runs(batch):
            packed = pack_batch(run, now_us, self._once_s)
            specs = [argument for spec in packed.specs for argument in spec]
            reply = self._run(now_us, packed.calls, len(packed.keys), *packed.keys, *specs)
            answers += unpack(run, [int(number) for number in reply])
        return answers

    def prepare_alone(self, plan: Plan) -> Alone:
        """For `decide_alone`: worth its memory where a plan is decided at a moment of its own, again and again."""
        form, calls, specs = _sent_alone(plan.outline)
        keys = plan.keys
        arguments = (calls, len(keys), *keys, *specs) if specs and len(set(keys)) == len(keys) else ()
        return Alone(PackedPlan(keys, form), arguments)

    def decide_alone(self, alone: Alone) -> Answer | None:
        """None: nothing stands in its way. Most calls are so, and to say more of them would double what they cost."""
        if not alone.arguments:
            (answer,) = self.decide([alone.plan])
            assert isinstance(answer, Answer)
            return answer
        reply = self._run(self._clock(), *alone.arguments)
        if not reply[1] and not any(reply[3::3]):
            return None
        (answer,) = unpack([alone.plan], [int(number) for number in reply])
        return answer

    async def present(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of the keys that have a state."""
        now_us = self._clock()
        return [key for key in keys if self._present(now_us, key)]

    async def forget(self, keys: Sequence[bytes]) -> list[bytes]:
        """Drop the states under these keys; returns those that had one."""
        now_us = self._clock()
        return [key for key in keys if self._forget(now_us, key)]

    def size(self) -> Size:
        return Size(*(int(number) for number in self._size()))

    def gauges(self) -> list[tuple[str, int]]:
        """Its size under the names of metrics. `evicted` above 0 says that the budget is too small."""
        return [(f"ratelimit.embedded_store.{name}", number) for name, number in self.size()._asdict().items()]

    async def close(self) -> None:
        """Nothing to let go of."""


@per_outline
def _form(outline: Outline) -> Form[_Part]:
    return form_of(outline, lambda spec: spec, bytes, bytes)


class _Sent(NamedTuple):
    """What a run with one plan of an outline sends beside the keys; no specs, if they depend on the moment."""

    form: Form[_Part]
    calls: bytes
    specs: tuple[_Part, ...]


@per_outline
def _sent_alone(outline: Outline) -> _Sent:
    form = _form(outline)
    if any(isinstance(spec, DatedSpec) for spec in form.specs):
        return _Sent(form, b"", ())
    packed = pack_batch([PackedPlan(tuple(range(len(form.specs))), form)], 0)
    return _Sent(form, packed.calls, tuple(argument for spec in packed.specs for argument in spec))
