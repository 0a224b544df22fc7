"""Where a rule set decides: here, or in a process of its own while others go on.

Both take lines with `send` and give the verdicts with `receive`, in the same order; then `finish` tells the outcome.
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
from ratelimit_rls.trial.rule_set import Outcome, RuleSet, Verdicts
from ratelimit_rls.trial.traffic import Line

_END = None
"""Sent in place of lines: there are no more."""


class Decider(Protocol):
    def send(self, lines: Sequence[Line]) -> None: ...

    def receive(self) -> Verdicts: ...

    def finish(self) -> Outcome:
        """After all verdicts were received."""
        ...

    def close(self) -> None:
        """Whatever has happened."""
        ...


class Here:
    def __init__(self, make: Callable[[], RuleSet]) -> None:
        self._rule_set = make()
        self._verdicts: deque[Verdicts] = deque()

    def send(self, lines: Sequence[Line]) -> None:
        self._verdicts.append(self._rule_set.decide(lines))

    def receive(self) -> Verdicts:
        return self._verdicts.popleft()

    def finish(self) -> Outcome:
        return self._rule_set.finish()

    def close(self) -> None:
        """Nothing to let go of."""


class Apart:
    """A forked process, so that rules need not be copied or loaded twice; it ends with this one, however that ends.

    Lines may fill the pipe: whoever sends them waits. Verdicts are few bytes, and must stay so: if they filled it, too,
    both sides would wait for ever.
    """

    def __init__(self, make: Callable[[], RuleSet]) -> None:
        fork = get_context("fork")
        self._pipe, theirs = fork.Pipe()
        self._process = fork.Process(target=_serve, args=(make, theirs, self._pipe), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, lines: Sequence[Line]) -> None:
        self._send(lines)

    def receive(self) -> Verdicts:
        verdicts: Verdicts = self._receive()
        return verdicts

    def finish(self) -> Outcome:
        self._send(_END)
        outcome: Outcome = self._receive()
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
        return RateLimitRlsError(f"the process that decides ended before its time, with code {self._process.exitcode}")


def _serve(make: Callable[[], RuleSet], pipe: Connection, theirs: Connection) -> None:
    theirs.close()  # so that the pipe ends when they do
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the first one ends the others
    gc.disable()  # nothing here goes round in circles, and walking over all that is kept takes a tenth of the time
    rule_set = make()
    try:
        while (lines := pipe.recv()) is not _END:
            pipe.send(rule_set.decide(lines))
        pipe.send(rule_set.finish())
    except (EOFError, BrokenPipeError):
        return
