"""TCP ports for servers under test, never shared by two processes that run tests at the same time.

A server binds its port some time after the port was chosen. Two processes that choose at random from one range give the
same port to two servers every few thousand choices, and a test then talks to the wrong one. So each process claims a
block of ports for itself, and holds the first port of the block as the claim until it ends.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from functools import cache

LOOPBACK = "127.0.0.1"
BLOCKS = range(12_000, 22_000, 500)
"""First ports of all blocks. The highest port plus 10,000, the bus of a Redis Cluster node, is still below the kernel's
ephemeral ports (32768 and up), one of which could be in use by an outgoing connection when a server binds it."""


class PortBlock:
    """The ports of the first block that no other process has claimed."""

    def __init__(self, blocks: range = BLOCKS) -> None:
        self._claim, first = _claim(blocks)
        self.ports = range(first + 1, first + blocks.step)
        self._next: Iterator[int] = itertools.cycle(self.ports)

    def free_port(self) -> int:
        """Return a port that nothing listens on. A port is returned again only after all others of the block."""
        for port in itertools.islice(self._next, len(self.ports)):
            if (probe := _bind(port)) is not None:
                probe.close()
                return port
        raise RuntimeError(f"all ports of {self.ports} are in use")

    def close(self) -> None:
        """Give the block up."""
        self._claim.close()


def _claim(blocks: range) -> tuple[socket.socket, int]:
    for first in blocks:
        if (claim := _bind(first)) is not None:
            return claim, first
    raise RuntimeError(f"all blocks of ports in {blocks} are claimed by other processes")


def _bind(port: int) -> socket.socket | None:
    """Return a socket that is bound to the port, or None if the port is in use."""
    bound = socket.socket()
    try:
        bound.bind((LOOPBACK, port))
    except OSError:
        bound.close()
        return None
    return bound


@cache
def _block() -> PortBlock:
    return PortBlock()


def free_port() -> int:
    """Return an unused TCP port from the block of this process."""
    return _block().free_port()
