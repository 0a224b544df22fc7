"""Rules mean the same however they are spread over sources, as long as none speaks of what another has said."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratelimit_rls.cli.normal_form import documents
from ratelimit_rls.cli.yaml_text import yaml_text
from ratelimit_rls.core.accounts import StoredRule
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.rules.load import Source
from ratelimit_rls.rules.sources.database import check_rule

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
        said = {"rate_limit": LIMIT} if draw(st.booleans()) else {}
        level.append({**shape, **said, **({"descriptors": below} if below else {})})
    return level


def spread(draw: st.DrawFn, level: Level, owner: int) -> list[Level]:
    """Each descriptor goes to one source, those below it to that one or weaker ones, with the way to them.

    Where the order counts it is kept: a source has no descriptor that comes before one of a stronger source.
    """
    parts: list[Level] = [[] for _ in range(SOURCES)]
    for descriptor in level:
        owner = draw(st.integers(owner, SOURCES - 1))
        way = {key: descriptor[key] for key in ("key", "value", "match") if key in descriptor}
        below = spread(draw, descriptor.get("descriptors", []), owner)
        for number, part in enumerate(below):
            if number == owner:
                own = {key: value for key, value in descriptor.items() if key != "descriptors"}
                parts[number].append({**own, "descriptors": part} if part else own)
            elif part:
                parts[number].append({**way, "descriptors": part})
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
def test_rules_spread_over_sources_are_the_same_rules(rules: tuple[Level, list[Level]]) -> None:
    whole, (first, second, third) = rules
    expected = documents(compile_documents({"f": text(whole).encode()}), with_places=False)

    merged = check_rule(
        [StoredRule("2", "a", text(second), priority=2), StoredRule("1", "b", text(first), priority=1)],
        [Source("f.yaml", text(third).encode())],
    )

    assert not [problem for problem in merged.warnings if problem.code == "overridden"]
    assert documents(merged, with_places=False) == expected
