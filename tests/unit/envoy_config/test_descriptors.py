"""Which descriptors rules ask for, and which of them a mapping can make."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.tree import Node
from ratelimit_rls.envoy_config.descriptors import plan, unused
from ratelimit_rls.envoy_config.mapping import Mapped, from_flags, obvious
from ratelimit_rls.rules.compile import compile_documents

LIMIT = "rate_limit: {unit: minute, requests_per_unit: 1}"


def domain(descriptors: str) -> Node:
    text = f"domain: edge\ndescriptors:\n{descriptors}"
    return compile_documents({"edge.yaml": text.encode()}).tree.domains["edge"]


def mapped(*flags: str) -> dict[str, Mapped]:
    return {**obvious(), **from_flags(flags)}


def made(root: Node, *flags: str) -> list[list[str]]:
    planned, remarks = plan(root, mapped(*flags))
    assert remarks == []
    return [[entry.key for entry in descriptor] for descriptor in planned.descriptors]


def test_rules_that_differ_in_values_alone_ask_for_one_descriptor() -> None:
    root = domain(
        f"  - {{key: plan, value: free, descriptors: [{{key: user, {LIMIT}}}]}}\n"
        f"  - {{key: plan, value: pro, {LIMIT}, descriptors: [{{key: user, {LIMIT}}}]}}\n"
        f"  - {{key: remote_address, match: {{cidr: 10.0.0.0/8}}, {LIMIT}}}\n"
        f"  - {{key: remote_address, {LIMIT}}}\n"
    )
    assert made(root, "plan=header:x-plan", "user=header:x-user") == [["plan", "user"], ["plan"], ["remote_address"]]


def test_levels_without_a_rule_ask_for_nothing_of_their_own() -> None:
    assert made(domain(f"  - {{key: a, descriptors: [{{key: b, {LIMIT}}}]}}\n"), "a=method", "b=host") == [["a", "b"]]


def test_a_key_with_a_star_is_met_by_every_key_of_the_mapping_that_is_like_it() -> None:
    assert made(domain(f"  - {{key: 'x*', {LIMIT}}}\n"), "x1=method", "y=host", "xx=scheme") == [["x1"], ["xx"]]


def test_each_template_that_a_rule_may_meet_is_a_descriptor() -> None:
    root = domain(f"  - {{key: p, value: '/a/*', {LIMIT}}}\n  - {{key: q, {LIMIT}}}\n")
    planned, _ = plan(root, mapped("p=path:/b,/a/{x},/a/{x}/**", "q=path:/b,/c"))
    assert [[(entry.key, entry.template) for entry in descriptor] for descriptor in planned.descriptors] == [
        [("p", 1)],
        [("p", 2)],
        [("q", 0)],
        [("q", 1)],
    ]


@pytest.mark.parametrize(
    ("descriptors", "flags", "told"),
    [
        (
            f"  - {{key: user, {LIMIT}}}",
            (),
            "edge.yaml:3:5: warning[unproduced]: no route makes the descriptor user: "
            "nothing says where 'user' comes from; add e.g. --from user=header:x-user",
        ),
        (
            f"  - {{key: plan, value: free, descriptors: [{{key: path, {LIMIT}}}]}}",
            (),
            "edge.yaml:3:44: warning[unproduced]: no route makes the descriptor plan=free,path: "
            "nothing says where 'plan' comes from; add e.g. --from plan=header:x-plan; "
            "nothing says where 'path' comes from; add e.g. --from path=path",
        ),
        (
            f"  - {{key: generic_key, value: slow, {LIMIT}}}",
            (),
            "edge.yaml:3:5: warning[unproduced]: no route makes the descriptor generic_key=slow: "
            "nothing says where 'generic_key' comes from; add e.g. --from generic_key=value:slow",
        ),
        (
            f"  - {{key: plan, value: pro, {LIMIT}}}",
            ("plan=value:free",),
            "edge.yaml:3:5: warning[unproduced]: no route makes the descriptor plan=pro: 'plan' comes as 'free' only",
        ),
        (
            f"  - {{key: p, match: {{prefix: /c}}, {LIMIT}}}",
            ("p=path:/a,/b",),
            "edge.yaml:3:5: warning[unproduced]: no route makes the descriptor p=prefix(/c): "
            "'p' comes as '/a' or '/b' only",
        ),
        (
            f"  - {{key: 'x*', {LIMIT}}}",
            (),
            "edge.yaml:3:5: warning[unproduced]: no route makes the descriptor x*: no key of the mapping is like 'x*'",
        ),
        (
            f"  - {{key: 'x*', value: a, {LIMIT}}}",
            ("x1=path", "x2=value:b"),
            "edge.yaml:3:5: warning[unproduced]: no route makes the descriptor x*=a: "
            "'x1' starts with a slash; write /a; 'x2' comes as 'b' only",
        ),
    ],
)
def test_a_rule_that_no_descriptor_can_meet_is_named_with_what_is_missing(
    descriptors: str, flags: tuple[str, ...], told: str
) -> None:
    planned, remarks = plan(domain(f"{descriptors}\n"), mapped(*flags))
    assert planned.descriptors == ()
    assert [str(remark) for remark in remarks] == [told]


def test_a_key_of_the_mapping_that_no_rule_has_is_named_where_it_was_written() -> None:
    remarks = unused([domain(f"  - {{key: user, {LIMIT}}}\n")], mapped("user=header:x-user", "page=query:page"))
    assert [str(remark) for remark in remarks] == [
        "--from page=query:page: warning[unused]: no rule has a descriptor with the key 'page'"
    ]


def test_the_longest_wait_of_throttled_rules_is_known() -> None:
    planned, _ = plan(
        domain(
            f"  - {{key: remote_address, action: throttle, max_delay: 300ms, {LIMIT}}}\n  - {{key: user, {LIMIT}}}\n"
        ),
        mapped("user=header:x-user"),
    )
    assert planned.longest_wait_us == 300_000
