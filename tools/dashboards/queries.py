"""PromQL expressions, built from the list of instruments: unknown metrics fail, and counters always have a rate.

Names and attributes are those of OpenTelemetry, as in telemetry/instruments.py, which also has the Prometheus names.
"""

from __future__ import annotations

from collections.abc import Sequence

from ratelimit_rls.telemetry.instruments import BY_NAME, DURATIONS_S, Instrument, InstrumentKind
from tools.dashboards.grafana import Choice

SELECTED = 'namespace=~"$namespace",job=~"$job",pod=~"$pod",instance=~"$instance"'

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
"""Variables that select instances. Namespace and pod exist only in Kubernetes, instance everywhere."""

EACH = ("pod", "instance")
EACH_LEGEND = "{{pod}} {{instance}}"

NODE = ("server.address", "server.port")
NODE_LEGEND = "{{server_address}}:{{server_port}}"

CALLS = "rpc.server.call.duration"


def per_second(name: str, where: str = "", *, by: Sequence[str] = ()) -> str:
    """Return the rate of a counter, or of the observations of a histogram."""
    return _sum(f"rate({_counter(name, where)}[$__rate_interval])", by)


def per_second_of_node(name: str, where: str = "", *, of_modes: bool = False) -> str:
    """Return the rate of a counter that a node of Redis keeps, by node: every instance reports the same one.

    `of_modes` adds the CPU times of a node up first.
    """
    rate = f"rate({_counter(name, where)}[$__rate_interval])"
    return _sum(_sum(rate, (*NODE, *EACH)) if of_modes else rate, NODE, "max")


def in_a_step(name: str, where: str = "", *, by: Sequence[str] = ()) -> str:
    """Return the increase per rate interval, for rare events."""
    return _sum(f"increase({_counter(name, where)}[$__rate_interval])", by)


def over_the_range(name: str, where: str = "", *, by: Sequence[str] = ()) -> str:
    """Return the increase over the selected time range."""
    return _sum(f"increase({_counter(name, where)}[$__range])", by)


def now(name: str, where: str = "", *, by: Sequence[str] = (), how: str = "sum") -> str:
    instrument = BY_NAME[name]
    assert instrument.kind is InstrumentKind.GAUGE, f"{name} is not a gauge; use per_second"
    return _sum(_selected(instrument, "", where), by, how)


def quantile(share: float, name: str, where: str = "", *, by: Sequence[str] = ()) -> str:
    instrument = BY_NAME[name]
    assert instrument.kind is InstrumentKind.HISTOGRAM
    each = _sum(f"rate({_selected(instrument, '_bucket', where)}[$__rate_interval])", ("le", *by))
    return f"histogram_quantile({share:g}, {each})"


def mean(name: str, where: str = "", *, by: Sequence[str] = ()) -> str:
    total = _sum(f"rate({_selected(BY_NAME[name], '_sum', where)}[$__rate_interval])", by)
    return f"{total} / {per_second(name, where, by=by)}"


def share(part: str, whole: str) -> str:
    """Return the share of `part`, which may be several series, in `whole`, which is one."""
    return f"{part} / scalar({whole})"


def slower_than(bound_s: float, name: str) -> str:
    """Return the share of observations above a bucket bound of the histogram: exact, unlike a quantile."""
    within = _sum(f"rate({_selected(BY_NAME[name], '_bucket', _at_most(bound_s))}[$__rate_interval])", ())
    return f"1 - {within} / {per_second(name)}"


def _at_most(bound_s: float) -> str:
    assert bound_s in DURATIONS_S
    return f'le="{bound_s:g}"'


def most(count: int, expression: str) -> str:
    return f"topk({count}, {expression})"


def _counter(name: str, where: str) -> str:
    instrument = BY_NAME[name]
    assert instrument.kind is not InstrumentKind.GAUGE, f"{name} is a gauge and has no rate; use now"
    return _selected(instrument, "_count" if instrument.kind is InstrumentKind.HISTOGRAM else "", where)


def _selected(instrument: Instrument, suffix: str, where: str) -> str:
    return f"{instrument.prometheus}{suffix}{{{SELECTED}{',' if where else ''}{where}}}"


def _sum(expression: str, by: Sequence[str], how: str = "sum") -> str:
    if not by:
        return f"{how}({expression})"
    return f"{how} by ({', '.join(attribute.replace('.', '_') for attribute in by)}) ({expression})"
