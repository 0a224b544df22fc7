"""Requests that are read by hand say what protobuf reads in them, whatever the bytes are."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratelimit_rls.core.model import Descriptor, Entry, Purpose, Request
from ratelimit_rls.errors import BadRequest
from ratelimit_rls.transport.grpc.decode import decode, read_any, read_plain
from ratelimit_rls.transport.grpc.messages import RateLimitRequest

# The machine may be busy: how long an example takes says nothing here.
patiently = settings(deadline=None, database=None, max_examples=500, suppress_health_check=[HealthCheck.too_slow])

# Bytes that mean something between texts: tags, wire types that skip, ends of groups, lengths that lie by one, and the
# eighth bit of long numbers.
meaningful = st.sampled_from(
    b"\x00\x01\x02\x03\x04\x05\x08\x0a\x0b\x0c\x10\x12\x18\x1a\x1b\x1c\x20\x22\x7f\x80\xc0\xff"
)
texts = st.one_of(
    st.text("ab/\n\x12\x18", max_size=6),
    st.text(max_size=6),
    st.integers(110, 140).map("x".__mul__),  # where a length comes to need a second byte
)
plain_texts = st.text(st.characters(max_codepoint=127), min_size=1, max_size=12)


def serialized(domain: str, descriptors: list[list[tuple[str, str]]], hits: int) -> bytes:
    request = RateLimitRequest(domain=domain, hits_addend=hits)
    for entries in descriptors:
        descriptor = request.descriptors.add()
        for key, value in entries:
            descriptor.entries.add(key=key, value=value)
    return bytes(request.SerializeToString())


def with_more(message: bytes, more: list[tuple[int, int | None, bool]]) -> bytes:
    """With what only some descriptors have: a limit, hits of their own, and that they are a refund."""
    request = RateLimitRequest.FromString(message)
    for descriptor, (unit, hits, is_refund) in zip(request.descriptors, more, strict=False):
        if unit:
            descriptor.limit.unit = unit
        if hits is not None:
            descriptor.hits_addend.value = hits
        descriptor.is_negative_hits = is_refund
    return bytes(request.SerializeToString())


def entries_of(one: st.SearchStrategy[str]) -> st.SearchStrategy[list[list[tuple[str, str]]]]:
    return st.lists(st.lists(st.tuples(one, one), max_size=3), max_size=4)


written = st.builds(serialized, texts, entries_of(texts), st.sampled_from([0, 1, 127, 128, 2**32 - 1]))
written_with_more = st.builds(
    with_more,
    written,
    st.lists(st.tuples(st.integers(0, 3), st.none() | st.sampled_from([0, 1, 300]), st.booleans()), max_size=4),
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Messages with some bytes changed, put in, left out or said twice."""
    message = bytearray(draw(written | written_with_more))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(message)))
        end = draw(st.integers(at, min(len(message), at + 8)))
        put_in = draw(st.lists(meaningful, max_size=3).map(bytes) | st.just(bytes(message[at:end]) * 2))
        message[at:end] = put_in
    return bytes(message)


def told(message: bytes, *, by_hand: bool) -> Request | str:
    try:
        return decode(message) if by_hand else read_any(message)
    except BadRequest as fault:
        return str(fault)


@patiently
@given(
    st.one_of(
        written, written_with_more, mutated(), st.binary(max_size=40), st.lists(meaningful, max_size=40).map(bytes)
    )
)
def test_whatever_is_read_by_hand_is_what_protobuf_reads(message: bytes) -> None:
    assert told(message, by_hand=True) == told(message, by_hand=False)


@patiently
@given(mutated())
def test_whatever_was_done_to_a_message_it_is_read_as_protobuf_does_or_not_at_all(message: bytes) -> None:
    by_hand = read_plain(message)

    assert by_hand is None or by_hand == told(message, by_hand=False)


@patiently
@given(st.text(st.characters(max_codepoint=127), max_size=20), entries_of(plain_texts), st.integers(0, 127))
def test_plain_messages_are_read_by_hand(domain: str, descriptors: list[list[tuple[str, str]]], hits: int) -> None:
    message = serialized(domain, descriptors, hits)
    read = read_plain(message, Purpose.LOOK)

    assert read is not None
    assert read == read_any(message, Purpose.LOOK)


def test_however_one_byte_of_a_message_is_changed_it_is_read_as_protobuf_does_or_not_at_all() -> None:
    message = serialized("ab", [[("k", "v"), ("key", "1")], [("\n", "\x12\x01"), ("x", "yz")], []], 5)
    assert read_plain(message) == read_any(message)
    changed = {
        message[:at] + put_in + message[at + left_out :]
        for at in range(len(message) + 1)
        for put_in in (b"", *(bytes([byte]) for byte in range(256)))
        for left_out in (0, 1)
    }

    read = {each: by_hand for each in changed if (by_hand := read_plain(each)) is not None}

    assert len(read) > 1000
    assert {each: told(each, by_hand=False) for each in read} == read


def test_what_is_read_by_hand_has_its_names() -> None:
    read = read_plain(serialized("edge", [[("plan", "free"), ("user", "alice")]], 3))

    assert isinstance(read, Request)
    assert (read.domain, read.hits, read.purpose) == ("edge", 3, Purpose.DECIDE)
    (descriptor,) = read.descriptors
    assert isinstance(descriptor, Descriptor)
    assert descriptor == Descriptor((Entry("plan", "free"), Entry("user", "alice")))
    assert all(isinstance(entry, Entry) for entry in descriptor.entries)
