"""SPIFFE IDs by the grammar of their specification, and patterns for them."""

from __future__ import annotations

import pytest

from ratelimit_rls.tls.spiffe import MAX_ID_BYTES, allows, is_pattern, is_workload_id

ENVOY = "spiffe://prod.example/ns/edge/sa/envoy"


@pytest.mark.parametrize("uri", [ENVOY, "spiffe://a/b", "spiffe://td_1.x-y/A.b/_-", "spiffe://prod.example/..."])
def test_valid_workload_ids(uri: str) -> None:
    assert is_workload_id(uri)
    assert is_pattern(uri)
    assert allows(uri, uri)


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "spiffe://",
        "spiffe://prod.example",
        "spiffe://prod.example/",
        f"{ENVOY}/",
        "spiffe:///ns/edge",
        "spiffe://prod.example//edge",
        "spiffe://prod.example/ns/./edge",
        "spiffe://prod.example/ns/../edge",
        "spiffe://Prod.example/ns",
        "SPIFFE://prod.example/ns",
        "spiffe://user@prod.example/ns",
        "spiffe://prod.example:80/ns",
        "spiffe://prod.example/n%73",
        "spiffe://prod.example/ns?x",
        "spiffe://prod.example/ns#x",
        "spiffe://prod.example/ns\0",
        "spiffe://prod.example/ns\n",
        "spiffe://prod.exämple/ns",
        "spiffe://prod.example/nś",
        "https://prod.example/ns",
        "prod.example",
        "spiffe://" + "a" * 256 + "/ns",
        "spiffe://a/" + "b" * MAX_ID_BYTES,
    ],
)
def test_invalid_workload_ids(uri: str) -> None:
    assert not is_workload_id(uri)
    assert not is_pattern(uri)
    assert not allows(uri, uri)


@pytest.mark.parametrize(
    ("pattern", "uri", "allowed"),
    [
        (ENVOY, "spiffe://prod.example/ns/edge/sa/Envoy", False),
        (ENVOY, "spiffe://prod.example/ns/edge/sa/envoy/x", False),
        (ENVOY, "spiffe://prod.example/ns/edge/sa", False),
        ("spiffe://prod.example/*", ENVOY, True),
        ("spiffe://prod.example/*", "spiffe://prod.example.evil/ns", False),
        ("spiffe://prod.example/ns/edge/*", ENVOY, True),
        ("spiffe://prod.example/ns/edge/*", "spiffe://prod.example/ns/edge", False),
        ("spiffe://prod.example/ns/edge/*", "spiffe://prod.example/ns/edge2/sa/envoy", False),
        ("spiffe://prod.example/ns/edge/*", "spiffe://prod.example/ns/edge/../root", False),
        ("spiffe://prod.example/ns/edge/*", "spiffe://prod.example/ns/edge/*", False),
    ],
)
def test_patterns_match_whole_segments(pattern: str, uri: str, allowed: bool) -> None:
    assert is_pattern(pattern)
    assert allows(pattern, uri) is allowed


@pytest.mark.parametrize(
    "pattern", ["spiffe://*", "spiffe:///*", "spiffe://td/ns*", "spiffe://td/*/sa/x", "spiffe://td/ns/**"]
)
def test_invalid_patterns(pattern: str) -> None:
    assert not is_pattern(pattern)
