"""Property test of the asyncio protocol: random input and server actions leave no timers and no state behind."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.h2.test_connection_random import ACTIONS, MUTATED, PROPER, RANDOM, Ids, RandomServer, Sent, quickly
from tests.unit.transport.http2_client import Client


class RandomTimes(RandomServer):
    """Performs random server actions while timers of the event loop run."""

    client: Client

    def do(self, action: str, number: int) -> None:
        if action == "wait":
            self.client.loop.wait(number / 1000)
        super().do(action, number)


@quickly
@given(st.lists(st.one_of(*[PROPER] * 3, *[ACTIONS] * 2), max_size=30), st.lists(RANDOM | MUTATED, max_size=5))
def test_random_input_leaves_no_timers_behind(proper: Sequence[Sent | tuple[str, int]], others: Sequence[Sent]) -> None:
    """Invalid input comes last, because it closes most connections."""
    client, ids = Client(), Ids()
    random_server = RandomTimes(client)
    for one in (*proper, *others):
        if isinstance(one, tuple):
            random_server.do(*one)
        else:
            client.send(one(ids))
    client.disconnect()
    assert sorted(random_server.answered_ids + client.server.cancelled_ids) == sorted(client.queued_ids)
    ended, sending = client.connection, client.connection._outbound
    assert (ended._unfinished_bytes, ended._streams, ended.is_closed) == (0, {}, True)
    assert (sending.stream_credit, sending._pending, sending.ready) == ({}, {}, [])
    assert (client.loop.timers, client.server.connections, client.server.buffered_bytes) == ([], [], 0)
