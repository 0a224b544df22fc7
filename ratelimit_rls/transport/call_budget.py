"""Limit on the number of calls a second that the service decides, per process and per peer.

Uses token buckets that hold the calls of one second. A call over the limit is rejected before its message is read.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from ratelimit_rls.telemetry.abuse import Abuse
from ratelimit_rls.transport.peers import UNIX, peer_group

BUDGET_SPENT = "the service is over its own limit of calls per second; try again later"

MAX_PEERS = 10_000
"""Maximum number of buckets. Beyond it the oldest is dropped, and its peer starts again with a full bucket."""


class _Bucket:
    __slots__ = ("tokens", "updated_s")

    def __init__(self, tokens: float, now_s: float) -> None:
        self.tokens = tokens
        self.updated_s = now_s

    def refill(self, per_second: int, now_s: float) -> float:
        self.tokens = min(self.tokens + per_second * (now_s - self.updated_s), float(per_second))
        self.updated_s = now_s
        return self.tokens


class CallBudget:
    """Token buckets of the process and of its peers."""

    def __init__(self, per_second: int, per_second_of_peer: int, clock: Callable[[], float] = monotonic) -> None:
        """Set the limits, in calls per second; 0 means no limit."""
        self.is_limited = bool(per_second or per_second_of_peer)
        self._per_second = per_second
        self._per_second_of_peer = per_second_of_peer
        self._clock = clock
        self._process = _Bucket(per_second, clock())
        self._peers: dict[str, _Bucket] = {}

    def spend(self, address: str) -> Abuse | None:
        """Spend one call, or return which limit is exceeded. A rejected call spends nothing."""
        now_s = self._clock()
        peer = None
        if self._per_second_of_peer and address != UNIX:
            peer = self._peer(peer_group(address), now_s)
            if peer.refill(self._per_second_of_peer, now_s) < 1:
                return Abuse.CALL_BUDGET_OF_PEER
        if self._per_second:
            if self._process.refill(self._per_second, now_s) < 1:
                return Abuse.CALL_BUDGET
            self._process.tokens -= 1
        if peer is not None:
            peer.tokens -= 1
        return None

    def _peer(self, group: str, now_s: float) -> _Bucket:
        bucket = self._peers.get(group)
        if bucket is None:
            if len(self._peers) >= MAX_PEERS:
                del self._peers[next(iter(self._peers))]
            bucket = self._peers[group] = _Bucket(self._per_second_of_peer, now_s)
        return bucket
