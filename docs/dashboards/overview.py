"""Is it well? Calls, errors and time, what was decided, who calls, and the same from Envoy's side."""

from __future__ import annotations

from docs.dashboards.grafana import Choice, Dashboard, Kind, Level, Panel, Query, Row
from docs.dashboards.queries import CALLS, EACH, EACH_LEGEND, WHO, now, per_second, quantile, share, slower_than

BUDGET_S = 0.02
"""What Envoy waits for an answer, unless its filter's `timeout` says otherwise."""

ENVOYS = (
    Choice("envoy_job", "Envoy's job", "label_values(envoy_cluster_upstream_rq_total, job)"),
    Choice(
        "envoy_cluster",
        "Envoy's cluster",
        'label_values(envoy_cluster_upstream_rq_total{job=~"$envoy_job"}, envoy_cluster_name)',
        default="ratelimit",
    ),
)
"""Envoy's series are its own: another job, and the name its configuration gives to the cluster of this service."""

FILTER = 'job=~"$envoy_job"'  # of the filters; their envoy_cluster_name is where a request was going
CLUSTER = 'job=~"$envoy_job",envoy_cluster_name="$envoy_cluster"'

REFUSED = 'ratelimit_outcome="over_limit"'
FAILED = 'rpc_status_code!="OK"'


def envoys_per_second(name: str, where: str) -> str:
    return f"sum(rate({name}{{{where}}}[$__rate_interval]))"


def envoys_milliseconds(quantile: float) -> str:
    each = f"sum by (le) (rate(envoy_cluster_upstream_rq_time_bucket{{{CLUSTER}}}[$__rate_interval]))"
    return f"histogram_quantile({quantile:g}, {each})"


GLANCE = Row(
    "At a glance",
    (
        Panel(
            "Instances",
            "How many are scraped and say so. Fewer than you run: look at those that are missing.",
            "short",
            (Query(now("ratelimit.build", how="count")),),
            Kind.NUMBER,
            4,
        ),
        Panel(
            "Calls",
            "gRPC calls a second, of all instances.",
            "reqps",
            (Query(per_second(CALLS)),),
            Kind.NUMBER,
            4,
        ),
        Panel(
            "Refused",
            "Share of descriptors that were over a limit and refused. What is usual depends on who calls; a jump "
            "is what to look at, on the dashboard of the rules.",
            "percentunit",
            (Query(share(per_second("ratelimit.decisions", REFUSED), per_second("ratelimit.decisions"))),),
            Kind.NUMBER,
            4,
        ),
        Panel(
            "Failed",
            "Share of calls with a gRPC status other than OK: Envoy decides those itself, by failure_mode_deny.",
            "percentunit",
            (Query(share(per_second(CALLS, FAILED), per_second(CALLS))),),
            Kind.NUMBER,
            4,
            levels=(Level(0.001, "orange"), Level(0.01, "red")),
        ),
        Panel(
            "Store",
            "Of the instance that is worst off. While it is away, calls are told what on_store_failure says.",
            "short",
            (Query(now("ratelimit.store.available", how="min")),),
            Kind.NUMBER,
            4,
            levels=(Level(0, "red"), Level(1, "green")),
            words=(("0", "away"), ("1", "there")),
        ),
        Panel(
            "Rules refused",
            "Updates refused since the last good one. Above 0 the rules in force are not the newest; the log and "
            "/rlconfig say why.",
            "short",
            (Query(now("ratelimit.rules.refused", how="max")),),
            Kind.NUMBER,
            4,
            levels=(Level(1, "red"),),
        ),
    ),
)

