"""Header blocks of traced callers are valid HPACK, and each has a new traceparent."""

from __future__ import annotations

import re
from itertools import islice

from hpack import Decoder

from bench import wire
from bench.traced_headers import TRACEPARENT, TracedHeaderBlocks

UNSAMPLED = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-00")


def test_every_call_has_the_same_headers_and_a_new_traceparent() -> None:
    decoder = Decoder()
    headers = wire.call_headers("ratelimit", "5S", wire.METHOD)
    blocks = [*islice(TracedHeaderBlocks(headers, "http"), 500)]
    decoded = [[(str(name), str(value)) for name, value in decoder.decode(block)] for block in blocks]
    traceparents = {dict(each).pop(TRACEPARENT) for each in decoded}
    assert len(traceparents) == len({*blocks}) == len(blocks)
    assert all(UNSAMPLED.fullmatch(one) for one in traceparents)
    pseudo_headers = [(":method", "POST"), (":scheme", "http")]
    for each in decoded:
        assert each[:-1] == [*pseudo_headers, *headers]


def test_blocks_refer_to_the_header_table_as_those_of_real_clients() -> None:
    headers = wire.call_headers("ratelimit", "5S", wire.METHOD)
    lengths = [len(block) for block in islice(TracedHeaderBlocks(headers, "http"), 200)]
    assert lengths[0] > 150
    assert sorted(lengths)[100] < 60
    assert max(lengths[5:]) > 100  # evicted headers are sent again
