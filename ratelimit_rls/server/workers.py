"""Several processes on one port: a supervisor that serves nothing itself, and workers that are whole servers.

Each worker is started fresh, never forked: gRPC's threads do not survive a fork. The kernel spreads connections over
the workers (SO_REUSEPORT), so there must be at least as many connections as workers for all to have work.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
import threading
import time
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

import structlog
import uvloop

from ratelimit_rls.errors import RateLimitRlsError, SettingsError
from ratelimit_rls.server.lifecycle import SIGNALS, serve_until_signal
from ratelimit_rls.settings import Settings
from ratelimit_rls.telemetry import logs
from ratelimit_rls.transport.grpc.runtime import runtime_dir
from ratelimit_rls.transport.listen import host_port

log = structlog.get_logger()

SHORTEST_LIFE_S = 5.0
"""A worker that ends sooner than this after its start is not replaced at once: something is wrong with all of them."""


def supervise(settings: Settings) -> int:
    """Run the workers until told to stop; returns the exit code."""
    settings, held = _hold_ports(settings)
    directory = runtime_dir(settings.rls_runtime_dir)
    try:
        return _Supervisor(settings, directory).run()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        for one in held:
            one.close()


def _hold_ports(settings: Settings) -> tuple[Settings, list[socket.socket]]:
    """Bind every port here first, without listening.

    So a port that is taken is an error at once and not once per worker, and port 0 means one port for all of them.
    """
    held: list[socket.socket] = []
    chosen: dict[str, int | str] = {}
    ports = [
        (settings.grpc_host, settings.grpc_port, "grpc_port"),
        (settings.host, settings.port, "port"),
        (settings.debug_host, settings.debug_port, "debug_port"),
    ]
    if settings.stats_sink == "prometheus":
        ports.append((*settings.prometheus_listen, "prometheus_addr"))
    for host, port, field in ports:
        one = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        held.append(one)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            one.bind((host, port))
        except OSError as error:
            raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        port = one.getsockname()[1]
        chosen[field] = host_port(host, port) if field == "prometheus_addr" else port
    return settings.model_copy(update=chosen), held


class _Supervisor:
    def __init__(self, settings: Settings, directory: Path) -> None:
        self._settings = settings
        self._directory = directory
        self._spawn = multiprocessing.get_context("spawn")
        self._workers: dict[BaseProcess, float] = {}  # and when each was started
        self._stopping = False

    def run(self) -> int:
        resource_tracker.ensure_running()  # now: it would let signals through in the midst of the first start
        for number in SIGNALS:
            signal.signal(number, self._pass_on)
        for _ in range(self._settings.rls_workers):
            self._start()
        failed = False
        while self._workers:
            wait([worker.sentinel for worker in self._workers])
            for worker in [worker for worker in self._workers if not worker.is_alive()]:
                lived_s = time.monotonic() - self._workers.pop(worker)
                if self._stopping:
                    failed = failed or worker.exitcode != 0
                elif lived_s < SHORTEST_LIFE_S:
                    log.error("a worker did not stay up; stopping", exit_code=worker.exitcode)
                    failed = True
                    self._stop(signal.SIGTERM)
                else:
                    log.error("a worker died and is replaced", exit_code=worker.exitcode)
                    self._start()
        return int(failed)

    def _start(self) -> None:
        """Start one more, unless all are to stop.

        Signals are held back meanwhile: here until the worker is on record, to be told; in the worker, which inherits
        this, until it can take them.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        if not self._stopping:
            worker = self._spawn.Process(target=_work, args=(self._settings, self._directory), daemon=True)
            worker.start()
            self._workers[worker] = time.monotonic()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._tell(number)
        else:
            self._stop(number)

    def _stop(self, number: int) -> None:
        self._stopping = True
        self._tell(number)

    def _tell(self, number: int) -> None:
        for worker in self._workers:
            assert worker.pid is not None
            with suppress(ProcessLookupError):
                os.kill(worker.pid, number)


def _work(settings: Settings, directory: Path) -> None:
    """A worker's whole life."""
    os.setpgrp()  # Ctrl-C is for the supervisor, which passes it on; twice would mean at once
    threading.Thread(target=_stop_when_alone, daemon=True).start()
    logs.configure(settings.log_level, settings.log_format)
    structlog.contextvars.bind_contextvars(worker=os.getpid())
    try:
        code = uvloop.run(serve_until_signal(settings, directory))
    except RateLimitRlsError as error:
        log.error("cannot start", error=str(error))
        code = 1
    raise SystemExit(code)


def _stop_when_alone() -> None:
    """A supervisor that was killed tells nobody, and would leave its workers on the port for ever."""
    supervisor = multiprocessing.parent_process()
    assert supervisor is not None
    supervisor.join()
    os.kill(os.getpid(), signal.SIGTERM)
