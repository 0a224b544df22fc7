"""A child process of a test: on a free port, with its files in a temporary directory, gone when the test is."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0


# Below the range the kernel takes the local end of outgoing connections from (32768 and up, 49152 on some systems):
# a port it picked itself could be such an end by the time a server binds it.
_PORTS = range(15_000, 32_000)
_handed_out: set[int] = set()


def free_port() -> int:
    """A TCP port nobody listens on, and never the same one twice."""
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            if port not in _handed_out:
                probe.bind(("127.0.0.1", port))
                _handed_out.add(port)
                return port


class Process(ABC):
    """A child process with its log in a file, started until it answers and stopped for certain."""

    has_last_words = True
    """Whether it is asked to end when the test is over; one that has nothing to do before it ends is killed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._directory = tempfile.TemporaryDirectory(prefix=f"rls-{name}-", ignore_cleanup_errors=True)
        self.directory = Path(self._directory.name)
        self.log_path = self.directory / f"{name}.log"
        self._child: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    @abstractmethod
    def command(self) -> Sequence[str | Path]:
        """The command line of a fresh start."""

    def environment(self) -> Mapping[str, str] | None:
        """The whole environment of the child, or None for ours."""
        return None

    @abstractmethod
    def ready(self) -> bool:
        """Whether the server answers."""

    def start(self) -> Self:
        """Starts the process and returns once it answers."""
        assert self._child is None, f"{self.name} is already running"
        with self.log_path.open("ab") as log:
            self._child = subprocess.Popen(
                [str(part) for part in self.command()], stdout=log, stderr=log, env=self.environment()
            )
        self.wait_until(self.ready, "answers")
        return self

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Polls a condition; a child that died or a timeout fails with the end of its log."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self._child is None or self._child.poll() is not None:
                raise AssertionError(f"{self.name} died before it {what}:\n{self.log()[-4000:]}")
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.name} did not answer `{what}` in {timeout_s} s:\n{self.log()[-4000:]}")
            time.sleep(0.01)

    @property
    def pid(self) -> int:
        """The process id while it runs."""
        assert self._child is not None, f"{self.name} is not running"
        return self._child.pid

    @property
    def running(self) -> bool:
        """Whether the process is alive (paused counts)."""
        return self._child is not None and self._child.poll() is None

    def log(self) -> str:
        """Everything the process has written so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def signal(self, number: signal.Signals) -> None:
        """Sends one signal."""
        os.kill(self.pid, number)

    def pause(self) -> None:
        """Freezes the process: connections stay open and nothing answers."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Thaws a paused process."""
        self.signal(signal.SIGCONT)

    def stop(self) -> int | None:
        """Asks the process to end, insists when it does not, and returns its exit code."""
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
        """Ends the process at once, without a word to its clients."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()

    def close(self) -> None:
        """Stops the process and removes its files."""
        atexit.unregister(self.close)
        if self.has_last_words:
            self.stop()
        else:
            self.kill()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()
