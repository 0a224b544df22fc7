"""Cost of a call in Redis, measured without a service: instructions, CPU by batch size, and memory per key."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench import capacity, redis_instructions
from bench.capacity import CapacityCase, CapacityMeasurement, KeyMemory, MemoryCase, measure_memory
from bench.fleet import LOAD_CORE, SERVICE_CORE
from bench.measure import Plan
from bench.redis_instructions import Counted, InstructionCase, InstructionCounter
from bench.servers import Servers


@dataclass(slots=True)
class Resources:
    """Results by case."""

    instructions: dict[InstructionCase, Counted] = field(default_factory=dict)
    redis_us: dict[CapacityCase, list[float]] = field(default_factory=dict)  # per call, in each round
    memory: dict[MemoryCase, KeyMemory] = field(default_factory=dict)

    def lines(self) -> list[str]:
        return [
            *redis_instructions.table(self.instructions),
            *capacity.cpu_table(self.redis_us),
            *capacity.memory_table(self.memory),
        ]


def measure_resources(plan: Plan, directory: Path, progress: Callable[[str], None]) -> Resources:
    """Measure the cases of a plan. Redis has a core of its own."""
    result = Resources()
    os.sched_setaffinity(0, {SERVICE_CORE})
    servers = Servers(directory, SERVICE_CORE, LOAD_CORE)
    try:
        _measure_cpu(plan, servers, progress, result)
        for case in plan.capacity:
            if isinstance(case, MemoryCase):
                progress(case.name)
                result.memory[case] = measure_memory(case, servers.redis())
    finally:
        servers.close()
    for counted, one in InstructionCounter(directory, plan.peer).count(plan.counted):
        progress(counted.name)
        result.instructions[counted] = one
    return result


def _measure_cpu(plan: Plan, servers: Servers, progress: Callable[[str], None], result: Resources) -> None:
    cases = [case for case in plan.capacity if isinstance(case, CapacityCase)]
    if not cases:
        return
    measurement = CapacityMeasurement(servers.redis())
    for round_number in range(1, plan.repeats + 1):
        for case in cases:
            progress(f"round {round_number} of {plan.repeats}: {case.name}")
            result.redis_us.setdefault(case, []).append(measurement.redis_us(case, plan.seconds))
