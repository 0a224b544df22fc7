"""Queue of calls that wait to be decided when more arrive than one event loop iteration should decide.

Weighted fair queueing: a call is due at the time when it, and the calls of its connection before it, would be finished
if all connections had equal shares. So a call on a quiet connection does not wait for a thousand calls of another one,
nor for heavy ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from operator import itemgetter
from typing import Generic, TypeVar

from ratelimit_rls.transport.grpc.protocol import GrpcProtocol, GrpcQueuedCall

MAX_ITERATION_WEIGHT = 2048
"""Total weight of the calls decided in one iteration: about as many descriptors, or 680 calls with two. At 5 to 20 µs
per descriptor (estimated from docs/performance.md), an iteration takes at most 10 to 40 ms."""

BACKLOG_ITERATION_WEIGHT = 512
"""The same while calls are queued: a call waits for about two iterations, so these must be short."""

MAX_READ_AHEAD = 1024
"""Queued calls above which no more are read from connections that send many at once: what is not read need not be
rejected, and reading is several times faster than deciding."""

MAX_LIGHT_CALLS = 16
MAX_LIGHT_BYTES = 1024
"""Up to this many calls, with up to this many bytes in total, need not be weighed: even an empty descriptor takes two
bytes."""

MAX_JOINED_BYTES = 64 * 1024
"""Messages up to this size in total are joined and weighed in one pass."""

MAX_ORDINARY_TAGS = 64

_TAGS = b"\x0a\x12\x8a\x92"
"""Tags of fields 1 and 2 with lengths, and their first bytes where they are written with more bytes than needed."""

CALL_BYTES = 300
"""Memory of a queued call beyond its message, measured with tracemalloc on CPython 3.11."""

MAX_BACKLOG_BYTES = 16 * 2**20
"""Maximum size of the queued calls. Beyond it, the connections with the most are cut down to an equal share."""

KEPT_BYTES = MAX_BACKLOG_BYTES * 7 // 8
"""Size of the backlog after that: a scan of all calls has to free room for many."""

PAUSE_BYTES = 512 * 2**10
"""Queued bytes of one connection above which it is not read until half of them are decided."""

MAX_CONNECTION_BYTES = 4 * 2**20
"""Maximum queued bytes of one connection: calls that were read at once, or unpacked, beyond it are rejected."""

M = TypeVar("M")


class Backlog(Generic[M]):
    """Calls of all methods M of a server, ordered by virtual finishing time."""

    __slots__ = ("_bytes", "_due", "_entries", "_now")

    def __init__(self) -> None:
        self._due: list[tuple[int, int, int, M, GrpcQueuedCall]] = []  # heap: virtual time, entry number, weight, …
        self._entries = 0  # makes heap entries unique, and equal ones first in, first out
        self._now = 0  # virtual time of the last call that was taken
        self._bytes = 0

    @property
    def count(self) -> int:
        return len(self._due)

    def add(self, method: M, calls: Iterable[GrpcQueuedCall]) -> list[GrpcQueuedCall]:
        """Queue calls. Return those that do not fit, which may be calls that were queued before."""
        rejected: list[GrpcQueuedCall] = []
        for call in calls:
            connection, _, message, _, _ = call
            size = len(message) + CALL_BYTES
            queued_bytes = connection.queued_bytes + size
            if queued_bytes > MAX_CONNECTION_BYTES:
                rejected.append(call)
                continue
            connection.queued_bytes = queued_bytes
            self._bytes += size
            if queued_bytes > PAUSE_BYTES and not connection.is_backlogged:
                connection.pause_for_backlog()
            # Idle connections accumulate no credit, and each connection pays for what it sends.
            call_weight = weight(message)
            connection.decided_weight = due = max(connection.decided_weight, self._now) + call_weight
            self._entries += 1
            heappush(self._due, (due, self._entries, call_weight, method, call))
            if self._bytes > MAX_BACKLOG_BYTES:
                rejected += self._shed()
        return rejected

    def _shed(self) -> list[GrpcQueuedCall]:
        """Remove the last calls of the connections with the most, until KEPT_BYTES are left. Return them.

        A connection keeps what it has if that is at most an equal share. So those that flood lose their own calls, and
        not the calls of others.
        """
        share = _equal_share([one.queued_bytes for one in {entry[4][0] for entry in self._due}], KEPT_BYTES)
        above: dict[GrpcProtocol, list[tuple[int, int, int, M, GrpcQueuedCall]]] = {}
        for entry in self._due:
            if entry[4][0].queued_bytes > share:
                above.setdefault(entry[4][0], []).append(entry)
        shed: dict[int, GrpcQueuedCall] = {}
        for connection, entries in above.items():
            entries.sort(key=itemgetter(1))
            while connection.queued_bytes > share:
                due, number, call_weight, _, call = entries.pop()
                shed[number] = call
                connection.decided_weight = due - call_weight
                self._remove(call)
        self._due = [entry for entry in self._due if entry[1] not in shed]
        heapify(self._due)
        return [*shed.values()]

    def _remove(self, call: GrpcQueuedCall) -> None:
        """Account for a call that left the backlog."""
        connection, _, message, _, _ = call
        size = len(message) + CALL_BYTES
        self._bytes -= size
        connection.queued_bytes -= size
        if connection.is_backlogged and connection.queued_bytes <= PAUSE_BYTES // 2:
            connection.resume_from_backlog()

    def take(self, iteration_weight: int) -> dict[M, list[GrpcQueuedCall]]:
        """Return the calls of one iteration, at least one unless the backlog is empty."""
        taken: dict[M, list[GrpcQueuedCall]] = {}
        while self._due and (iteration_weight > 0 or not taken):
            self._now, _, call_weight, method, call = heappop(self._due)
            taken.setdefault(method, []).append(call)
            self._remove(call)
            iteration_weight -= call_weight
        return taken


def _equal_share(sizes: Iterable[int], total: int) -> float:
    """Return the largest share such that the sizes, each cut down to it, add up to at most `total`."""
    ordered = sorted(sizes)
    left = float(total)
    for number, size in enumerate(ordered):
        share = left / (len(ordered) - number)
        if size > share:
            return share
        left -= size
    return inf


def fits_iteration(messages: Sequence[bytes], iteration_weight: int) -> bool:
    """Return whether the messages together weigh at most `iteration_weight`. Cheap checks answer nearly always."""
    count, size = len(messages), sum(map(len, messages))
    if size <= MAX_LIGHT_BYTES and count <= MAX_LIGHT_CALLS:
        return True
    if size <= MAX_JOINED_BYTES and count + _count_tags(b"".join(messages)) + (size >> 6) <= iteration_weight:
        return True  # even if each were weighed as a large message
    return sum(map(weight, messages)) <= iteration_weight


def weight(message: bytes) -> int:
    """Estimate the number of descriptors and further entries in a message; two to four times as many for a large one.

    An ordinary descriptor has four tags, an empty entry has one. Fields of other types are weighed by their size.
    """
    tags = _count_tags(message)
    return 1 + (tags >> 2 if tags <= MAX_ORDINARY_TAGS else tags) + (len(message) >> 6)


def _count_tags(message: bytes) -> int:
    """Count the bytes that can begin a tag of a descriptor, an entry, a key or a value, in one pass in C.

    Text has few of them: control characters, and parts of some characters beyond ASCII.
    """
    return len(message) - len(message.translate(None, _TAGS))
