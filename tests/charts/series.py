"""Known series and their labels, for checking expressions of dashboards and alerts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ratelimit_rls.telemetry.abuse import Abuse
from ratelimit_rls.telemetry.instruments import ABUSE, DURATIONS_S, INSTRUMENTS, InstrumentKind
from tests.charts.promql import Selector, selectors

TARGET = frozenset({"job", "instance", "namespace", "pod"})
"""Labels that Prometheus adds to all targets; the last two only in Kubernetes."""

BOUNDS = {f"{bound:g}" for bound in DURATIONS_S}


@dataclass(frozen=True, slots=True)
class Known:
    """A known series."""

    labels: frozenset[str]
    grows: bool = True
    bucket: bool = False
    about: str = ""  # description, which may list the values of its labels


def _of_service() -> Iterator[tuple[str, Known]]:
    for one in INSTRUMENTS:
        labels = frozenset(attribute.replace(".", "_") for attribute in one.attributes)
        about = f"{one.about} {' '.join(Abuse)}" if one is ABUSE else one.about
        if one.kind is InstrumentKind.HISTOGRAM:
            yield f"{one.prometheus}_bucket", Known(labels | {"le"}, bucket=True, about=about)
            yield f"{one.prometheus}_sum", Known(labels, about=about)
            yield f"{one.prometheus}_count", Known(labels, about=about)
        else:
            yield one.prometheus, Known(labels, one.kind is InstrumentKind.COUNTER, about=about)


def _of_envoy() -> Iterator[tuple[str, Known]]:
    """Yield series of Envoy, as in /stats/prometheus."""
    by_cluster = frozenset({"envoy_cluster_name"})
    for counter in (
        *(f"ratelimit_{one}" for one in ("ok", "over_limit", "error", "failure_mode_allowed")),
        *(f"ext_authz_{one}" for one in ("ok", "denied", "error", "failure_mode_allowed")),
        *(f"upstream_{one}" for one in ("rq_total", "rq_timeout", "rq_pending_overflow", "rq_tx_reset")),
        "upstream_cx_connect_fail",
    ):
        yield f"envoy_cluster_{counter}", Known(by_cluster)
    for gauge in ("upstream_cx_active", "membership_total", "membership_healthy"):
        yield f"envoy_cluster_{gauge}", Known(by_cluster, grows=False)
    yield "envoy_cluster_upstream_rq_time_bucket", Known(by_cluster | {"le"}, bucket=True)


KNOWN = {**dict(_of_service()), **dict(_of_envoy()), "up": Known(frozenset(), grows=False)}

_RATES = {"rate", "increase"}


def problems(expression: str) -> Iterator[str]:
    """Yield the problems of an expression; raises Unread if it cannot be parsed."""
    for selector in selectors(expression):
        known = KNOWN.get(selector.name)
        if known is None:
            yield f"nobody emits {selector.name}"
            continue
        yield from (f"{selector.name}: {problem}" for problem in _problems(selector, known))


def _problems(selector: Selector, known: Known) -> Iterator[str]:
    labels = known.labels | TARGET
    used = {matcher.label for matcher in selector.matchers} | selector.matched_on
    for label in sorted((used | frozenset().union(*selector.grouped)) - labels):
        yield f"it has no label {label}"
    for matcher in selector.matchers:
        if matcher.label.startswith("ratelimit_"):
            yield from (
                f"{matcher.label} is never {value}"
                for value in matcher.values
                if not re.search(rf"\b{re.escape(value)}\b", known.about)
            )
    if known.grows and selector.innermost not in _RATES:
        yield "it only ever grows, and is shown as it is; rate() and increase() tell something"
    if not known.grows and _RATES & {*selector.calls}:
        yield "it goes up and down, and has no rate"
    if bool(selector.over) != (selector.innermost in _RATES or selector.innermost.endswith("_over_time")):
        yield f"a range {'is missing' if not selector.over else 'that nothing is done with'}"
    if "histogram_quantile" in selector.calls:
        if not known.bucket:
            yield "a quantile is told from buckets"
        elif "le" not in selector.grouped[-1]:
            yield "a quantile needs le to be left in the sum"
    elif known.bucket:
        bounds = {matcher.value for matcher in selector.matchers if matcher.label == "le"}
        if not bounds or not bounds <= BOUNDS:
            yield f"no bucket of it ends at {', '.join(bounds) or 'all of them together'}"


def result_labels(expression: str) -> frozenset[str]:
    """Return the labels of the result that are common to all of its parts."""
    every = []
    for selector in selectors(expression):
        if selector.aggregated:
            every.append(selector.grouped[0])
        else:
            every.append(KNOWN[selector.name].labels | TARGET)
    return frozenset.intersection(*every)
