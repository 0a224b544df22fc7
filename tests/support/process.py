"""Child processes of tests, each with a temporary directory that is removed after the test."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

START_TIMEOUT_S = 40.0
STOP_TIMEOUT_S = 30.0
"""Deadlines of polls. Workers under `make coverage` took more than 10 s to end at a load of 7 on two cores."""


class Process(ABC):
    """A child process with a log file; starting waits until it responds, and it is always stopped."""

    has_last_words = True
    """True if the process is stopped gracefully after the test; one without shutdown work is killed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._directory = tempfile.TemporaryDirectory(prefix=f"rls-{name}-", ignore_cleanup_errors=True)
        self.directory = Path(self._directory.name)
        self.log_path = self.directory / f"{name}.log"
        self._child: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    @abstractmethod
    def command(self) -> Sequence[str | Path]:
        """Return the command line."""

    def environment(self) -> Mapping[str, str] | None:
        """Return the complete environment of the child, or None to inherit."""
        return None

    @abstractmethod
    def ready(self) -> bool:
        """Return True if the server responds."""

    def start(self) -> Self:
        """Start the process and wait until it responds."""
        assert self._child is None, f"{self.name} is already running"
        with self.log_path.open("ab") as log:
            self._child = subprocess.Popen(
                [str(part) for part in self.command()], stdout=log, stderr=log, env=self.environment()
            )
        self.wait_until(self.ready, "answers")
        return self

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Poll a condition. If the child dies or on timeout, fail with the end of its log."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self._child is None or self._child.poll() is not None:
                raise AssertionError(f"{self.name} died before it {what}:\n{self.log()[-4000:]}")
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.name} did not answer `{what}` in {timeout_s} s:\n{self.log()[-4000:]}")
            time.sleep(0.01)

    @property
    def pid(self) -> int:
        """Process id while it runs."""
        assert self._child is not None, f"{self.name} is not running"
        return self._child.pid

    @property
    def running(self) -> bool:
        """True if the process is alive, even if paused."""
        return self._child is not None and self._child.poll() is None

    def log(self) -> str:
        """Return everything the process has written so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def pause(self) -> None:
        """Freeze the process: connections stay open, and nothing responds."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume a paused process."""
        self.signal(signal.SIGCONT)

    def stop(self) -> int | None:
        """Stop the process, kill it if necessary, and return its exit code."""
        child, self._child = self._child, None
        if child is None:
            return None
        for number in (signal.SIGCONT, signal.SIGTERM):
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)
        try:
            return child.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            return child.wait()

    def kill(self) -> None:
        """Kill the process."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()

    def close(self) -> None:
        """Stop the process and remove its files."""
        atexit.unregister(self.close)
        if self.has_last_words:
            self.stop()
        else:
            self.kill()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:  # `__exit__` is not called, and a process of pytest-xdist may skip atexit
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()
