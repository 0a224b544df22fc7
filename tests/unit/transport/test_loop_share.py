"""HTTP reads of many connections are spread over event loop iterations."""

from __future__ import annotations

import asyncio

from ratelimit_rls.transport.http.loop_share import LoopShare


class Flooding:
    """A connection that always has more to read."""

    def __init__(self, share: LoopShare, log: list[int], number: int, reads: int = 1) -> None:
        self._share = share
        self._log = log
        self._number = number
        self._reads = reads
        self.is_flooding = True

    def received(self) -> None:
        if self._share.take(self._reads):
            self._log.append(self._number)
        else:
            self._share.wait(self)

    def continue_reading(self) -> int:
        self._log.append(self._number)
        if self.is_flooding:
            self._share.wait(self)
        return self._reads


async def turns(log: list[int], count: int) -> list[int]:
    """Return the number of reads in each of several event loop iterations."""
    sizes = []
    for _ in range(count):
        before = len(log)
        await asyncio.sleep(0)
        sizes.append(len(log) - before)
    return sizes


async def test_reads_per_iteration_are_limited_and_round_robin() -> None:
    log: list[int] = []
    share = LoopShare(max_reads=4)
    flooding = [Flooding(share, log, number) for number in range(10)]
    for one in flooding:
        one.received()
    assert log == [0, 1, 2, 3]
    assert max(await turns(log, 20)) == 4
    waiting = log[4:]
    assert waiting[:12] == [4, 5, 6, 7, 8, 9, 4, 5, 6, 7, 8, 9]
    late = Flooding(share, log, 99)
    late.is_flooding = False
    late.received()
    await turns(log, 4)
    assert 99 in log
    for one in flooding:
        one.is_flooding = False
    await turns(log, 10)


async def test_large_read_counts_as_several() -> None:
    log: list[int] = []
    share = LoopShare(max_reads=4)
    large = [Flooding(share, log, number, reads=9) for number in range(3)]
    for one in large:
        one.is_flooding = False
        one.received()
    assert log == [0]
    assert await turns(log, 3) == [1, 1, 0]


async def test_quiet_port_is_never_deferred() -> None:
    log: list[int] = []
    share = LoopShare(max_reads=2)
    quiet = Flooding(share, log, 1)
    quiet.is_flooding = False
    for count in range(1, 20):
        quiet.received()
        assert len(log) == count
        await asyncio.sleep(0)
