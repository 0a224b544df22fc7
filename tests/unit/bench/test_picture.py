"""The SVG chart: bars on one scale, whiskers from minimum to maximum, and a line for bare echo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from bench.measure import Measurement
from bench.picture import draw
from bench.scenarios import ECHO, EMBEDDED_2, ENVOY_ALONE, REDIS_2, THROUGH_ENVOY, Scenario, Server
from tests.unit.bench.sample_results import ONE

SVG = "{http://www.w3.org/2000/svg}"
PLOT_WIDTH = 580
MAX_US = 100  # end of the scale if the maximum is slightly over 90


def rounds(*us: tuple[float, float]) -> list[Measurement]:
    return [replace(ONE, service_us=service, redis_us=redis) for service, redis in us]


def drawn(results: dict[Scenario, list[Measurement]]) -> ElementTree.Element:
    return ElementTree.fromstring(draw(results, 1.0))


def bars(picture: ElementTree.Element, part: str) -> list[float]:
    """Return widths in microseconds, without those of the legend."""
    found = [rect for rect in picture.iter(f"{SVG}rect") if rect.get("class") == part]
    return [float(rect.attrib["width"]) / PLOT_WIDTH * MAX_US for rect in found[1:]]


def texts(picture: ElementTree.Element) -> list[str | None]:
    return [text.text for text in picture.iter(f"{SVG}text")]


def test_each_scenario_has_median_bars_for_service_and_redis() -> None:
    picture = drawn({ECHO: rounds((20, 0)), REDIS_2: rounds((50, 10), (95, 30), (60, 20))})
    assert bars(picture, "service") == pytest.approx([20, 60], abs=0.1)
    assert bars(picture, "redis") == pytest.approx([20], abs=0.1)
    assert {"echo-native", "redis-2", "60.0 + 20.0", "median of 3 × 1 s, with the least and the most"} <= {
        *texts(picture)
    }
    assert [title.text for title in picture.iter(f"{SVG}title")] == [
        "echo-native: service 20.0 (20.0..20.0)",
        "redis-2: service 60.0 (50.0..95.0), Redis 20.0 (10.0..30.0)",
    ]


def test_whiskers_span_min_to_max_and_single_round_has_none() -> None:
    picture = drawn({ECHO: rounds((20, 0)), EMBEDDED_2: rounds((50, 0), (95, 0), (60, 0))})
    (whisker,) = [path.attrib["d"] for path in picture.iter(f"{SVG}path")]
    least, most = PLOT_WIDTH * 50 / MAX_US, PLOT_WIDTH * 95 / MAX_US
    assert whisker.startswith(f"M{least:.1f} ")
    assert f"H{most:.1f}M" in whisker


def echoes(picture: ElementTree.Element) -> Sequence[ElementTree.Element]:
    return [line for line in picture.iter(f"{SVG}line") if line.get("class") == "echo"]


def test_bare_echo_is_a_line_through_all_rows() -> None:
    picture = drawn({ECHO: rounds((30, 0), (20, 0), (25, 0)), REDIS_2: rounds((95, 20))})
    (echo,) = echoes(picture)
    assert float(echo.attrib["x1"]) == float(echo.attrib["x2"]) == pytest.approx(PLOT_WIDTH * 25 / MAX_US, abs=0.1)
    assert "bare echo: 25.0" in texts(picture)
    assert not echoes(drawn({REDIS_2: rounds((95, 20))}))


def test_echo_beyond_the_scale_is_marked() -> None:
    slow = Scenario(Server.ECHO_GRPCIO)
    picture = drawn({slow: rounds((450, 0)), REDIS_2: rounds((95, 20))})
    assert bars(picture, "service") == pytest.approx([MAX_US, 95], abs=0.1)
    assert {"→ 450.0", "95.0 + 20.0"} <= {*texts(picture)}


def test_envoy_has_its_own_bar() -> None:
    alone, asking = replace(ONE, service_us=0, envoy_us=40), replace(ONE, service_us=60, redis_us=11, envoy_us=95)
    picture = drawn({ENVOY_ALONE: [alone], THROUGH_ENVOY: [asking]})
    assert bars(picture, "envoy") == pytest.approx([40, 95], abs=0.1)
    assert {"40.0", "60.0 + 11.0 + 95.0"} <= {*texts(picture)}


def test_chart_with_only_echo_is_drawn() -> None:
    assert bars(drawn({ECHO: rounds((95, 0))}), "service") == pytest.approx([95], abs=0.1)
