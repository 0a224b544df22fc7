"""Store in the process itself: runs the same Lua under LuaJIT, over a keyspace in memory.

It is the default store, and rule tests run on it with a clock of their own. Its counters belong to one process and are
lost when it ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, cast

from lupa.luajit21 import LuaRuntime

from ratelimit_rls.core.model import Plan, PlanTemplate, StoreResult
from ratelimit_rls.core.plan import per_template
from ratelimit_rls.core.refund import Refund
from ratelimit_rls.errors import StoreError
from ratelimit_rls.store.base import PreparedPlan
from ratelimit_rls.store.lua_script import definitions, read_source
from ratelimit_rls.store.script_codec import (
    DEFAULT_IDEMPOTENCY_S,
    NO_JITTER,
    CalendarKind,
    EncodedPlan,
    PlanLayout,
    decode_reply,
    encode_batch,
    is_short,
    make_layout,
    split_runs,
)

DEFAULT_BUDGET_BYTES = 256 * 2**20

# Arguments arrive as one flat list, since building tables across the language boundary costs more than the decision.
_PROGRAM = """
{keyspace}
return function(budget_bytes)
  local redis, set_now, size, settle = new_keyspace(budget_bytes)
  {definitions}
  local function run(now, calls, ...)
    set_now(now)
    local reply = decide({{ ... }}, {{ calls, now }})
    settle()
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

_Arg = Any  # a key or a spec: bytes


class SinglePlan(NamedTuple):
    """A plan to be decided without others, with the arguments that would otherwise be encoded every time."""

    plan: EncodedPlan[_Arg]
    arguments: tuple[_Arg, ...]  # of its run; empty if they depend on the time


class StoreSize(NamedTuple):
    keys: int
    bytes: int
    evicted: int  # states dropped for lack of memory while they still mattered


def wall_clock_us() -> int:
    return time.time_ns() // 1000


class EmbeddedStore:
    """A store that decides in the calling thread, in a few microseconds a call."""

    is_synchronous = True

    def __init__(
        self,
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
        clock: Callable[[], int] = wall_clock_us,
        idempotency_s: int = DEFAULT_IDEMPOTENCY_S,
    ) -> None:
        """`idempotency_s`: how long a call with a request id is counted only once, in seconds."""
        self._clock = clock
        self._once_s = idempotency_s
        lua = LuaRuntime(encoding=None, unpack_returned_tuples=True, register_eval=False, register_builtins=False)
        program = _PROGRAM.format(
            keyspace=read_source("keyspace"),
            definitions=definitions(),
        )
        self._run, self._size, self._forget, self._present = lua.execute(program.encode())(budget_bytes)

    def prepare(self, plan: Plan) -> EncodedPlan[_Arg]:
        return EncodedPlan(plan.keys, _layout(plan.template))

    def refund_of(self, prepared: PreparedPlan, refund: Refund) -> PreparedPlan:
        charged = cast("EncodedPlan[_Arg]", prepared)
        own = tuple(charged.keys[number] for number in refund.numbers)
        # The earliest, since a refund must not go to a window that was never charged.
        charged_at_us = min(refund.charged_at_us)
        return EncodedPlan(
            own, _layout(refund.template), charged_at_us=charged_at_us, idempotency_key=charged.idempotency_key
        )

    def decode_key(self, key: Hashable) -> bytes:
        assert isinstance(key, bytes)
        return key

    async def spend(self, batch: Sequence[PreparedPlan]) -> list[StoreResult | StoreError]:
        return self.spend_now(cast("Sequence[EncodedPlan[_Arg]]", batch))

    def spend_now(self, batch: Sequence[EncodedPlan[_Arg]]) -> list[StoreResult | StoreError]:
        """Spend a batch like `spend`, without being awaited."""
        results: list[StoreResult | StoreError] = []
        now_us = self._clock()
        for run in split_runs(batch):
            packed = encode_batch(run, now_us, self._once_s)
            reply = self._run(now_us, NO_JITTER + packed.text, *packed.keys)
            results += decode_reply(run, [int(number) for number in reply])
        return results

    def prepare_single(self, plan: Plan) -> SinglePlan:
        """Encode a plan for `spend_single`: worth its memory if the plan is spent repeatedly, each time alone."""
        encoded = self.prepare(plan)
        if isinstance(encoded.layout.kind, CalendarKind):
            return SinglePlan(encoded, ())
        packed = encode_batch([encoded], 0)
        return SinglePlan(encoded, (NO_JITTER + packed.text, *packed.keys))

    def spend_single(self, alone: SinglePlan) -> StoreResult | None:
        """Spend one plan. None means admitted by every limit: most calls are, and details would double the cost."""
        if not alone.arguments:
            (result,) = self.spend_now([alone.plan])
            assert isinstance(result, StoreResult)
            return result
        reply = self._run(self._clock(), *alone.arguments)
        if is_short(reply, [alone.plan]) or (not reply[1] and not any(reply[3::3])):
            return None
        (result,) = decode_reply([alone.plan], [int(number) for number in reply])
        assert isinstance(result, StoreResult), "the embedded store has only states of this release"
        return result

    async def present(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys that have a state."""
        now_us = self._clock()
        return [key for key in keys if self._present(now_us, key)]

    async def forget(self, keys: Sequence[bytes]) -> list[bytes]:
        """Delete the states under these keys, and return the keys that had one."""
        now_us = self._clock()
        return [key for key in keys if self._forget(now_us, key)]

    def size(self) -> StoreSize:
        return StoreSize(*(int(number) for number in self._size()))

    def gauges(self) -> list[tuple[str, int]]:
        """Return its size by metric name. Evictions mean that the budget is too small."""
        size = self.size()
        return [
            ("ratelimit.embedded_store.keys", size.keys),
            ("ratelimit.embedded_store.size", size.bytes),
            ("ratelimit.embedded_store.evictions", size.evicted),
        ]

    async def close(self) -> None:
        """Do nothing: there are no resources to release."""


@per_template
def _layout(template: PlanTemplate) -> PlanLayout[_Arg]:
    return make_layout(template, bytes, bytes)