ASKED = Row(
    "Calls",
    (
        Panel(
            "Calls by method",
            "ShouldRateLimit is Envoy's rate limit filter, Check its ext_authz.",
            "reqps",
            (Query(per_second(CALLS, by=["rpc.method"]), "{{rpc_method}}"),),
            stacked=True,
        ),
        Panel(
            "Calls that failed, by status",
            "UNAVAILABLE: the store did not decide (on_store_failure: error), or there are no rules yet. "
            "RESOURCE_EXHAUSTED: too many waited for the store. INVALID_ARGUMENT: Envoy's configuration asks for "
            "something without meaning.",
            "reqps",
            (Query(per_second(CALLS, FAILED, by=["rpc.status_code"]), "{{rpc_status_code}}"),),
        ),
        Panel(
            "Calls without meaning, or before there were rules",
            "What the service itself could do nothing with, whatever the store says.",
            "reqps",
            (Query(per_second("ratelimit.call_errors", by=EACH), EACH_LEGEND),),
        ),
        Panel(
            "How long calls took",
            "From the moment a call was received until it was answered; calls held by action: throttle are in it. The "
            "dashed line is the 20 ms that Envoy waits by default.",
            "s",
            tuple(Query(quantile(one, CALLS), f"{one * 100:g} %") for one in (0.5, 0.9, 0.99, 0.999)),
            levels=(Level(BUDGET_S, "red"),),
        ),
        Panel(
            "Calls that took over 20 ms",
            "As a share, counted and not estimated. With action: throttle some are meant to.",
            "percentunit",
            (Query(slower_than(BUDGET_S, CALLS), "over 20 ms"),),
            levels=(Level(0.01, "red"),),
        ),
        Panel(
            "Calls in flight",
            "Without an answer yet; of those, waiting for the store (at most RLS_MAX_IN_FLIGHT in each process) "
            "and held for their slot (at most RLS_MAX_HELD_CALLS).",
            "short",
            (
                Query(now("ratelimit.calls_in_flight"), "in flight"),
                Query(now("ratelimit.store.calls_in_flight"), "waiting for the store"),
                Query(now("ratelimit.throttle.held"), "held"),
            ),
        ),
    ),
)

DECIDED = Row(
    "Decisions",
    (
        Panel(
            "By outcome",
            "Descriptors a second. shadowed: over a limit that is on trial, and passed. no_rule: no rule is for it. "
            "blocked, unauthorized: turned away whatever the limits are.",
            "ops",
            (Query(per_second("ratelimit.decisions", by=["ratelimit.outcome"]), "{{ratelimit_outcome}}"),),
            stacked=True,
        ),
        Panel(
            "By source",
            "Who decided. cache: a remembered refusal. fallback: the store did not answer. rules: no counter was "
            "needed.",
            "ops",
            (Query(per_second("ratelimit.decisions", by=["ratelimit.source"]), "{{ratelimit_source}}"),),
            stacked=True,
        ),
        Panel(
            "Passed by SHADOW_MODE",
            "Calls that would have been refused, if this service were not on trial as a whole.",
            "reqps",
            (Query(per_second("ratelimit.global_shadow"), "would have been refused"),),
        ),
    ),
)

CALLERS = Row(
    "Who calls, and the record of it",
    (
        Panel(
            "Credentials",
            "API keys and tokens that were looked at. Many invalid ones: somebody tries them out, or many callers have "
            "one that has expired.",
            "ops",
            (
                Query(
                    per_second("ratelimit.credentials", by=["ratelimit.credential", "ratelimit.outcome"]),
                    "{{ratelimit_credential}} {{ratelimit_outcome}}",
                ),
            ),
        ),
        Panel(
            "Tokens refused",
            "JSON Web Tokens that were not believed, by the reason.",
            "ops",
            (Query(per_second("ratelimit.tokens.refused", by=["ratelimit.reason"]), "{{ratelimit_reason}}"),),
            stacked=True,
        ),
        Panel(
            "Keys of issuers",
            "That their tokens are verified with, of the instance that has fewest. None: all tokens of that issuer are "
            "refused.",
            "short",
            (Query(now("ratelimit.issuer_keys", by=["ratelimit.issuer"], how="min"), "{{ratelimit_issuer}}"),),
        ),
        Panel(
            "Newest change in force",
            "The number of the last change of an administrator that an instance has taken over; the lines should be "
            "one. While the database is away they stand still.",
            "short",
            (Query(now("ratelimit.database.sequence", by=EACH, how="min"), EACH_LEGEND),),
            width=6,
        ),
        Panel(
            "Database",
            "By instance, 1 while it is followed. At 0, what was last read is in force, and records wait.",
            "short",
            (Query(now("ratelimit.database.available", by=EACH, how="min"), EACH_LEGEND),),
            width=6,
        ),
        Panel(
            "Known callers",
            "What a process holds in memory: tiers, users and keys, and how many users and keys are being asked for.",
            "short",
            (Query(now("ratelimit.accounts", by=["ratelimit.account"], how="max"), "{{ratelimit_account}}"),),
            width=6,
        ),
        Panel(
            "Records",
            "Decisions written and waiting to be; what was dropped for want of room (RLS_AUDIT_BUFFER), or because "
            "the database would not take it, is lost.",
            "short",
            (
                Query(per_second("ratelimit.audit.written"), "written a second"),
                Query(now("ratelimit.audit.waiting"), "waiting"),
                Query(now("ratelimit.usage.waiting"), "lines of usage waiting"),
                Query(per_second("ratelimit.audit.dropped"), "dropped a second"),
                Query(per_second("ratelimit.audit.refused"), "not taken a second"),
                Query(per_second("ratelimit.usage.dropped"), "calls in no usage, a second"),
            ),
            width=6,
        ),
    ),
)

