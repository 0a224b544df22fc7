"""Closed-loop clients: calls on real connections without pauses while a block runs, with all outcomes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Self

import grpc

from ratelimit_rls.protos.messages import SHOULD_RATE_LIMIT, RateLimitResponse

PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One call: its start and end on the monotonic clock, and its outcome."""

    client: int
    begun_s: float
    ended_s: float
    outcome: int | grpc.StatusCode  # overall code of the response, or gRPC status without one
    details: str = ""


class ClosedLoopClients:
    """`clients` threads with one connection each; every call follows the response to the previous one."""

    def __init__(self, address: str, message: bytes, *, clients: int = 4) -> None:
        self.calls: list[CallRecord] = []
        self._address = address
        self._message = message
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(number,)) for number in range(clients)]

    @property
    def outcomes(self) -> Counter[int | grpc.StatusCode]:
        return Counter(call.outcome for call in self.calls)

    def since(self, moment_s: float) -> list[CallRecord]:
        """Return the calls that started after a time."""
        return [call for call in self.calls if call.begun_s >= moment_s]

    def wait_for_more(self, calls: int = 100, timeout_s: float = 10.0) -> None:
        """Wait until `calls` more calls have ended."""
        enough = len(self.calls) + calls
        deadline = time.monotonic() + timeout_s
        while len(self.calls) < enough:
            assert time.monotonic() < deadline, f"only {self.outcomes} in {timeout_s} s"
            time.sleep(0.005)

    def stop(self) -> None:
        """Stop sending, and wait for calls in flight."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        self.wait_for_more(len(self._threads))
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _client(self, number: int) -> None:
        # Without a local subchannel pool, all channels of the process would share a connection.
        with grpc.insecure_channel(self._address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            method: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(SHOULD_RATE_LIMIT)
            while not self._over.is_set():
                begun_s = time.monotonic()
                try:
                    outcome = RateLimitResponse.FromString(method(self._message, timeout=PATIENCE_S)).overall_code
                    details = ""
                except grpc.RpcError as error:
                    outcome, details = error.code(), error.details() or ""
                self.calls.append(CallRecord(number, begun_s, time.monotonic(), outcome, details))
