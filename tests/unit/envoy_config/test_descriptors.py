"""Descriptors that rules need, and which of them a mapping can produce."""

from __future__ import annotations

import pytest

from ratelimit_rls.core.tree import Node
from ratelimit_rls.envoy_config.descriptors import plan_descriptors, unused_keys
from ratelimit_rls.envoy_config.mapping import MappedKey, default_mapping, from_flags
from ratelimit_rls.rules.compile import compile_documents

LIMIT = "rate_limit: {unit: minute, requests_per_unit: 1}"


def domain(descriptors: str) -> Node:
    text = f"domain: edge\ndescriptors:\n{descriptors}"
    return compile_documents({"edge.yaml": text.encode()}).tree.domains["edge"]


def mapped(*flags: str) -> dict[str, MappedKey]:
    return {**default_mapping(), **from_flags(flags)}


def descriptors_for(root: Node, *flags: str) -> list[list[str]]:
    planned, warnings = plan_descriptors(root, mapped(*flags))
    assert warnings == []
    return [[entry.key for entry in descriptor] for descriptor in planned.descriptors]


def test_rules_that_differ_only_in_values_need_one_descriptor() -> None:
    root = domain(
        f"  - {{key: plan, value: free, descriptors: [{{key: user, {LIMIT}}}]}}\n"
        f"  - {{key: plan, value: pro, {LIMIT}, descriptors: [{{key: user, {LIMIT}}}]}}\n"
        f"  - {{key: remote_address, match: {{cidr: 10.0.0.0/8}}, {LIMIT}}}\n"
        f"  - {{key: remote_address, {LIMIT}}}\n"
    )
    assert descriptors_for(root, "plan=header:x-plan", "user=header:x-user") == [
        ["plan", "user"],
        ["plan"],
        ["remote_address"],
    ]


def test_levels_without_a_rule_need_no_descriptor() -> None:
    assert descriptors_for(domain(f"  - {{key: a, descriptors: [{{key: b, {LIMIT}}}]}}\n"), "a=method", "b=host") == [
        ["a", "b"]
    ]


def test_wildcard_key_uses_every_matching_mapping_key() -> None:
    assert descriptors_for(domain(f"  - {{key: 'x*', {LIMIT}}}\n"), "x1=method", "y=host", "xx=scheme") == [
        ["x1"],
        ["xx"],
    ]


def test_each_matching_template_makes_a_descriptor() -> None:
    root = domain(f"  - {{key: p, value: '/a/*', {LIMIT}}}\n  - {{key: q, {LIMIT}}}\n")
    planned, _ = plan_descriptors(root, mapped("p=path:/b,/a/{x},/a/{x}/**", "q=path:/b,/c"))
    assert [[(entry.key, entry.template) for entry in descriptor] for descriptor in planned.descriptors] == [
        [("p", 1)],
        [("p", 2)],
        [("q", 0)],
        [("q", 1)],
    ]


@pytest.mark.parametrize(
    ("descriptors", "flags", "message"),
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
            "edge.yaml:3:5: warning[unproduced]: no route makes the descriptor x*: no key of the mapping matches 'x*'",
        ),
        (
            f"  - {{key: 'x*', value: a, {LIMIT}}}",
            ("x1=path", "x2=value:b"),
            "edge.yaml:3:5: warning[unproduced]: no route makes the descriptor x*=a: "
            "'x1' starts with a slash; write /a; 'x2' comes as 'b' only",
        ),
    ],
)
def test_unproducible_rule_is_reported_with_the_reason(descriptors: str, flags: tuple[str, ...], message: str) -> None:
    planned, warnings = plan_descriptors(domain(f"{descriptors}\n"), mapped(*flags))
    assert planned.descriptors == ()
    assert [str(warning) for warning in warnings] == [message]


def test_unused_mapping_key_is_reported_with_its_position() -> None:
    warnings = unused_keys([domain(f"  - {{key: user, {LIMIT}}}\n")], mapped("user=header:x-user", "page=query:page"))
    assert [str(warning) for warning in warnings] == [
        "--from page=query:page: warning[unused]: no rule has a descriptor with the key 'page'"
    ]


def test_plan_has_the_longest_wait_of_throttled_rules() -> None:
    planned, _ = plan_descriptors(
        domain(
            f"  - {{key: remote_address, action: throttle, max_delay: 300ms, {LIMIT}}}\n  - {{key: user, {LIMIT}}}\n"
        ),
        mapped("user=header:x-user"),
    )
    assert planned.max_wait_us == 300_000