ENVOYS_SIDE = Row(
    "Envoy's side",
    (
        Panel(
            "The rate limit filter",
            "What Envoy made of the answers. error: none came in time, or it was an error; failure_mode_allowed: the "
            "request passed nonetheless. More errors here than failed calls above: calls do not reach this service.",
            "reqps",
            tuple(
                Query(envoys_per_second(f"envoy_cluster_ratelimit_{one}", FILTER), one)
                for one in ("ok", "over_limit", "error", "failure_mode_allowed")
            ),
        ),
        Panel(
            "The ext_authz filter",
            "The same for those who ask by ext_authz; denied is a refusal.",
            "reqps",
            tuple(
                Query(envoys_per_second(f"envoy_cluster_ext_authz_{one}", FILTER), one)
                for one in ("ok", "denied", "error", "failure_mode_allowed")
            ),
        ),
        Panel(
            "How long Envoy waited",
            "For answers of this service, the network included. Much more than above: the network, or too few "
            "connections for the workers.",
            "ms",
            tuple(Query(envoys_milliseconds(one), f"{one * 100:g} %") for one in (0.5, 0.9, 0.99)),
            levels=(Level(BUDGET_S * 1000, "red"),),
        ),
        Panel(
            "Calls of Envoy that came to nothing",
            "timeout: the filter's was over. pending_overflow: its circuit breaker (max_requests, 1024 by default) "
            "was. connect_fail: nobody listens there.",
            "reqps",
            tuple(
                Query(envoys_per_second(f"envoy_cluster_upstream_{one}", CLUSTER), one)
                for one in ("rq_timeout", "rq_pending_overflow", "rq_tx_reset", "cx_connect_fail")
            ),
        ),
        Panel(
            "Hosts",
            "Instances of this service that Envoys know, and those they take to be well.",
            "short",
            (
                Query(f"max(envoy_cluster_membership_total{{{CLUSTER}}})", "known"),
                Query(f"min(envoy_cluster_membership_healthy{{{CLUSTER}}})", "well"),
            ),
        ),
        Panel(
            "Connections",
            "From all Envoys. The kernel spreads connections over workers, not calls: there must be more of these than "
            "workers.",
            "short",
            (
                Query(f"sum(envoy_cluster_upstream_cx_active{{{CLUSTER}}})", "connections"),
                Query(now("ratelimit.workers"), "workers"),
            ),
        ),
    ),
)

PROCESSES = Row(
    "Processes",
    (
        Panel(
            "Processor",
            "Cores in use, by instance with all of its workers. At RLS_WORKERS cores an instance is full, and "
            "calls wait.",
            "short",
            (Query(per_second("process.cpu.time", by=EACH), EACH_LEGEND),),
        ),
        Panel(
            "Processor time for a call",
            "What a call costs; 15 to 40 µs are usual for one to five descriptors where many come at once.",
            "s",
            (Query(f"{per_second('process.cpu.time')} / {per_second(CALLS)}", "for a call"),),
        ),
        Panel(
            "Memory",
            "Resident, by instance with all of its workers. It grows to its budgets (RLS_PLAN_CACHE_BYTES and others) "
            "and stays there.",
            "bytes",
            (Query(now("process.memory.usage", by=EACH), EACH_LEGEND),),
        ),
        Panel(
            "Calls by instance",
            "Uneven: connections live long, so those who came first have most. A new instance gets calls when Envoys "
            "open new connections.",
            "reqps",
            (Query(per_second(CALLS, by=EACH), EACH_LEGEND),),
        ),
        Panel(
            "Open files",
            "Connections for the most part. Near the limit of the process, new ones are refused.",
            "short",
            (Query(now("process.open_file_descriptor.count", by=EACH), EACH_LEGEND),),
        ),
        Panel(
            "Versions",
            "Instances by the version they run: two while a new one is rolled out.",
            "short",
            (
                Query(
                    now("ratelimit.build", by=["ratelimit.version"], how="count"),
                    "{{ratelimit_version}}",
                ),
            ),
            stacked=True,
        ),
    ),
)

OVERVIEW = Dashboard(
    "ratelimit-rls-overview",
    "Rate limits / Overview",
    "Calls, errors and time of ratelimit-rls, what was decided, who calls, and the same from Envoy's side.",
    WHO + ENVOYS,
    (GLANCE, ASKED, DECIDED, CALLERS, ENVOYS_SIDE, PROCESSES),
)
