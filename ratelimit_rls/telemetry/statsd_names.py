"""The names under which statsd has the metrics: the reference's, of which /stats and mapping files speak, too."""

from __future__ import annotations

from collections.abc import Iterator

from ratelimit_rls.telemetry.collected import Collected, Distribution
from ratelimit_rls.telemetry.instruments import KEPT_BY_OTHERS, REFERENCE_TIMES, Kind


def kind_of(name: str) -> Kind:
    """Of a name that Metrics.names() has: what other parts keep may go down again, the rest is counted."""
    kept = KEPT_BY_OTHERS.get(name)
    return kept.kind if kept is not None else Kind.COUNTER


def timers(collected: Collected) -> Iterator[tuple[str, Distribution]]:
    """How long calls took, by method."""
    for series, value in collected.items():
        if series.instrument == REFERENCE_TIMES.name and isinstance(value, Distribution):
            yield f"ratelimit_server.{series.attributes[0]}.response_time", value
