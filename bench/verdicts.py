"""Verdicts on targets: ratios of the cost of a call in two scenarios, within rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from bench.latency import Latencies
from bench.measure import Measurement
from bench.scenarios import (
    ALGORITHMS,
    ALL_DENIED,
    CALLERS,
    CHECKS,
    CLUSTER,
    CLUSTER_BY_DOMAIN,
    CLUSTER_BY_TENANT,
    COLD,
    DESCRIPTORS,
    ECHO,
    EDGE,
    EMBEDDED_2,
    ENVOY_ALONE,
    FEW_FIXED_WINDOWS,
    FIXED_WINDOW,
    FLEET_WINDOWS,
    LIMITADOR,
    LONE,
    LONG_LOGS,
    MANY_RULES,
    MIXED,
    ONE_WORKER,
    PACED,
    REDIS_2,
    SHARED_BY_DOMAIN,
    SHARED_BY_TENANT,
    SINGLE_REDIS,
    THROUGH_ENVOY,
    TOKEN_BUCKET_AND_DAY,
    TRACED,
    TWO_WORKERS,
    ClientRoute,
    Scenario,
    Server,
    embedded,
    of_peer,
    with_everything,
    with_records,
)
from bench.spread import spread
from bench.workload import MANY_KEYS

Results = Mapping[Scenario, Sequence[Measurement]]

Goals = tuple[float | None, float | None, float | None]

VERSUS: dict[tuple[int, bool], Goals] = {
    (1, False): (2, 0.45, 0.45),
    (2, False): (2, 0.45, 0.6),
    (5, False): (1.8, 0.5, 0.85),
    **{(descriptors, True): (2.5, 0.35, 0.2) for descriptors in DESCRIPTORS},
}
"""Targets for this service ÷ the reference, by number of descriptors and hot key: minimum calls per second, maximum CPU
of the service and of Redis."""

UNCACHED_VERSUS: dict[Scenario, Goals] = dict.fromkeys((*COLD, MIXED, EDGE), (None, 0.25, None))
"""The same targets for requests as users send them."""

LATENCIES_VERSUS = {LONE: ("p50", "p99"), PACED: ("p50", "p95", "p99", "p99.9")}
"""Latencies that are at most those of the reference."""

MAX_CLUSTER_SERVICE, MAX_CLUSTER_REDIS, MIN_CLUSTER_THROUGHPUT = 1.4, 1.35, 2.2
"""Targets for a cluster of three masters ÷ a single Redis, if every master has work: CPU of the service, CPU of all
masters, and throughput as far as the busiest master limits it."""


def service_us(one: Measurement) -> float:
    return one.service_us


def redis_us(one: Measurement) -> float:
    return one.redis_us


def envoy_us(one: Measurement) -> float:
    return one.envoy_us


def calls_per_s(one: Measurement) -> float:
    return one.calls_per_s


def ratios(
    over: Sequence[Measurement],
    under: Sequence[Measurement],
    cost: Callable[[Measurement], float] = service_us,
) -> list[float]:
    """Return the cost of a call in one scenario divided by that in another, per round."""
    return [cost(one) / cost(other) for one, other in zip(over, under, strict=True)]


@dataclass(frozen=True, slots=True)
class Target:
    """Maximum cost of one scenario relative to another; None: only reported."""

    label: str
    over: Scenario
    under: Scenario
    at_most: float | None
    cost: Callable[[Measurement], float] = service_us


def targets() -> Iterator[Target]:
    yield Target("redis, 2 descriptors ÷ bare echo", REDIS_2, ECHO, 1 / 0.4)
    yield Target("embedded, 2 descriptors ÷ bare echo", EMBEDDED_2, ECHO, 1 / 0.45)
    yield Target("all denied, as is known, 2 descriptors ÷ bare echo", ALL_DENIED, ECHO, 1 / 0.65)
    yield Target("mTLS ÷ plaintext", replace(REDIS_2, route=ClientRoute.MTLS), REDIS_2, 1 / 0.7)
    yield Target("TLS ÷ plaintext, embedded", replace(EMBEDDED_2, route=ClientRoute.TLS), EMBEDDED_2, 1.5)
    yield Target("TLS ÷ plaintext, bare echo", replace(ECHO, route=ClientRoute.TLS), ECHO, 1.5)
    yield Target("never seen before ÷ seen before, 2 descriptors", COLD[0], REDIS_2, 1.6)
    yield Target("never seen before ÷ seen before, 5 descriptors", COLD[1], replace(REDIS_2, descriptors=5), None)
    yield Target("new combinations ÷ seen before, 5 descriptors", MIXED, replace(REDIS_2, descriptors=5), 1.3)
    yield Target("edge, embedded ÷ the reference", embedded(EDGE), of_peer(EDGE), 0.22)
    yield Target("edge, a new traceparent for each call ÷ none", TRACED, EDGE, None)
    yield Target("everything on ÷ everything off, edge", with_everything(EDGE), EDGE, 1.15)
    for limitador in LIMITADOR:
        own = embedded(limitador)
        yield Target(f"{own.name} ÷ {limitador.name}", own, limitador, 0.9)
    yield Target("100,000 rules ÷ 10", MANY_RULES[-1], MANY_RULES[0], 1.1)
    yield Target("two workers ÷ one", TWO_WORKERS, ONE_WORKER, 1.15)
    for one in ALGORITHMS:
        name = one.rules.algorithm
        yield Target(f"{name} ÷ fixed_window", one, FIXED_WINDOW, 1.5)
        yield Target(f"{name} ÷ fixed_window, Redis", one, FIXED_WINDOW, 2, redis_us)


def verdicts(results: Results) -> list[str]:
    """Return the targets with the measured values."""
    lines = [line for target in targets() for line in _verdict(results, target)]
    for label, without in (("RLS", CALLERS), ("ext_authz", CHECKS)):
        recorded, everything = with_records(without), with_everything(without)
        lines += _verdict(results, Target(f"identity and records ÷ neither, {label}", recorded, without, 1.15))
        lines += _commands(label, results, recorded, without)
        lines += _verdict(results, Target(f"everything on ÷ everything off, {label}", everything, without, 1.15))
    if TWO_WORKERS in results:
        least = spread((one.least_worker for one in results[TWO_WORKERS]), ".0%")
        lines.append(f"  of two workers, the one that did less did {least}")
    lines += [line for one in (REDIS_2, replace(REDIS_2, keys=1)) for line in _redis_commands(results, one)]
    lines += _long_logs(results)
    lines += _two_limits(results)
    lines += _filter(results)
    for scenario in results:
        lines += _timed(results, scenario)
    for scenario in FLEET_WINDOWS:
        lines += _window(results, scenario)
    peers = [*map(of_peer, SINGLE_REDIS)], [*map(of_peer, CLUSTER)]
    own = [(clusters, SINGLE_REDIS) for clusters in (CLUSTER, CLUSTER_BY_DOMAIN, CLUSTER_BY_TENANT)]
    for clusters, singles in (*own, (peers[1], peers[0])):
        for one, single in zip(clusters, singles, strict=True):
            lines += _cluster(results, one, single)
    for peer in results:
        if peer.server is Server.PEER:
            same = replace(peer, server=Server.REDIS)
            lines += _versus(results, same, peer)
            for rules in (SHARED_BY_DOMAIN, SHARED_BY_TENANT):
                lines += _versus(results, replace(same, rules=rules), peer)
    return lines


def _verdict(results: Results, target: Target) -> list[str]:
    if target.over not in results or target.under not in results:
        return []
    measured = ratios(results[target.over], results[target.under], target.cost)
    if target.at_most is None:
        return [f"{target.label}: {spread(measured, '.2f')}"]
    word = "met" if median(measured) <= target.at_most else "MISSED"
    return [f"{target.label}: {spread(measured, '.2f')} (at most {target.at_most:.3g}: {word})"]


def _long_logs(results: Results) -> list[str]:
    """Report how the cost of a sliding log grows with its number of hits."""
    lines = []
    shortest, *_ = LONG_LOGS
    for one in LONG_LOGS:
        if one not in results or shortest not in results or FEW_FIXED_WINDOWS not in results:
            continue
        over_fixed, over_shortest = (
            spread(ratios(results[one], results[other], redis_us), ".2f") for other in (FEW_FIXED_WINDOWS, shortest)
        )
        log_bytes = median(measured.log_bytes for measured in results[one])
        lines.append(
            f"sliding_log, {one.rules.hits_before:,} hits in each: Redis ÷ fixed_window's {over_fixed},"
            f" ÷ that of {shortest.rules.hits_before} hits {over_shortest}; {log_bytes:,.0f} bytes a key"
        )
    return lines


def _two_limits(results: Results) -> list[str]:
    """Compare a token bucket and a daily limit on one descriptor with two fixed windows on two."""
    if TOKEN_BUCKET_AND_DAY not in results or REDIS_2 not in results:
        return []
    both, windows = results[TOKEN_BUCKET_AND_DAY], results[REDIS_2]
    service, redis = (spread(ratios(both, windows, cost), ".2f") for cost in (service_us, redis_us))
    return [f"token bucket and daily limit ÷ two fixed windows: service µs {service}, Redis µs {redis}"]


def _timed(results: Results, scenario: Scenario) -> list[str]:
    """Report batches and latencies of a scenario whose latencies were measured."""
    rounds = results[scenario]
    latencies = [one.latencies for one in rounds if one.latencies is not None]
    if not latencies:
        return []
    percentiles = ", ".join(f"{name} {values}" for name, values in _percentiles_ms(latencies))
    batches = (
        f"{median(one.calls_per_command for one in rounds):.2f} calls a command,"
        f" {median(one.redis_reads for one in rounds):.2f} reads of Redis a call; "
    )
    loop = "closed loop"
    if scenario.per_s:
        late_share = max(one.late_share for one in latencies)
        loop = f"from when calls were due, at most {late_share:.1%} of which the load itself sent late"
    return [f"{scenario.name}: {batches if scenario.uses_redis else ''}{loop}, ms: {percentiles}"]


def _percentiles_ms(latencies: Sequence[Latencies]) -> Iterator[tuple[str, str]]:
    """Yield the name of each percentile and its spread over the rounds."""
    for name in latencies[0].percentiles_us:
        yield name, spread((one.percentiles_us[name] / 1e3 for one in latencies), ".2f")


def _window(results: Results, scenario: Scenario) -> list[str]:
    """Compare a fleet whose processes wait to send one batch with one whose processes do not."""
    without = replace(scenario, window_us=0)
    if scenario not in results or without not in results:
        return []
    parts = [
        f"{name} {spread(ratios(results[scenario], results[without], cost), '.2f')}"
        for name, cost in (("Redis µs", redis_us), ("service µs", service_us), ("calls/s", calls_per_s))
    ]
    parts += _latency_ratios(results[scenario], results[without])
    return [f"{scenario.name} ÷ {without.name}: {', '.join(parts)}"]


def _latency_ratios(
    rounds: Sequence[Measurement], others: Sequence[Measurement], at_most_1: Sequence[str] = ()
) -> list[str]:
    """Return the ratios of the latencies, if they were measured; some have the target 1."""
    pairs = [
        (one.latencies.percentiles_us, other.latencies.percentiles_us)
        for one, other in zip(rounds, others, strict=True)
        if one.latencies is not None and other.latencies is not None
    ]
    names = pairs[0][0] if pairs else ()
    parts = []
    for name in names:
        measured = [one[name] / other[name] for one, other in pairs]
        target = _compare(median(measured), 1 if name in at_most_1 else None, is_least=False)
        parts.append(f"{name} {spread(measured, '.2f')}{target}")
    return parts


def _cluster(results: Results, cluster: Scenario, single: Scenario) -> list[str]:
    """Compare a cluster with a single Redis, whose work the busiest master limits."""
    if cluster not in results or single not in results:
        return []
    rounds, single_rounds = results[cluster], results[single]
    compared = (
        ("calls/s", ratios(rounds, single_rounds, calls_per_s), None),
        ("service µs", ratios(rounds, single_rounds), MAX_CLUSTER_SERVICE),
        ("Redis µs, all masters", ratios(rounds, single_rounds, redis_us), MAX_CLUSTER_REDIS),
        (
            "throughput by the busiest master",
            [one.redis_us / each.busiest_redis_us for one, each in zip(single_rounds, rounds, strict=True)],
            MIN_CLUSTER_THROUGHPUT,
        ),
    )
    is_spread = cluster.server is Server.REDIS and cluster.rules != SHARED_BY_DOMAIN
    parts = [
        f"{name} {spread(measured, '.2f')}"
        + _compare(median(measured), goal if is_spread else None, is_least=goal == MIN_CLUSTER_THROUGHPUT)
        for name, measured, goal in compared
    ]
    busiest = spread((one.busiest_redis_us for one in rounds), ".1f")
    return [f"{cluster.name} ÷ {single.name}: {', '.join(parts)}; the busiest master {busiest} µs"]


def _filter(results: Results) -> list[str]:
    """Report the cost of a request through Envoy with and without the rate limit filter."""
    if ENVOY_ALONE not in results or THROUGH_ENVOY not in results:
        return []
    filtered, alone = results[THROUGH_ENVOY], results[ENVOY_ALONE]
    added = spread((one.envoy_us - other.envoy_us for one, other in zip(filtered, alone, strict=True)), ".1f")
    total_us = spread((one.envoy_us + one.service_us + one.redis_us for one in filtered), ".1f")
    own, per_s = (spread(ratios(filtered, alone, cost), ".2f") for cost in (envoy_us, calls_per_s))
    return [
        f"Envoy with the rate limit filter ÷ without: its own CPU {own}, {added} µs more; requests/s {per_s}",
        f"  a request takes {total_us} µs of Envoy, service and Redis together",
    ]


def _redis_commands(results: Results, scenario: Scenario) -> list[str]:
    """Report the Redis commands per call. An FCALL or EVALSHA is a round trip; commands of its script are not."""
    commands = ", ".join(f"{name} {often:.3f}" for name, often in _per_call(results.get(scenario, ())).items())
    return [f"Redis commands a call, {scenario.name}: {commands}"] if commands else []


def _per_call(measured: Sequence[Measurement]) -> dict[str, float]:
    """Return the mean number of Redis commands per call, by name."""
    names = sorted({name for one in measured for name in one.redis_commands})
    return {name: median(one.redis_commands.get(name, 0.0) for one in measured) for name in names}


def _commands(label: str, results: Results, over: Scenario, under: Scenario) -> list[str]:
    """Compare Redis commands per call of two scenarios: an additional command would be a round trip."""
    if over not in results or under not in results:
        return []
    without, with_records = _per_call(results[under]), _per_call(results[over])
    commands = [
        f"{name} {without.get(name, 0.0):.3f} → {with_records.get(name, 0.0):.3f}"
        for name in sorted({*without, *with_records})
    ]
    return [f"  Redis commands a call, {label}, without → with: {', '.join(commands)}"]


def _versus(results: Results, own: Scenario, reference: Scenario) -> list[str]:
    if own not in results:
        return []
    compared = (
        ("calls/s", ratios(results[own], results[reference], calls_per_s)),
        ("service µs", ratios(results[own], results[reference])),
        ("Redis µs", ratios(results[own], results[reference], redis_us)),
    )
    is_plain = own == Scenario(Server.REDIS, own.descriptors, own.keys) and own.keys in (1, MANY_KEYS)
    goals = UNCACHED_VERSUS.get(own, (None, None, None))
    if is_plain:
        goals = VERSUS[own.descriptors, own.keys == 1]
    parts = [
        f"{label} {spread(measured, '.2f')}" + _compare(median(measured), goal, is_least=label == "calls/s")
        for (label, measured), goal in zip(compared, goals, strict=True)
    ]
    lines = [f"{own.name} ÷ {reference.name}: {', '.join(parts)}"]
    latencies = _latency_ratios(results[own], results[reference], LATENCIES_VERSUS.get(own, ()))
    if latencies:
        lines.append(f"  latencies, {'open' if own.per_s else 'closed'} loop: {', '.join(latencies)}")
    return lines


def _compare(measured: float, goal: float | None, *, is_least: bool) -> str:
    if goal is None:
        return ""
    is_reached = measured >= goal if is_least else measured <= goal
    return f" (at {'least' if is_least else 'most'} {goal:g}: {'met' if is_reached else 'MISSED'})"
