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
from ratelimit_rls.core.plan import given_back, per_outline
from ratelimit_rls.errors import StoreError
from ratelimit_rls.store.base import Prepared
from ratelimit_rls.store.batch import Form, PackedPlan, form_of, pack_batch, runs, unpack
from ratelimit_rls.store.script import definitions, read

DEFAULT_BUDGET_BYTES = 256 * 2**20

# Arguments arrive as one flat list, since building tables across the language border costs more than the decision.
_PROGRAM = """
{keyspace}
return function(budget_bytes)
  local redis, set_now, size, settle = new_keyspace(budget_bytes)
  {definitions}
  local function decide(KEYS, ARGV)
    {decide}
  end
  local function run(now, calls, keys, ...)
    local KEYS, ARGV = {{}}, {{ now, 0, calls }}
    for i = 1, keys do
      KEYS[i] = (select(i, ...))
    end
    for i = keys + 1, select("#", ...) do
      ARGV[3 + i - keys] = (select(i, ...))
    end
    set_now(now)
    local reply = decide(KEYS, ARGV)
    settle()
    return unpack(reply)
  end
  return run, size
end
"""

_Part = Any  # a key (bytes) or a spec (a tuple of six)


class Size(NamedTuple):
    keys: int
    bytes: int
    evicted: int  # states dropped for room while they still mattered


def wall_clock_us() -> int:
    return time.time_ns() // 1000


class EmbeddedStore:
    """Decides in the calling thread, in a few microseconds a call."""

    def __init__(self, budget_bytes: int = DEFAULT_BUDGET_BYTES, clock: Callable[[], int] = wall_clock_us) -> None:
        self._clock = clock
        lua = LuaRuntime(encoding=None, unpack_returned_tuples=True, register_eval=False, register_builtins=False)
        program = _PROGRAM.format(keyspace=read("keyspace"), definitions=definitions(), decide=read("decide"))
        self._run, self._size = lua.execute(program.encode())(budget_bytes)

    def prepare(self, plan: Plan) -> PackedPlan[_Part]:
        return PackedPlan(plan.keys, _form(plan.outline))

    def opposite(self, prepared: Prepared, outline: Outline) -> Prepared:
        return PackedPlan(cast("PackedPlan[_Part]", prepared).keys, _form(given_back(outline)))

    async def spend(self, batch: Sequence[Prepared]) -> list[Answer | StoreError]:
        return self.decide(cast("Sequence[PackedPlan[_Part]]", batch))

    def decide(self, batch: Sequence[PackedPlan[_Part]]) -> list[Answer | StoreError]:
        answers: list[Answer | StoreError] = []
        now_us = self._clock()
        for run in runs(batch):
            packed = pack_batch(run, now_us)
            specs = [argument for spec in packed.specs for argument in spec]
            reply = self._run(now_us, packed.calls, len(packed.keys), *packed.keys, *specs)
            answers += unpack(run, [int(number) for number in reply])
        return answers

    def size(self) -> Size:
        return Size(*(int(number) for number in self._size()))

    def gauges(self) -> list[tuple[str, int]]:
        """Its size under the names of metrics. `evicted` above 0 says that the budget is too small."""
        return [(f"ratelimit.embedded_store.{name}", number) for name, number in self.size()._asdict().items()]

    async def close(self) -> None:
        """Nothing to let go of."""


@per_outline
def _form(outline: Outline) -> Form[_Part]:
    return form_of(outline, lambda spec: spec)
