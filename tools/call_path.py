"""`python -m tools.call_path`: the functions that one warm ShouldRateLimit call passes, and its types of values.

It serves in this process, sends the same call until everything about it is cached, and then traces one more, from the
bytes that arrive to the bytes that leave. Types are counted if the call constructs an object of them. Named tuples and
dataclasses that were cached before are listed as well: a reader of the path meets them, too.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import logging
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import structlog

from bench import wire
from bench.connection import Connection, Target, connected
from bench.instructions import RULES, exchange
from bench.servers import LOOPBACK
from ratelimit_rls.server.lifecycle import ShutdownSignals, serve
from ratelimit_rls.settings import Settings
from tests.support.ports import free_port
from tests.support.servers import RedisServer, redis_binaries

PACKAGE = Path(__file__).parents[1] / "ratelimit_rls"
WARM_UP_CALLS = 100
TRACED_CALLS = 3
"""A function that was not called for each of these belongs to a timer."""

SETTLE_S = 0.2
"""Pause before a trace, in which timers fire that became due meanwhile."""

MAX_DEPTH = 3
"""Nested lists, tuples and dictionaries in which values are looked for."""


class Trace:
    """Functions of the package that run in this thread, and the types of the objects that they use."""

    def __init__(self) -> None:
        self.functions: dict[str, set[str]] = defaultdict(set)  # by file
        self.constructed: set[str] = set()  # types of objects that did not exist before
        self.cached: set[str] = set()  # types of values that did
        gc.unfreeze()  # frozen objects would be missing below
        self._before = gc.get_objects()  # kept, as are all that are found, so that no id is used again
        self._known = set(map(id, self._before))
        self._found: list[object] = []

    def __enter__(self) -> Trace:
        gc.disable()
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()
        self._found.clear()
        self._before.clear()

    def _on_event(self, frame: FrameType, event: str, argument: object) -> None:
        if event not in ("call", "return"):
            return
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(PACKAGE):
            return
        self.functions[str(path.relative_to(PACKAGE))].add(frame.f_code.co_qualname)
        for value in (*frame.f_locals.values(), argument):
            self._look_at(value, MAX_DEPTH)

    def _look_at(self, value: object, depth: int) -> None:
        kind = type(value)
        if kind.__module__.startswith("ratelimit_rls."):
            name = f"{kind.__module__.removeprefix('ratelimit_rls.')}.{kind.__qualname__}"
            if id(value) not in self._known:
                self._known.add(id(value))
                self._found.append(value)
                self.constructed.add(name)
            elif name not in self.constructed and (hasattr(kind, "_fields") or is_dataclass(kind)):
                self.cached.add(name)
        if depth and isinstance(value, (list, tuple)):
            for item in value[:100]:
                self._look_at(item, depth - 1)
        elif depth and kind is dict:
            for item in [*value.values()][:100]:  # type: ignore[attr-defined]
                self._look_at(item, depth - 1)


class CallPath(NamedTuple):
    functions: Mapping[str, set[str]]  # by file
    constructed: set[str]
    cached: set[str]

    def report(self, title: str) -> Iterator[str]:
        count = sum(map(len, self.functions.values()))
        yield f"{title}: {len(self.functions)} files, {count} functions, {len(self.constructed)} types constructed"
        for file, names in sorted(self.functions.items()):
            yield f"  {file}: {', '.join(sorted(names))}"
        yield f"constructed: {', '.join(sorted(self.constructed))}"
        yield f"cached ({len(self.cached)}): {', '.join(sorted(self.cached))}"


async def trace_call(environment: Mapping[str, str]) -> CallPath:
    """Return the path of a warm call of a service with these settings."""
    with tempfile.TemporaryDirectory() as directory:
        rules = Path(directory, "rules.yaml")
        rules.write_text(RULES)  # noqa: ASYNC240
        port = free_port()
        os.environ |= {
            "RLS_RULES": str(rules),
            "GRPC_PORT": str(port),
            "GRPC_HOST": LOOPBACK,
            "PORT": "0",
            "DEBUG_PORT": "0",
            "RLS_DRAIN_DELAY": "0s",
            **environment,
        }
        signals = ShutdownSignals()
        serving = asyncio.create_task(serve(Settings(), signals))
        try:
            while True:
                assert not serving.done(), "the service did not start"
                try:
                    await asyncio.to_thread(lambda: connected((LOOPBACK, port)).close())
                    break
                except OSError:
                    await asyncio.sleep(0.05)
            message = wire.rate_limit_request("bench", [[("user", "alice")], [("path", "/v1/things")]])
            calls = itertools.repeat(wire.data(message))
            connection = await asyncio.to_thread(Connection, Target((LOOPBACK, port)))
            await asyncio.to_thread(connection.prime, calls, 1)
            await asyncio.to_thread(exchange, connection, 1, WARM_UP_CALLS, calls)
            traces = []
            for _ in range(TRACED_CALLS):
                trace = Trace()
                await asyncio.sleep(SETTLE_S)
                with trace:
                    await asyncio.to_thread(exchange, connection, 1, 1, calls)
                traces.append(trace)
            connection.close()
        finally:
            signals.stop.set()
            await asyncio.gather(serving, return_exceptions=True)
    functions = {file: set.intersection(*(trace.functions[file] for trace in traces)) for file in traces[0].functions}
    return CallPath(
        {file: names for file, names in functions.items() if names},
        set.intersection(*(trace.constructed for trace in traces)),
        set.intersection(*(trace.cached for trace in traces)),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.call_path", description=__doc__)
    parser.add_argument("--store", choices=["embedded", "redis"], nargs="+", help="default: all that are available")
    chosen = parser.parse_args(arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    stores = chosen.store or ["embedded", *(["redis"] if redis_binaries() else [])]
    for store in stores:
        print("\n".join(STORES[store]().report(store)), end="\n\n", flush=True)
    return 0


def _embedded() -> CallPath:
    return asyncio.run(trace_call({}))


def _redis() -> CallPath:
    with RedisServer() as server:
        return asyncio.run(trace_call({"REDIS_URL": server.address, "REDIS_SOCKET_TYPE": "tcp"}))


STORES: Mapping[str, Callable[[], CallPath]] = {"embedded": _embedded, "redis": _redis}


if __name__ == "__main__":
    sys.exit(main())
