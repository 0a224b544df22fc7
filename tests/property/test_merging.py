"""Rules mean the same when split over several sources, as long as no two sources define the same descriptor."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratelimit_rls.cli.canonical_yaml import canonical_documents
from ratelimit_rls.cli.yaml_text import yaml_text
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.rules.source_document import SourceDocument
from ratelimit_rls.rules.sources.database import check_rules
from ratelimit_rls.rules.stored_rule import StoredRule

patiently = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])

Level = list[dict[str, Any]]

LIMIT = {"unit": "minute", "requests_per_unit": 5}
SHAPES: list[dict[str, Any]] = [
    {"key": "a"},
    {"key": "a", "value": "x"},
    {"key": "a", "value": "x*"},
    {"key": "a", "value": "*y"},
    {"key": "b*"},
    {"key": "b", "match": {"cidr": "10.0.0.0/8"}},
    {"key": "b", "match": {"regex": "x+"}},
    {"key": "b", "match": {"regex": "y+"}},
]
SOURCES = 3


@st.composite
def levels(draw: st.DrawFn, depth: int = 2) -> Level:
    level: Level = []
    for shape in draw(st.lists(st.sampled_from(SHAPES), unique_by=str, min_size=1, max_size=4)):
        below = draw(levels(depth - 1)) if depth and draw(st.booleans()) else []
        limit = {"rate_limit": LIMIT} if draw(st.booleans()) else {}
        level.append({**shape, **limit, **({"descriptors": below} if below else {})})
    return level


def spread(draw: st.DrawFn, level: Level, owner: int) -> list[Level]:
    """Assign each descriptor to one source, and those below it to the same or a weaker source, with the path to them.

    Order is preserved where it matters: no source has a descriptor that precedes one of a stronger source.
    """
    parts: list[Level] = [[] for _ in range(SOURCES)]
    for descriptor in level:
        owner = draw(st.integers(owner, SOURCES - 1))
        path = {key: descriptor[key] for key in ("key", "value", "match") if key in descriptor}
        below = spread(draw, descriptor.get("descriptors", []), owner)
        for number, part in enumerate(below):
            if number == owner:
                own = {key: value for key, value in descriptor.items() if key != "descriptors"}
                parts[number].append({**own, "descriptors": part} if part else own)
            elif part:
                parts[number].append({**path, "descriptors": part})  # type: ignore[dict-item]
    return parts


@st.composite
def spread_rules(draw: st.DrawFn) -> tuple[Level, list[Level]]:
    level = draw(levels())
    return level, spread(draw, level, 0)


def text(level: Level) -> str:
    return yaml_text([{"domain": "d", "descriptors": level}])


@pytest.mark.slow
@patiently
@given(spread_rules())
def test_rules_split_over_sources_are_equivalent(rules: tuple[Level, list[Level]]) -> None:
    whole, (first, second, third) = rules
    expected = canonical_documents(compile_documents({"f": text(whole).encode()}), with_places=False)

    merged = check_rules(
        [StoredRule("2", "a", text(second), priority=2), StoredRule("1", "b", text(first), priority=1)],
        [SourceDocument("f.yaml", text(third).encode())],
    )

    assert not [problem for problem in merged.warnings if problem.code == "overridden"]
    assert canonical_documents(merged, with_places=False) == expected
