"""Executors of rule sets: in this process, or in a subprocess that runs in parallel.

Both accept lines with `send` and return verdicts with `receive`, in the same order; then `finish` returns the result.
"""

from __future__ import annotations

import gc
import signal
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Protocol

from ratelimit_rls.errors import RateLimitRlsError
from ratelimit_rls.simulation.rule_set import RuleSet, RuleSetResult, Verdicts
from ratelimit_rls.simulation.traffic import Line

_END = None
"""End marker, sent after the last lines."""


class Executor(Protocol):
    def send(self, lines: Sequence[Line]) -> None: ...

    def receive(self) -> Verdicts: ...

    def finish(self) -> RuleSetResult:
        """Return the result, after all verdicts were received."""
        ...

    def close(self) -> None:
        """Release all resources. Can be called in any state."""
        ...


class InProcessExecutor:
    def __init__(self, make: Callable[[], RuleSet]) -> None:
        self._rule_set = make()
        self._verdicts: deque[Verdicts] = deque()

    def send(self, lines: Sequence[Line]) -> None:
        self._verdicts.append(self._rule_set.replay(lines))

    def receive(self) -> Verdicts:
        return self._verdicts.popleft()

    def finish(self) -> RuleSetResult:
        return self._rule_set.finish()

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


class SubprocessExecutor:
    """Executor in a forked process, so that rules need not be copied or loaded twice.

    The process ends when this one ends, even by a crash. Lines may fill the pipe, which blocks the sender. Verdicts are
    few bytes and must stay so: if they filled the pipe, too, both processes would deadlock.
    """

    def __init__(self, make: Callable[[], RuleSet]) -> None:
        fork = get_context("fork")
        self._pipe, child_end = fork.Pipe()
        self._process = fork.Process(target=_serve, args=(make, child_end, self._pipe), daemon=True)
        self._process.start()
        child_end.close()

    def send(self, lines: Sequence[Line]) -> None:
        self._send(lines)

    def receive(self) -> Verdicts:
        verdicts: Verdicts = self._receive()
        return verdicts

    def finish(self) -> RuleSetResult:
        self._send(_END)
        outcome: RuleSetResult = self._receive()
        return outcome

    def close(self) -> None:
        self._pipe.close()
        self._process.terminate()
        self._process.join()

    def _send(self, what: Any) -> None:
        try:
            self._pipe.send(what)
        except OSError:
            raise self._ended() from None

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except (OSError, EOFError):
            raise self._ended() from None

    def _ended(self) -> RateLimitRlsError:
        self._process.join()
        return RateLimitRlsError(f"a simulation process ended unexpectedly, with exit code {self._process.exitcode}")


def _serve(make: Callable[[], RuleSet], pipe: Connection, parent_end: Connection) -> None:
    parent_end.close()  # so that the pipe closes when the parent ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent ends the others
    gc.disable()  # no cycles are created here, and collections would take a tenth of the time
    rule_set = make()
    try:
        while (lines := pipe.recv()) is not _END:
            pipe.send(rule_set.replay(lines))
        pipe.send(rule_set.finish())
    except (EOFError, BrokenPipeError):
        return
