# mypy: ignore-errors
"""Store of the previous release, in a process of its own: a line of JSON in for each call, one out for its result.

It is run with the package of that release in PYTHONPATH (tests/compatibility/previous_release.py), so its imports are
not those of this checkout.
"""

import asyncio
import json
import sys

from ratelimit_rls.store.redis.new import redis_store
from ratelimit_rls.store.redis.node import Terms

from ratelimit_rls.core.model import Algorithm, Charge, Limit, Outline, Penalty, Plan, Slot, Step, Unit, WarnAt
from ratelimit_rls.settings.redis_address import RedisAddress, RedisServers


def step_of(values):
    requests, unit, algorithm, burst, cost, charge, shadow, quota, delay_us = values
    limit = Limit(requests, Unit(unit), Algorithm(algorithm), burst)
    return Step(limit, cost, Charge(charge), shadow, quota, delay_us)


def watcher_of(values):
    return WarnAt(*values) if len(values) == 1 else Penalty(values[0], values[1], tuple(values[2]))


def plan_of(call):
    slots = tuple(
        Slot(None, tuple(map(step_of, steps)), 1, watchers=tuple(map(watcher_of, watchers)))
        for steps, watchers in call["descriptors"]
    )
    steps = tuple(step for slot in slots for step in slot.steps)
    return Plan(Outline("domain", True, steps, slots, can_wait=True), tuple(key.encode() for key in call["keys"]))


async def main(port):
    now_us = 0
    server = RedisServers("single", (RedisAddress("127.0.0.1", port),))
    store = redis_store(server, None, Terms(timeout_s=10, clock=lambda: now_us))
    await store.start()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        call = json.loads(line)
        now_us = call["now_us"]
        prepared = store.prepare(plan_of(call))
        if call["max_wait_us"] is not None:
            prepared = prepared.within(call["max_wait_us"])
        if call["request_id"]:
            prepared = prepared.once(call["request_id"].encode())
        if call["take"]:
            prepared = prepared.at_most(call["take"])
        if call["refund"]:
            prepared = prepared.returned(*call["refund"])
        (answer,) = await store.spend([prepared])
        if isinstance(answer, Exception):
            raise answer
        refused, at_us, readings, granted, _, again, _ = answer
        print(json.dumps([refused, at_us, readings, granted, again]), flush=True)
    await store.close()


asyncio.run(main(int(sys.argv[1])))
