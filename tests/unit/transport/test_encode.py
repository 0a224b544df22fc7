"""Hand-written answers, held byte for byte against the protobuf library's."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ratelimit_rls.core.model import (
    Charge,
    Code,
    Decision,
    Descriptor,
    Entry,
    Limit,
    Outline,
    Reading,
    Request,
    Rule,
    Slot,
    Status,
    Step,
    Unit,
)
from ratelimit_rls.transport.answers import AnswerOptions
from ratelimit_rls.transport.grpc.encode import Encoder, varint
from ratelimit_rls.transport.grpc.messages import RateLimitResponse
from ratelimit_rls.transport.headers import spoken_of
from ratelimit_rls.transport.metadata import described, merged

uint32 = st.integers(0, 2**32 - 1) | st.integers(0, 300)
names = st.text(max_size=200)
limits = st.builds(Limit, uint32, st.sampled_from(Unit), name=names)
codes = st.sampled_from([Code.OK, Code.OVER_LIMIT])
metadata = st.dictionaries(
    names, st.none() | st.booleans() | st.integers() | names | st.lists(names, max_size=2), max_size=2
)
header_names = st.text(min_size=1, max_size=200)
options = st.builds(AnswerOptions, st.booleans(), header_names, header_names, header_names, st.booleans())


@st.composite
def decisions(draw: st.DrawFn) -> Decision:
    steps: list[Step] = []
    statuses: list[Status] = []
    for _ in range(draw(st.integers(0, 5))):
        said = draw(st.none() | metadata)
        remaining, reset_s = draw(uint32), draw(st.integers(0, 2**40))
        if draw(st.booleans()):
            slot = Slot(draw(st.none() | st.just(Rule("a.b", (), metadata=said))), (), 1)
            statuses.append(Status(Code.OK, None, remaining, 0, slot))
            continue
        limit = draw(limits)
        step = Step(limit, 1, Charge.ALWAYS, shadow_mode=False, quota_mode=draw(st.booleans()))
        slot = Slot(Rule("a.b", (limit,), metadata=said), (step,), 1)
        steps.append(step)
        statuses.append(Status(draw(codes), step, remaining, reset_s, slot, Reading(remaining, 0, 0)))
    outline = Outline("a", True, tuple(steps), tuple(status.slot for status in statuses))
    return Decision(draw(codes), tuple(statuses), outline)


@given(decisions(), options)
def test_answers_are_what_protobuf_writes(decision: Decision, options: AnswerOptions) -> None:
    request = Request("a", tuple(Descriptor((Entry("k", "v"),)) for _ in decision.statuses), hits=3)
    encoder = Encoder(options)
    written = encoder.encode(decision, encoder.wording(request, decision.outline))
    expected = by_protobuf(decision, request, options)
    assert RateLimitResponse.FromString(written) == expected
    if not options.dynamic_metadata:  # the order in a map is nobody's promise
        assert written == expected.SerializeToString()


def by_protobuf(decision: Decision, request: Request, options: AnswerOptions) -> Any:
    message = RateLimitResponse(overall_code=int(decision.code))
    for status in decision.statuses:
        told = message.statuses.add(code=int(status.code), limit_remaining=status.remaining)
        if status.step is not None:
            told.current_limit.SetInParent()
            told.current_limit.name = status.step.limit.name
            told.current_limit.requests_per_unit = status.step.limit.requests_per_unit
            told.current_limit.unit = int(status.step.limit.spoken_unit)
            told.duration_until_reset.SetInParent()
            told.duration_until_reset.seconds = status.reset_s
    chosen = spoken_of(decision) if options.headers_enabled else None
    if chosen is not None and chosen.step is not None:
        header = message.response_headers_to_add.add
        header(key=options.limit_header, value=str(chosen.step.limit.requests_per_unit))
        header(key=options.remaining_header, value=str(chosen.remaining))
        header(key=options.reset_header, value=str(chosen.reset_s))
    if options.dynamic_metadata:
        message.dynamic_metadata.update(described(request))
        if merged(decision):
            message.dynamic_metadata.update({"metadata": merged(decision)})
    return message


@given(st.integers(0, 2**64 - 1))
def test_a_varint_reads_back(number: int) -> None:
    written = varint(number)
    assert sum((byte & 0x7F) << 7 * place for place, byte in enumerate(written)) == number
    assert [byte >> 7 for byte in written] == [1] * (len(written) - 1) + [0]
    assert len(written) == max(1, -(-number.bit_length() // 7))
