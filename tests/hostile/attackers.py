"""Hostile connections on real sockets: they send the data of an attack, and record how the server closes them.

One thread runs all of them. Their bytes per second can be limited, so that an attack on a small machine uses the CPU
time of the server and not that of its well-behaved clients.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Mapping
from math import inf
from random import Random
from typing import Self

from bench import wire
from tests.hostile.attacks import Attack, Port, Sent

CLOSED = "closed"
RECEIVE_BYTES = 65_536
_READ, _WRITE = select.EPOLLIN, select.EPOLLOUT
_CLOSED = select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP
_TURN_S = 0.02


class Attacker:
    """One connection of an attack."""

    def __init__(self, attack: Attack, address: tuple[str, int], source: str, chance: Random) -> None:
        self.attack = attack
        self.ending: str | None = None
        """Ending of the connection: "GOAWAY" and its error code, or CLOSED."""

        self.sent_bytes = 0
        self.received_bytes = 0
        self.is_done = False
        """True if everything was sent, and the connection was kept open as long as the attack specifies."""

        self._pieces: Sent = attack.sends(chance)
        self._unsent = memoryview(b"")
        self._replies = b""
        self._rest = b""
        self._waits_until_s = 0.0
        self._is_exhausted = False
        self.socket = socket.socket()
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not attack.reads:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.setblocking(False)
        self.socket.bind((source, 0))
        with contextlib.suppress(BlockingIOError):
            self.socket.connect(address)

    @property
    def is_over(self) -> bool:
        return self.is_done or self.ending is not None

    def events(self, now_s: float) -> int:
        """Return the socket events to wait for. Also ends an expired pause."""
        pauses = now_s < self._waits_until_s
        has_unsent = bool(self._unsent or self._replies)
        if self._is_exhausted and not has_unsent and not pauses:
            self.is_done = True
        wants_to_write = has_unsent or not (self._is_exhausted or pauses)
        return (_READ if self.attack.reads else select.EPOLLRDHUP) | (_WRITE if wants_to_write else 0)

    def send(self, now_s: float) -> int:
        """Send as much of one piece as the socket accepts. Return the number of bytes."""
        if not self._unsent and not self._next_piece(now_s):
            return 0
        try:
            count = self.socket.send(self._unsent)
        except BlockingIOError:
            return 0
        except OSError:
            self.ending = CLOSED
            return 0
        self._unsent = self._unsent[count:]
        self.sent_bytes += count
        return count

    def receive(self) -> None:
        try:
            received = self.socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        self.received_bytes += len(received)
        if not received:
            self.ending = self.ending or CLOSED
        elif self.attack.port is Port.GRPC:
            self._read(self._rest + received)

    def _next_piece(self, now_s: float) -> bool:
        if self._replies:
            self._unsent, self._replies = memoryview(self._replies), b""
            return True
        if self._is_exhausted or now_s < self._waits_until_s:
            return False
        piece = next(self._pieces, None)
        if piece is None:
            self._is_exhausted = True
            self._waits_until_s = now_s + self.attack.holds_s
        elif isinstance(piece, bytes):
            self._unsent = memoryview(piece)
        else:
            self._waits_until_s = now_s + piece
        return bool(self._unsent)

    def _read(self, received: bytes) -> None:
        at = 0
        while len(received) - at >= 9:
            length = int.from_bytes(received[at : at + 3], "big")
            if len(received) - at < 9 + length:
                break
            if received[at + 3] == wire.GOAWAY:
                code = int.from_bytes(received[at + 13 : at + 17], "big")
                self.ending = f"GOAWAY {code}"
            elif received[at + 3] == wire.PING and not received[at + 4] & wire.ACK:
                # A keepalive PING of the server: an idle client that acknowledges it is not dead.
                self._replies += wire.frame(wire.PING, wire.ACK, 0, received[at + 9 : at + 17])
            at += 9 + length
        self._rest = received[at:]


class Attackers:
    """Runs attacks on many connections at once, in the thread that calls `play`."""

    def __init__(
        self,
        addresses: Mapping[Port, tuple[str, int]],
        *,
        source: str = "127.0.0.1",
        bytes_per_s: float = inf,
        chance: Random | None = None,
    ) -> None:
        self._addresses = addresses
        self._source = source
        self._bytes_per_s = bytes_per_s
        self._chance = chance or Random(17)
        self._poll = select.epoll()
        self._running: dict[int, Attacker] = {}
        self._watched: dict[int, int] = {}  # events that each socket waits for

    def connect(self, attack: Attack) -> Attacker:
        attacker = Attacker(attack, self._addresses[attack.port], self._source, self._chance)
        number = attacker.socket.fileno()
        self._running[number], self._watched[number] = attacker, 0
        self._poll.register(number, 0)
        return attacker

    def play(
        self,
        seconds: float,
        *,
        renew: Callable[[Attacker], object] | None = None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        """Run until all connections have ended or time is up; `renew` is called for each ended one, and may connect
        another.

        `meanwhile` is called about fifty times a second.
        """
        begun_s = last_s = time.monotonic()
        allowance = 0.0
        while self._running and (now_s := time.monotonic()) - begun_s < seconds:
            allowance = min(self._bytes_per_s, allowance + (now_s - last_s) * self._bytes_per_s)
            last_s = now_s
            self._watch(now_s, may_send=allowance > 0)
            allowance -= self._turn(now_s)
            meanwhile()
            for one in [one for one in self._running.values() if one.is_over]:
                self._disconnect(one)
                if renew is not None:
                    renew(one)

    def close(self) -> None:
        for one in list(self._running.values()):
            self._disconnect(one)
        self._poll.close()

    def _watch(self, now_s: float, *, may_send: bool) -> None:
        for number, one in self._running.items():
            events = one.events(now_s)
            if not may_send:
                events &= ~_WRITE
            if events != self._watched[number]:
                self._watched[number] = events
                self._poll.modify(number, events)

    def _turn(self, now_s: float) -> int:
        sent = 0
        for number, events in self._poll.poll(_TURN_S):
            one = self._running[number]
            if events & _READ:
                one.receive()
            elif events & _CLOSED:
                one.ending = CLOSED
            if events & _WRITE and one.ending is None:
                sent += one.send(now_s)
        return sent

    def _disconnect(self, one: Attacker) -> None:
        number = one.socket.fileno()
        del self._running[number], self._watched[number]
        self._poll.unregister(number)
        one.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
