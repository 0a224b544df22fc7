"""Hand-encoded responses, compared byte by byte with the protobuf library."""

from __future__ import annotations

import itertools
from typing import Any

from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st

from ratelimit_rls.api.responses import ResponseBuilder, ResponseOptions
from ratelimit_rls.api.responses.dynamic_metadata import describe_request, merge_rule_metadata
from ratelimit_rls.api.rls.encode import RlsEncoder, varint
from ratelimit_rls.core.model import (
    Charge,
    Code,
    Decision,
    Descriptor,
    DescriptorPlan,
    Entry,
    Limit,
    Penalty,
    PlanTemplate,
    Position,
    Reading,
    Request,
    Rule,
    Status,
    Step,
    Unit,
    WarnAt,
    WarningState,
)
from ratelimit_rls.core.response_policy import BodyFormat, DenyResponse, HeaderFamily, ResponsePolicy
from ratelimit_rls.core.template import Template
from ratelimit_rls.protos.messages import RateLimitResponse
from tests.unit.transport.decisions import Matched, decided, rule

uint32 = st.integers(0, 2**32 - 1) | st.integers(0, 300)
names = st.text(max_size=200)
limits = st.builds(Limit, uint32, st.sampled_from(Unit), name=names)
codes = st.sampled_from([Code.OK, Code.OVER_LIMIT])
metadata = st.dictionaries(
    names, st.none() | st.booleans() | st.integers() | names | st.lists(names, max_size=2), max_size=2
)
header_names = st.text(min_size=1, max_size=200)
options = st.builds(ResponseOptions, st.booleans(), header_names, header_names, header_names, st.booleans())


styles = st.builds(ResponsePolicy, st.none() | st.lists(st.sampled_from(HeaderFamily), max_size=3).map(tuple))
denies = st.none() | st.sampled_from(
    [
        DenyResponse(),
        DenyResponse(BodyFormat.JSON),
        DenyResponse(BodyFormat.PROBLEM, headers=(("X-Empty", Template(())),)),
        DenyResponse(BodyFormat.TEXT, Template.parse("")),
        DenyResponse(BodyFormat.TEXT, Template.parse("${rule}"), "text/x"),
    ]
)
watchers = st.sampled_from([(), (Penalty(1, 1, (1,)),), (WarnAt(800),), (Penalty(1, 1, (1,)), WarnAt(800))])


@st.composite
def decisions(draw: st.DrawFn) -> Decision:
    """Decisions that `decide` can make, and many that it cannot."""
    steps: list[Step] = []
    statuses: list[Status] = []
    for _ in range(draw(st.integers(0, 5))):
        own_metadata = draw(st.none() | metadata)
        if draw(st.booleans()):
            matched_rule = draw(st.none() | st.just(Rule("a.b", (), metadata=own_metadata)))
            descriptor_plan = DescriptorPlan(matched_rule, (), 1, unlimited=draw(st.booleans()))
            statuses.append(Status(Code.OK, None, draw(uint32), 0, descriptor_plan))
            continue
        limit, watched = draw(limits), draw(watchers)
        step = Step(limit, 1, Charge.ALWAYS, shadow_mode=False, quota_mode=draw(st.booleans()))
        rule = Rule(
            draw(names),
            (limit,),
            metadata=own_metadata,
            position=draw(st.none() | st.just(Position("a.yaml", 1, 1))),
            warn_at=next((one for one in watched if isinstance(one, WarnAt)), None),
            response_policy=draw(styles),
            deny=draw(denies),
        )
        descriptor_plan = DescriptorPlan(rule, (step,), 1, watchers=watched)  # type: ignore[arg-type]
        steps.append(step)
        reading = Reading(draw(uint32), draw(st.integers(-1, 2**40)), draw(st.integers(0, 2**60)))
        status = Status(
            draw(codes), step, draw(uint32), draw(st.integers(0, 2**40)), descriptor_plan, reading, (reading,)
        )
        state = draw(st.sampled_from(WarningState)) if rule.warn_at else None
        statuses.append(status._replace(state=state, violations=draw(st.integers(0, 1000))))
    plan_template = PlanTemplate("a", True, tuple(steps), tuple(status.descriptor_plan for status in statuses))
    is_denied = any(status.code is Code.OVER_LIMIT for status in statuses)
    return Decision(
        draw(codes) if is_denied else Code.OK, tuple(statuses), plan_template, now_us=draw(st.integers(0, 2**51))
    )


