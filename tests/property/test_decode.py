"""The hand-written request decoder agrees with protobuf for any bytes."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratelimit_rls.api.rls.decode import decode, decode_fast, decode_protobuf
from ratelimit_rls.core.model import Descriptor, Entry, Purpose, Request
from ratelimit_rls.errors import BadRequest, TooComplex
from ratelimit_rls.pipeline.message_bounds import DEFAULT_BOUNDS, MessageBounds
from ratelimit_rls.protos.messages import RateLimitRequest

# No deadline: the machine may be busy.
patiently = settings(
    deadline=None,
    database=None,
    max_examples=5 * settings().max_examples,  # messages are small: 150 or 500, depending on the profile
    suppress_health_check=[HealthCheck.too_slow],
)

# Significant bytes between texts: tags, wire types to skip, ends of groups, lengths off by one, and the eighth bit of
# long numbers.
meaningful = st.sampled_from(
    b"\x00\x01\x02\x03\x04\x05\x08\x0a\x0b\x0c\x10\x12\x18\x1a\x1b\x1c\x20\x22\x7f\x80\xc0\xff"
)
texts = st.one_of(
    st.text("ab/\n\x12\x18", max_size=6),
    st.text(max_size=6),
    st.integers(110, 140).map("x".__mul__),  # around the length that needs a second byte
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
    """Return the message with optional fields of descriptors: a limit, hits, and is_negative_hits."""
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
    """Draw messages with some bytes changed, inserted, deleted or repeated."""
    message = bytearray(draw(written | written_with_more))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(message)))
        end = draw(st.integers(at, min(len(message), at + 8)))
        put_in = draw(st.lists(meaningful, max_size=3).map(bytes) | st.just(bytes(message[at:end]) * 2))
        message[at:end] = put_in
    return bytes(message)


def decode_or_error(message: bytes, *, by_hand: bool) -> Request | str:
    try:
        return decode(message) if by_hand else decode_protobuf(message)
    except BadRequest as raised:
        return str(raised)


@patiently
@given(
    st.one_of(
        written, written_with_more, mutated(), st.binary(max_size=40), st.lists(meaningful, max_size=40).map(bytes)
    )
)
def test_fast_decoder_agrees_with_protobuf(message: bytes) -> None:
    assert decode_or_error(message, by_hand=True) == decode_or_error(message, by_hand=False)


@patiently
@given(
    st.one_of(
        written, written_with_more, mutated(), st.binary(max_size=40), st.lists(meaningful, max_size=40).map(bytes)
    )
)
def test_message_within_bounds_passes_the_check(message: bytes) -> None:
    """Whatever protobuf accepts passes, and what the check rejects as malformed protobuf rejects too."""
    try:
        DEFAULT_BOUNDS.request_scan.check(message)
        error = None
    except BadRequest as raised:
        error = str(raised)
    assert error in (None, decode_or_error(message, by_hand=False))


long_texts = st.sampled_from([126, 127, 128, 129, 130]).map("x".__mul__) | st.sampled_from([63, 64, 65]).map(
    "ä".__mul__
)
around_bounds = st.builds(
    serialized,
    st.sampled_from(["", "edge"]) | long_texts,
    st.lists(st.lists(st.tuples(st.just("k"), st.just("v") | long_texts), max_size=4), max_size=5),
    st.sampled_from([0, 1, 300]),
)


@patiently
@given(around_bounds, st.integers(1, 4), st.integers(1, 8), st.sampled_from([128, 129]))
def test_only_messages_beyond_a_bound_are_rejected(
    message: bytes, descriptors: int, entries: int, entry_bytes: int
) -> None:
    bounds = MessageBounds(descriptors=descriptors, entries=entries, entry_bytes=entry_bytes)
    request = decode_protobuf(message)
    texts = [request.domain, *[text for one in request.descriptors for entry in one.entries for text in entry]]
    exceeds = (
        len(request.descriptors) > descriptors
        or sum(len(one.entries) for one in request.descriptors) > entries
        or max(len(text.encode()) for text in texts) > entry_bytes
    )
    try:
        read = decode(message, bounds=bounds)
    except TooComplex:
        read = None
    assert read == (None if exceeds else request)


@patiently
@given(mutated())
def test_mutated_message_agrees_with_protobuf_or_falls_back(message: bytes) -> None:
    by_hand = decode_fast(message)

    assert by_hand is None or by_hand == decode_or_error(message, by_hand=False)


@patiently
@given(st.text(st.characters(max_codepoint=127), max_size=20), entries_of(plain_texts), st.integers(0, 127))
def test_plain_messages_use_the_fast_decoder(domain: str, descriptors: list[list[tuple[str, str]]], hits: int) -> None:
    message = serialized(domain, descriptors, hits)
    read = decode_fast(message, Purpose.LOOK)

    assert read is not None
    assert read == decode_protobuf(message, Purpose.LOOK)


def test_single_byte_changes_agree_with_protobuf_or_fall_back() -> None:
    message = serialized("ab", [[("k", "v"), ("key", "1")], [("\n", "\x12\x01"), ("x", "yz")], []], 5)
    assert decode_fast(message) == decode_protobuf(message)
    changed = {
        message[:at] + put_in + message[at + left_out :]
        for at in range(len(message) + 1)
        for put_in in (b"", *(bytes([byte]) for byte in range(256)))
        for left_out in (0, 1)
    }

    read = {each: by_hand for each in changed if (by_hand := decode_fast(each)) is not None}

    assert len(read) > 1000
    assert {each: decode_or_error(each, by_hand=False) for each in read} == read


def test_fast_decoder_returns_named_tuples() -> None:
    read = decode_fast(serialized("edge", [[("plan", "free"), ("user", "alice")]], 3))

    assert isinstance(read, Request)
    assert (read.domain, read.hits, read.purpose) == ("edge", 3, Purpose.DECIDE)
    (descriptor,) = read.descriptors
    assert isinstance(descriptor, Descriptor)
    assert descriptor == Descriptor((Entry("plan", "free"), Entry("user", "alice")))
    assert all(isinstance(entry, Entry) for entry in descriptor.entries)
