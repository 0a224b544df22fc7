"""Latencies of calls: a connection that records them, and their distribution."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench import wire
from bench.connection import FRAME_HEADER_BYTES, MAX_REQUEST_BYTES, Connection, LoadError, Target

_HEADER = struct.Struct(">IBI")


@dataclass(frozen=True, slots=True)
class Latencies:
    """Distribution of latencies, from when each call was due to its response.

    In a closed loop a call is due when it is sent. In an open loop a call is late if it was sent more than 1 ms after
    it was due although the server could accept it: if there are more than a few, the latencies are those of the load
    generator. Waiting for the server to accept calls counts as latency.
    """

    calls: int
    per_s: float  # responses per second, up to the last one
    p50_us: float
    p95_us: float
    p99_us: float
    p99_9_us: float
    max_us: float
    late_share: float = 0.0

    @classmethod
    def of(cls, latencies_s: Sequence[float], per_s: float, late_share: float = 0.0) -> Latencies:
        """Return the distribution of unordered latencies, of which there is at least one."""
        ordered = sorted(latencies_s)
        p50, p95, p99, p99_9 = (percentile(ordered, per_mille) * 1e6 for per_mille in (500, 950, 990, 999))
        return cls(len(ordered), per_s, p50, p95, p99, p99_9, ordered[-1] * 1e6, late_share)

    @property
    def percentiles_us(self) -> dict[str, float]:
        """Return the percentiles by name."""
        return {"p50": self.p50_us, "p95": self.p95_us, "p99": self.p99_us, "p99.9": self.p99_9_us}

    def __str__(self) -> str:
        p50, *others = self.percentiles_us.items()
        return ", ".join([f"{p50[0]} {p50[1] / 1e3:.2f} ms", *(f"{name} {us / 1e3:.2f}" for name, us in others)])


class TimedConnection(Connection):
    """Connection that records the due time and the latency of each call."""

    def __init__(self, target: Target) -> None:
        self.latencies_s: list[float] = []
        self._due: dict[int, float] = {}  # due times of the calls in flight, by stream id
        super().__init__(target)

    @property
    def can_send(self) -> bool:
        """True if a call can be sent now and the server accepts it."""
        return not self.blocked and self.in_flight < self._max_streams and self._may_send_bytes >= MAX_REQUEST_BYTES

    def send_calls(self, count: int, calls: Iterator[bytes], due: float | None = None) -> int:
        """Send calls that are due at the same time; by default now."""
        first = self._stream_id
        due = time.perf_counter() if due is None else due
        sent = super().send_calls(count, calls)
        for stream_id in range(first, self._stream_id, 2):
            self._due[stream_id] = due
        return sent

    def _take(self, buffer: bytes) -> int:
        now = time.perf_counter()
        at, end = 0, len(buffer)
        while end - at >= FRAME_HEADER_BYTES:
            word, flags, stream_id = _HEADER.unpack_from(buffer, at)
            at += FRAME_HEADER_BYTES + (word >> 8)
            if word & 0xFF == wire.HEADERS and flags & wire.END_STREAM and at <= end:
                due = self._due.pop(stream_id, None)
                if due is None:
                    raise LoadError(f"the server answered call {stream_id}, which was not in flight")
                self.latencies_s.append(now - due)
        return super()._take(buffer)


def percentile(ordered: Sequence[float], per_mille: int) -> float:
    """Return the smallest value that `per_mille` thousandths of all values do not exceed."""
    return ordered[-(-len(ordered) * per_mille // 1000) - 1]