@given(decisions(), options)
def test_responses_match_protobuf(decision: Decision, options: ResponseOptions) -> None:
    request = Request("a", tuple(Descriptor((Entry("k", "v"),)) for _ in decision.statuses), hits=3)
    encoder = RlsEncoder(options)
    template = encoder.response_template(request, decision.template)
    expected = by_protobuf(decision, request, options)
    for _ in range(2):  # computed, then cached
        written = encoder.encode(decision, template)
        assert RateLimitResponse.FromString(written) == expected
        if not expected.HasField("dynamic_metadata"):  # the order of a map is undefined
            assert written == expected.SerializeToString()
        else:
            assert len(written) == expected.ByteSize()


def by_protobuf(decision: Decision, request: Request, options: ResponseOptions) -> Any:
    message = RateLimitResponse(overall_code=int(decision.code))
    for status in decision.statuses:
        encoded = message.statuses.add(code=int(status.code), limit_remaining=status.remaining)
        if status.step is not None:
            encoded.current_limit.SetInParent()
            encoded.current_limit.name = status.step.limit.name
            encoded.current_limit.requests_per_unit = status.step.limit.requests_per_unit
            encoded.current_limit.unit = int(status.step.limit.wire_unit)
            encoded.duration_until_reset.SetInParent()
            encoded.duration_until_reset.seconds = status.reset_s
    answers = ResponseBuilder(options)
    headers, message.raw_body, _ = answers.build(decision)
    for name, value in headers:
        message.response_headers_to_add.add(key=name, value=value)
    if options.dynamic_metadata:
        message.dynamic_metadata.update(describe_request(request))
        if merge_rule_metadata(decision):
            message.dynamic_metadata.update({"metadata": merge_rule_metadata(decision)})
    if options.dynamic_metadata or decision.code is Code.OVER_LIMIT:
        message.dynamic_metadata.update(answers.rule_metadata(decision))
    return message


def test_denial_always_has_rule_metadata() -> None:
    limit = Limit(5, Unit.DAY, name="daily")
    for denied, enabled in itertools.product((False, True), repeat=2):
        reading = Reading(0, 1_500_000, 9_000_000) if denied else Reading(4, 0, 9_000_000)
        decision = decided(Matched(rule(limit), [reading]))
        encoder = RlsEncoder(ResponseOptions(dynamic_metadata=enabled))
        template = encoder.response_template(Request("edge", (Descriptor((Entry("user", "a"),)),)), decision.template)
        message = RateLimitResponse.FromString(encoder.encode(decision, template))
        encoded = json_format.MessageToDict(message.dynamic_metadata).get("rule")
        encoded_rule = {"path": "edge.user", "window": "day", "limit": "daily"}
        assert encoded == ({**encoded_rule, "retry_after": 2} if denied else encoded_rule if enabled else None)


def test_watched_rules_report_their_state() -> None:
    watched = rule(penalty=Penalty(1, 1, (2,)), warn_at=WarnAt(800))
    decision = decided(Matched(watched, [Reading(0, 2_000_000, 1), Reading(3, 4_000_000, 1), Reading(2, 0, 0)]))
    encoder = RlsEncoder(ResponseOptions())
    answer = encoder.encode(decision, encoder.response_template(Request("edge", ()), decision.template))
    message = RateLimitResponse.FromString(answer)
    assert json_format.MessageToDict(message.dynamic_metadata) == {
        "rule": {"path": "edge.user", "window": "minute", "retry_after": 4, "violations": 3, "state": "throttled"}
    }
    assert [(header.key, header.value) for header in message.response_headers_to_add] == [
        ("X-RateLimit-State", "throttled")
    ]


@given(st.integers(0, 2**64 - 1))
def test_varint_round_trip(number: int) -> None:
    written = varint(number)
    assert sum((byte & 0x7F) << 7 * place for place, byte in enumerate(written)) == number
    assert [byte >> 7 for byte in written] == [1] * (len(written) - 1) + [0]
    assert len(written) == max(1, -(-number.bit_length() // 7))
