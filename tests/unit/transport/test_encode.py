"""Hand-written answers, held byte for byte against the protobuf library's."""

from __future__ import annotations

import itertools
from typing import Any

from google.protobuf import json_format
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
    Penalty,
    Position,
    Reading,
    Request,
    Rule,
    Slot,
    State,
    Status,
    Step,
    Unit,
    WarnAt,
)
from ratelimit_rls.core.style import AnswerStyle, BodyFormat, Deny, Family
from ratelimit_rls.core.template import Template
from ratelimit_rls.transport.answers import AnswerOptions, Answers
from ratelimit_rls.transport.grpc.encode import Encoder, varint
from ratelimit_rls.transport.grpc.messages import RateLimitResponse
from ratelimit_rls.transport.metadata import described, merged
from tests.unit.transport.decisions import Met, decided, rule

uint32 = st.integers(0, 2**32 - 1) | st.integers(0, 300)
names = st.text(max_size=200)
limits = st.builds(Limit, uint32, st.sampled_from(Unit), name=names)
codes = st.sampled_from([Code.OK, Code.OVER_LIMIT])
metadata = st.dictionaries(
    names, st.none() | st.booleans() | st.integers() | names | st.lists(names, max_size=2), max_size=2
)
header_names = st.text(min_size=1, max_size=200)
options = st.builds(AnswerOptions, st.booleans(), header_names, header_names, header_names, st.booleans())


styles = st.builds(AnswerStyle, st.none() | st.lists(st.sampled_from(Family), max_size=3).map(tuple))
denies = st.none() | st.sampled_from(
    [
        Deny(),
        Deny(BodyFormat.JSON),
        Deny(BodyFormat.PROBLEM, headers=(("X-Empty", Template(())),)),
        Deny(BodyFormat.TEXT, Template.parse("")),
        Deny(BodyFormat.TEXT, Template.parse("${rule}"), "text/x"),
    ]
)
watchers = st.sampled_from([(), (Penalty(1, 1, (1,)),), (WarnAt(800),), (Penalty(1, 1, (1,)), WarnAt(800))])


@st.composite
def decisions(draw: st.DrawFn) -> Decision:
    """What `decide` may come to, and much that it would not."""
    steps: list[Step] = []
    statuses: list[Status] = []
    for _ in range(draw(st.integers(0, 5))):
        said = draw(st.none() | metadata)
        if draw(st.booleans()):
            met = draw(st.none() | st.just(Rule("a.b", (), metadata=said)))
            slot = Slot(met, (), 1, unlimited=draw(st.booleans()))
            statuses.append(Status(Code.OK, None, draw(uint32), 0, slot))
            continue
        limit, watched = draw(limits), draw(watchers)
        step = Step(limit, 1, Charge.ALWAYS, shadow_mode=False, quota_mode=draw(st.booleans()))
        rule = Rule(
            draw(names),
            (limit,),
            metadata=said,
            position=draw(st.none() | st.just(Position("a.yaml", 1, 1))),
            warn_at=next((one for one in watched if isinstance(one, WarnAt)), None),
            style=draw(styles),
            deny=draw(denies),
        )
        slot = Slot(rule, (step,), 1, watchers=watched)
        steps.append(step)
        reading = Reading(draw(uint32), draw(st.integers(-1, 2**40)), draw(st.integers(0, 2**60)))
        status = Status(draw(codes), step, draw(uint32), draw(st.integers(0, 2**40)), slot, reading, (reading,))
        state = draw(st.sampled_from(State)) if rule.warn_at else None
        statuses.append(status._replace(state=state, violations=draw(st.integers(0, 1000))))
    outline = Outline("a", True, tuple(steps), tuple(status.slot for status in statuses))
    refuses = any(status.code is Code.OVER_LIMIT for status in statuses)
    return Decision(draw(codes) if refuses else Code.OK, tuple(statuses), outline, now_us=draw(st.integers(0, 2**51)))


@given(decisions(), options)
def test_answers_are_what_protobuf_writes(decision: Decision, options: AnswerOptions) -> None:
    request = Request("a", tuple(Descriptor((Entry("k", "v"),)) for _ in decision.statuses), hits=3)
    encoder = Encoder(options)
    wording = encoder.wording(request, decision.outline)
    expected = by_protobuf(decision, request, options)
    for _ in range(2):  # worked out, and then remembered
        written = encoder.encode(decision, wording)
        assert RateLimitResponse.FromString(written) == expected
        if not expected.HasField("dynamic_metadata"):  # the order in a map is nobody's promise
            assert written == expected.SerializeToString()
        else:
            assert len(written) == expected.ByteSize()


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
    answers = Answers(options)
    headers, message.raw_body, _ = answers.tell(decision)
    for name, value in headers:
        message.response_headers_to_add.add(key=name, value=value)
    if options.dynamic_metadata:
        message.dynamic_metadata.update(described(request))
        if merged(decision):
            message.dynamic_metadata.update({"metadata": merged(decision)})
    if options.dynamic_metadata or decision.code is Code.OVER_LIMIT:
        message.dynamic_metadata.update(answers.fired(decision))
    return message


def test_a_refusal_always_says_which_rule_it_was_and_a_pass_only_if_asked_to() -> None:
    limit = Limit(5, Unit.DAY, name="daily")
    for refused, enabled in itertools.product((False, True), repeat=2):
        reading = Reading(0, 1_500_000, 9_000_000) if refused else Reading(4, 0, 9_000_000)
        decision = decided(Met(rule(limit), [reading]))
        encoder = Encoder(AnswerOptions(dynamic_metadata=enabled))
        wording = encoder.wording(Request("edge", (Descriptor((Entry("user", "a"),)),)), decision.outline)
        message = RateLimitResponse.FromString(encoder.encode(decision, wording))
        told = json_format.MessageToDict(message.dynamic_metadata).get("rule")
        fired = {"path": "edge.user", "window": "day", "limit": "daily"}
        assert told == ({**fired, "retry_after": 2} if refused else fired if enabled else None)


def test_watched_rules_say_how_they_stand() -> None:
    watched = rule(penalty=Penalty(1, 1, (2,)), warn_at=WarnAt(800))
    decision = decided(Met(watched, [Reading(0, 2_000_000, 1), Reading(3, 4_000_000, 1), Reading(2, 0, 0)]))
    encoder = Encoder(AnswerOptions())
    answer = encoder.encode(decision, encoder.wording(Request("edge", ()), decision.outline))
    message = RateLimitResponse.FromString(answer)
    assert json_format.MessageToDict(message.dynamic_metadata) == {
        "rule": {"path": "edge.user", "window": "minute", "retry_after": 4, "violations": 3, "state": "throttled"}
    }
    assert [(header.key, header.value) for header in message.response_headers_to_add] == [
        ("X-RateLimit-State", "throttled")
    ]


@given(st.integers(0, 2**64 - 1))
def test_a_varint_reads_back(number: int) -> None:
    written = varint(number)
    assert sum((byte & 0x7F) << 7 * place for place, byte in enumerate(written)) == number
    assert [byte >> 7 for byte in written] == [1] * (len(written) - 1) + [0]
    assert len(written) == max(1, -(-number.bit_length() // 7))
