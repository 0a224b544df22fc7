"""Worker processes that share their ports: a supervisor that serves nothing, and workers that are whole servers.

Each worker is spawned, never forked: gRPC's threads do not survive a fork. The kernel distributes connections over the
workers (SO_REUSEPORT), so all workers are used only if there are at least as many connections.
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
from ratelimit_rls.telemetry.masking import share_mask_secret
from ratelimit_rls.transport.grpc.runtime_dir import runtime_dir
from ratelimit_rls.transport.sockets import host_port

_log = structlog.get_logger()

MIN_LIFETIME_S = 5.0
"""If a worker exits sooner than this after its start, the supervisor stops: all workers would fail in the same way."""


def supervise(settings: Settings) -> int:
    """Run the workers until a stop signal and return the exit code."""
    settings, sockets = _reserve_ports(settings)
    directory = runtime_dir(settings.rls_runtime_dir)
    share_mask_secret(directory)
    try:
        return _Supervisor(settings, directory).run()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        for reserved in sockets:
            reserved.close()


def _reserve_ports(settings: Settings) -> tuple[Settings, list[socket.socket]]:
    """Bind every TCP port in the supervisor first, without listening.

    A port in use is thus one error instead of one per worker, and port 0 selects the same port for all workers.
    """
    sockets: list[socket.socket] = []
    chosen: dict[str, int | str] = {}
    ports = [
        (settings.grpc_host, settings.grpc_port, "grpc_port"),
        (settings.host, settings.port, "port"),
        (settings.debug_host, settings.debug_port, "debug_port"),
    ]
    if settings.stats_sink == "prometheus":
        ports.append((*settings.prometheus_listen, "prometheus_addr"))
    if settings.rls_database_url.get_secret_value():
        ports.append((settings.rls_admin_host, settings.rls_admin_port, "rls_admin_port"))
    for host, port, field in ports:
        reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        sockets.append(reserved)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            reserved.bind((host, port))
        except OSError as error:
            raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        port = reserved.getsockname()[1]
        chosen[field] = host_port(host, port) if field == "prometheus_addr" else port
    return settings.model_copy(update=chosen), sockets


class _Supervisor:
    def __init__(self, settings: Settings, directory: Path) -> None:
        self._settings = settings
        self._directory = directory
        self._spawn = multiprocessing.get_context("spawn")
        self._workers: dict[BaseProcess, float] = {}  # with the time of its start
        self._stopping = False

    def run(self) -> int:
        resource_tracker.ensure_running()  # now: starting it later would unblock signals during the first start
        for number in SIGNALS:
            signal.signal(number, self._forward_signal)
        for _ in range(self._settings.rls_workers):
            self._start()
        failed = False
        while self._workers:
            wait([worker.sentinel for worker in self._workers])
            for worker in [worker for worker in self._workers if not worker.is_alive()]:
                lived_s = time.monotonic() - self._workers.pop(worker)
                if self._stopping:
                    failed = failed or worker.exitcode != 0
                elif lived_s < MIN_LIFETIME_S:
                    _log.error("worker_exited_early", exit_code=worker.exitcode)
                    failed = True
                    self._stop(signal.SIGTERM)
                else:
                    _log.error("worker_died", exit_code=worker.exitcode)
                    self._start()
        return int(failed)

    def _start(self) -> None:
        """Start one more worker unless stopping.

        Signals are blocked meanwhile: in the supervisor until the worker is registered and can be signalled; in the
        worker, which inherits the mask, until its handlers are installed.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        if not self._stopping:
            worker = self._spawn.Process(target=_run_worker, args=(self._settings, self._directory), daemon=True)
            worker.start()
            self._workers[worker] = time.monotonic()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _forward_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._signal_workers(number)
        else:
            self._stop(number)

    def _stop(self, number: int) -> None:
        self._stopping = True
        self._signal_workers(number)

    def _signal_workers(self, number: int) -> None:
        for worker in self._workers:
            assert worker.pid is not None
            with suppress(ProcessLookupError):
                os.kill(worker.pid, number)


def _run_worker(settings: Settings, directory: Path) -> None:
    """Run one worker until it ends; the main function of a worker process."""
    os.setpgrp()  # Ctrl-C goes to the supervisor, which forwards it; receiving it twice would stop at once
    threading.Thread(target=_stop_when_orphaned, daemon=True).start()
    logs.configure(settings.log_level, settings.log_format)
    structlog.contextvars.bind_contextvars(worker=os.getpid())
    try:
        code = uvloop.run(serve_until_signal(settings, directory))
    except RateLimitRlsError as error:
        _log.error("start_failed", error=str(error))
        code = 1
    raise SystemExit(code)


def _stop_when_orphaned() -> None:
    """Stop when the supervisor is gone.

    A killed supervisor sends no signal, and its workers would keep the port forever.
    """
    supervisor = multiprocessing.parent_process()
    assert supervisor is not None
    supervisor.join()
    os.kill(os.getpid(), signal.SIGTERM)
