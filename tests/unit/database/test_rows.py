"""Row mapping: stored limits, and images in audit entries."""

from __future__ import annotations

from typing import Any

import pytest

from ratelimit_rls.core.model import Algorithm, Limit, Unit
from ratelimit_rls.database.administration import AdminToken, Role
from ratelimit_rls.database.row_mapping import LimitCache, key_image, token_image
from ratelimit_rls.database.writes.rules import domain_of
from ratelimit_rls.identity.accounts import ApiKey, limit_fields, limit_from_fields


@pytest.mark.parametrize(
    "limit",
    [
        Limit(100, Unit.MINUTE),
        Limit(0, Unit.SECOND),
        Limit(5, Unit.HOUR, unit_multiplier=6),
        Limit(10, Unit.SECOND, Algorithm.SLIDING_LOG),
        Limit(10, Unit.SECOND, Algorithm.TOKEN_BUCKET, 10),
        Limit(10, Unit.SECOND, Algorithm.GCRA, 3),
        Limit(1000, Unit.MONTH, timezone="Europe/Berlin"),
    ],
)
def test_limit_round_trip(limit: Limit) -> None:
    assert limit_from_fields(limit_fields(limit)) == limit


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"requests_per_unit": 1},
        {"requests_per_unit": "1", "unit": "minute"},
        {"requests_per_unit": True, "unit": "minute"},
        {"requests_per_unit": -1, "unit": "minute"},
        {"requests_per_unit": 1.5, "unit": "minute"},
        {"requests_per_unit": 1, "unit": "fortnight"},
        {"requests_per_unit": 1, "unit": 2},
        {"requests_per_unit": 1, "unit": "minute", "algorithm": "dice"},
        {"requests_per_unit": 1, "unit": "minute", "burst": 3},
        {"requests_per_unit": 1, "unit": "minute", "color": "red"},
        "minute",
    ],
)
def test_foreign_limit_fields_are_rejected(fields: Any) -> None:
    with pytest.raises(ValueError, match="not how a limit is stored"):
        limit_from_fields(fields)


def test_equal_texts_share_parsed_limits() -> None:
    limits = LimitCache()
    text = '[{"requests_per_unit": 7, "unit": "hour"}]'
    assert limits.read(text) is limits.read(text)
    assert limits.read(None) == ()


def test_audit_images_contain_no_digest() -> None:
    key = ApiKey("abc", b"\x01secret\x02", "alice", "laptop")
    token = AdminToken("def", b"\x01secret\x02", "ci", Role.WRITE)
    for printed in (key_image(key), token_image(token), repr(key), repr(token)):
        assert "secret" not in str(printed)


@pytest.mark.parametrize(
    ("document", "domain"),
    [
        ("domain: edge\ndescriptors: []", "edge"),
        ("descriptors:\n- key: domain\n  value: inner\ndomain: 'edge 1'", "edge 1"),
        ("descriptors: [{domain: inner}]\n? [a, b]\n: c\ndomain: edge", "edge"),
        ("{domain: {nested: edge}}", ""),
        ("a: &x 1\nb: *x\ndomain: edge", "edge"),
        ("- domain: edge", ""),
        ("domain: [", ""),
        ("", ""),
    ],
)
def test_domain_is_read_from_the_top_level_of_a_document(document: str, domain: str) -> None:
    assert domain_of(document) == domain
