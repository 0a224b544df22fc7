"""A batch of calls, as a transport passes it to the pipeline: one message in and one response out per call.

A transport handles connections and does not interpret messages; the pipeline interprets messages and knows nothing of
connections.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Sequence
from math import inf
from time import monotonic
from typing import NamedTuple, Protocol

from ratelimit_rls.h2.status import RpcError
from ratelimit_rls.telemetry.traces import Metadata


class DelayedResponse(NamedTuple):
    """A response that is ready but must be sent later (`action: throttle`)."""

    message: bytes
    wait_s: float  # from now
    queue: Hashable  # responses of one queue are sent in order, and their slots are interchangeable
    give_back: Callable[[], Awaitable[None]]  # refunds the slot if the caller disconnects before
    latest_s: float = inf  # from now: the caller waits no longer than this, whatever its slot


Response = bytes | RpcError | DelayedResponse
"""The outcome of a call: its response message, the error it fails with, or a response to send later."""


class Batch(Protocol):
    """Calls of one method that are decided together. All sequences have one element per call."""

    @property
    def messages(self) -> Sequence[bytes]: ...

    @property
    def deadlines_s(self) -> Sequence[float]:
        """The times until which the callers wait, on the monotonic clock; inf for a caller without a deadline."""
        ...

    @property
    def request_ids(self) -> Sequence[bytes | None] | None:
        """The ids that callers sent as metadata, under which each call is counted once; None: there are none."""
        ...

    @property
    def metadata(self) -> Sequence[Metadata]:
        """The metadata of each call, for traces; empty if there are no traces."""
        ...

    @property
    def received_s(self) -> float:
        """The arrival of the first call, on the monotonic clock."""
        ...

    def respond(self, number: int, response: Response) -> None:
        """Send the response of a call, by its index. Each call gets exactly one, from here or from `respond_all`."""
        ...

    def respond_all(self, responses: Sequence[Response]) -> None:
        """Send the responses of all calls, in order, if none of them was answered before."""
        ...

    def respond_rest(self, error: RpcError) -> Sequence[int]:
        """Fail all calls that have no response yet. Return their indexes."""
        ...


class BatchOfOne:
    """A batch of one call without a deadline, for callers that await its response."""

    request_ids = None
    deadlines_s = (inf,)
    metadata = ((),)

    def __init__(self, message: bytes) -> None:
        self.messages = (message,)
        self.received_s = monotonic()
        self.response: Response | None = None  # None: not decided yet

    def respond(self, number: int, response: Response) -> None:
        self.response = response

    def respond_all(self, responses: Sequence[Response]) -> None:
        (self.response,) = responses

    def respond_rest(self, error: RpcError) -> Sequence[int]:
        if self.response is not None:
            return ()
        self.response = error
        return (0,)
