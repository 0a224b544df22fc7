"""PromQL, written from the list of instruments: what is not in it cannot be asked for, and counters are never bare.

Names and attributes are OpenTelemetry's, as telemetry/instruments.py has them; it knows Prometheus's, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from docs.dashboards.grafana import Choice
from ratelimit_rls.telemetry.instruments import BY_NAME, DURATIONS_S, Instrument, Kind

OURS = 'namespace=~"$namespace",job=~"$job",pod=~"$pod",instance=~"$instance"'

WHO = (
    Choice("namespace", "Namespace", "label_values(ratelimit_build, namespace)"),
    Choice("job", "Job", 'label_values(ratelimit_build{namespace=~"$namespace"}, job)'),
    Choice("pod", "Pod", 'label_values(ratelimit_build{namespace=~"$namespace",job=~"$job"}, pod)'),
    Choice(
        "instance",
        "Instance",
        'label_values(ratelimit_build{namespace=~"$namespace",job=~"$job",pod=~"$pod"}, instance)',
    ),
)
"""Namespace and pod are there in Kubernetes alone; instance everywhere."""

EACH = ("pod", "instance")
EACH_LEGEND = "{{pod}} {{instance}}"

CALLS = "rpc.server.call.duration"


def per_second(name: str, where: str = "", *, by: Sequence[str] = ()) -> str:
    """How often it happened; of a histogram, how often it was measured."""
    return _sum(f"rate({_counter(name, where)}[$__rate_interval])", by)


def in_a_step(name: str, where: str = "", *, by: Sequence[str] = ()) -> str:
    """How often it happened around each point that is drawn: for what is rare."""
    return _sum(f"increase({_counter(name, where)}[$__rate_interval])", by)


def over_the_range(name: str, where: str = "", *, by: Sequence[str] = ()) -> str:
    """How often it happened in all the time that is shown."""
    return _sum(f"increase({_counter(name, where)}[$__range])", by)


def now(name: str, where: str = "", *, by: Sequence[str] = (), how: str = "sum") -> str:
    instrument = BY_NAME[name]
    assert instrument.kind is Kind.GAUGE, f"{name} only ever grows: ask how fast"
    return _sum(_selected(instrument, "", where), by, how)


def quantile(share: float, name: str, where: str = "", *, by: Sequence[str] = ()) -> str:
    instrument = BY_NAME[name]
    assert instrument.kind is Kind.HISTOGRAM
    each = _sum(f"rate({_selected(instrument, '_bucket', where)}[$__rate_interval])", ("le", *by))
    return f"histogram_quantile({share:g}, {each})"


def mean(name: str, where: str = "", *, by: Sequence[str] = ()) -> str:
    total = _sum(f"rate({_selected(BY_NAME[name], '_sum', where)}[$__rate_interval])", by)
    return f"{total} / {per_second(name, where, by=by)}"


def share(part: str, whole: str) -> str:
    """Of one whole, however many parts there are."""
    return f"{part} / scalar({whole})"


def slower_than(bound_s: float, name: str) -> str:
    """Share of what took longer than one of the histogram's bounds: exact, where a quantile is an estimate."""
    within = _sum(f"rate({_selected(BY_NAME[name], '_bucket', _at_most(bound_s))}[$__rate_interval])", ())
    return f"1 - {within} / {per_second(name)}"


def _at_most(bound_s: float) -> str:
    assert bound_s in DURATIONS_S
    return f'le="{bound_s:g}"'


def most(count: int, expression: str) -> str:
    return f"topk({count}, {expression})"


def _counter(name: str, where: str) -> str:
    instrument = BY_NAME[name]
    assert instrument.kind is not Kind.GAUGE, f"{name} goes up and down: it has no rate"
    return _selected(instrument, "_count" if instrument.kind is Kind.HISTOGRAM else "", where)


def _selected(instrument: Instrument, suffix: str, where: str) -> str:
    return f"{instrument.prometheus}{suffix}{{{OURS}{',' if where else ''}{where}}}"


def _sum(expression: str, by: Sequence[str], how: str = "sum") -> str:
    if not by:
        return f"{how}({expression})"
    return f"{how} by ({', '.join(attribute.replace('.', '_') for attribute in by)}) ({expression})"
