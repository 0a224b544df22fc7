"""Overview dashboard: calls, errors, latency, decisions, identity, and the view of Envoy."""

from __future__ import annotations

from tools.dashboards.grafana import Choice, Dashboard, Kind, Level, Panel, Query, Row
from tools.dashboards.queries import CALLS, EACH, EACH_LEGEND, WHO, now, per_second, quantile, share, slower_than

BUDGET_S = 0.02
"""Default timeout of Envoy's filter."""

ENVOYS = (
    Choice("envoy_job", "Envoy's job", "label_values(envoy_cluster_upstream_rq_total, job)"),
    Choice(
        "envoy_cluster",
        "Envoy's cluster",
        'label_values(envoy_cluster_upstream_rq_total{job=~"$envoy_job"}, envoy_cluster_name)',
        default="ratelimit",
    ),
)
"""Variables for the metrics of Envoy, which have another job and the cluster name of Envoy's configuration."""

FILTER = 'job=~"$envoy_job"'  # metrics of the filters; their envoy_cluster_name is the upstream of the request
CLUSTER = 'job=~"$envoy_job",envoy_cluster_name="$envoy_cluster"'

DENIED = 'ratelimit_outcome="over_limit"'
FAILED = 'rpc_response_status_code!="OK"'


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
            "Number of scraped instances. If it is lower than expected, look for the missing ones.",
            "short",
            (Query(now("ratelimit.build", how="count")),),
            Kind.NUMBER,
            4,
        ),
        Panel(
            "Calls",
            "gRPC calls per second, of all instances.",
            "reqps",
            (Query(per_second(CALLS)),),
            Kind.NUMBER,
            4,
        ),
        Panel(
            "Denied",
            "Share of descriptors that exceeded a limit and were denied. The usual value depends on your traffic; "
            "look into sudden changes on the dashboard of the rules.",
            "percentunit",
            (Query(share(per_second("ratelimit.decisions", DENIED), per_second("ratelimit.decisions"))),),
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
            "Minimum over all instances. While it is unavailable, calls are decided by on_store_failure.",
            "short",
            (Query(now("ratelimit.store.available", how="min")),),
            Kind.NUMBER,
            4,
            levels=(Level(0, "red"), Level(1, "green")),
            words=(("0", "unavailable"), ("1", "available")),
        ),
        Panel(
            "Rejected rules",
            "Rejected updates since the last valid one. Above 0, the rules in force are not the latest; the log and "
            "/rlconfig contain the errors.",
            "short",
            (Query(now("ratelimit.rules.rejected_updates", how="max")),),
            Kind.NUMBER,
            4,
            levels=(Level(1, "red"),),
        ),
    ),
)

CALL_ROW = Row(
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
            "Failed calls, by status",
            "UNAVAILABLE: the store did not decide (on_store_failure: error), or there are no rules yet. "
            "RESOURCE_EXHAUSTED: too many calls waited for the store. INVALID_ARGUMENT: invalid request, usually due "
            "to the configuration of Envoy.",
            "reqps",
            (Query(per_second(CALLS, FAILED, by=["rpc.response.status_code"]), "{{rpc_response_status_code}}"),),
        ),
        Panel(
            "Invalid calls, and calls before rules were loaded",
            "Calls that the service rejected itself, independently of the store.",
            "reqps",
            (Query(per_second("ratelimit.call_errors", by=EACH), EACH_LEGEND),),
        ),
        Panel(
            "Call latency",
            "From the receipt of a call to its response, including calls delayed by action: throttle. The dashed line "
            "is the default timeout of Envoy, 20 ms.",
            "s",
            tuple(Query(quantile(one, CALLS), f"{one * 100:g} %") for one in (0.5, 0.9, 0.99, 0.999)),
            levels=(Level(BUDGET_S, "red"),),
        ),
        Panel(
            "Calls over 20 ms",
            "Share of calls, counted instead of estimated. With action: throttle some are delayed on purpose.",
            "percentunit",
            (Query(slower_than(BUDGET_S, CALLS), "over 20 ms"),),
            levels=(Level(0.01, "red"),),
        ),
        Panel(
            "Calls in flight",
            "Calls without a response yet; of these, calls waiting for the store (at most RLS_MAX_IN_FLIGHT per "
            "process) and calls delayed until their slot (at most RLS_MAX_HELD_CALLS per process).",
            "short",
            (
                Query(now("ratelimit.calls_in_flight"), "in flight"),
                Query(now("ratelimit.store.calls_in_flight"), "waiting for the store"),
                Query(now("ratelimit.throttle.queue_length"), "delayed"),
            ),
        ),
    ),
)

DECIDED = Row(
    "Decisions",
    (
        Panel(
            "By outcome",
            "Descriptors per second. shadowed: exceeded a limit in shadow mode, and passed. no_rule: no rule matches. "
            "blocked, unauthorized: denied whatever the limits are.",
            "ops",
            (Query(per_second("ratelimit.decisions", by=["ratelimit.outcome"]), "{{ratelimit_outcome}}"),),
            stacked=True,
        ),
        Panel(
            "By source",
            "What decided. cache: the denial cache. fallback: the store did not respond. rules: no counter was needed.",
            "ops",
            (Query(per_second("ratelimit.decisions", by=["ratelimit.source"]), "{{ratelimit_source}}"),),
            stacked=True,
        ),
        Panel(
            "Passed by SHADOW_MODE",
            "Calls per second that would have been denied without SHADOW_MODE.",
            "reqps",
            (Query(per_second("ratelimit.global_shadow"), "would-be denials"),),
        ),
    ),
)

CALLERS = Row(
    "Identity and database",
    (
        Panel(
            "Credentials",
            "Verified API keys and tokens. Many invalid ones: an attacker may be guessing, or many callers have an "
            "expired one.",
            "ops",
            (
                Query(
                    per_second("ratelimit.credentials", by=["ratelimit.credential", "ratelimit.outcome"]),
                    "{{ratelimit_credential}} {{ratelimit_outcome}}",
                ),
            ),
        ),
        Panel(
            "Rejected tokens",
            "Rejected JSON Web Tokens, by reason.",
            "ops",
            (Query(per_second("ratelimit.tokens.rejected", by=["ratelimit.reason"]), "{{ratelimit_reason}}"),),
            stacked=True,
        ),
        Panel(
            "Issuer keys",
            "Number of keys to verify the tokens of an issuer, minimum over all instances. At 0, all tokens of the "
            "issuer are rejected.",
            "short",
            (Query(now("ratelimit.issuer_keys", by=["ratelimit.issuer"], how="min"), "{{ratelimit_issuer}}"),),
        ),
        Panel(
            "Latest change applied",
            "Sequence number of the last change by an administrator that an instance has applied; it should be equal. "
            "It does not grow while the database is unavailable.",
            "short",
            (Query(now("ratelimit.database.sequence", by=EACH, how="min"), EACH_LEGEND),),
            width=6,
        ),
        Panel(
            "Database",
            "By instance, 1 while changes are read; at 0, the accounts read last stay in force, and records are "
            "buffered. writes: 1 while writing works; at 0, changes by administrators fail.",
            "short",
            (
                Query(now("ratelimit.database.available", by=EACH, how="min"), EACH_LEGEND),
                Query(now("ratelimit.database.writable", by=EACH, how="min"), f"{EACH_LEGEND}, writes"),
            ),
            width=6,
        ),
        Panel(
            "Accounts",
            "Accounts in the memory of a process: tiers, users and keys, and how many users and keys are in use.",
            "short",
            (Query(now("ratelimit.accounts", by=["ratelimit.account"], how="max"), "{{ratelimit_account}}"),),
            width=6,
        ),
        Panel(
            "Records",
            "Written and buffered decisions. Dropped for lack of space (RLS_AUDIT_BUFFER), or rejected by the "
            "database: lost. Sampled out: denials beyond RLS_AUDIT_REFUSALS_PER_MINUTE.",
            "short",
            (
                Query(per_second("ratelimit.audit.written"), "written per second"),
                Query(now("ratelimit.audit.buffered"), "buffered"),
                Query(now("ratelimit.usage.buffered"), "usage rows buffered"),
                Query(per_second("ratelimit.audit.dropped"), "dropped per second"),
                Query(per_second("ratelimit.audit.rejected"), "rejected per second"),
                Query(per_second("ratelimit.audit.sampled_out"), "sampled out per second"),
                Query(per_second("ratelimit.usage.dropped"), "calls missing in usage, per second"),
            ),
            width=6,
        ),
    ),
)

ENVOYS_SIDE = Row(
    "Envoy",
    (
        Panel(
            "Rate limit filter",
            "Results in Envoy. error: no response in time, or an error; failure_mode_allowed: the request passed "
            "nevertheless. If there are more errors here than failed calls above, calls do not reach the service.",
            "reqps",
            tuple(
                Query(envoys_per_second(f"envoy_cluster_ratelimit_{one}", FILTER), one)
                for one in ("ok", "over_limit", "error", "failure_mode_allowed")
            ),
        ),
        Panel(
            "ext_authz filter",
            "Results of the ext_authz filter in Envoy; denied includes requests over a limit.",
            "reqps",
            tuple(
                Query(envoys_per_second(f"envoy_cluster_ext_authz_{one}", FILTER), one)
                for one in ("ok", "denied", "error", "failure_mode_allowed")
            ),
        ),
        Panel(
            "Latency in Envoy",
            "Of calls to this service, including the network. If it is much higher than above, check the network and "
            "whether there are enough connections for the workers.",
            "ms",
            tuple(Query(envoys_milliseconds(one), f"{one * 100:g} %") for one in (0.5, 0.9, 0.99)),
            levels=(Level(BUDGET_S * 1000, "red"),),
        ),
        Panel(
            "Failed Envoy calls",
            "rq_timeout: timeout of the filter. rq_pending_overflow: circuit breaker (max_requests, default 1024). "
            "cx_connect_fail: nothing listens at the address.",
            "reqps",
            tuple(
                Query(envoys_per_second(f"envoy_cluster_upstream_{one}", CLUSTER), one)
                for one in ("rq_timeout", "rq_pending_overflow", "rq_tx_reset", "cx_connect_fail")
            ),
        ),
        Panel(
            "Hosts",
            "Instances of this service that Envoy knows, and those that are healthy.",
            "short",
            (
                Query(f"max(envoy_cluster_membership_total{{{CLUSTER}}})", "known"),
                Query(f"min(envoy_cluster_membership_healthy{{{CLUSTER}}})", "healthy"),
            ),
        ),
        Panel(
            "Connections",
            "Connections of all Envoys. The kernel distributes connections over the workers, not calls: there must be "
            "more connections than workers.",
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
            "CPU",
            "Cores in use, by instance with all of its workers. At RLS_WORKERS cores an instance is saturated, and "
            "calls wait.",
            "short",
            (Query(per_second("process.cpu.time", by=EACH), EACH_LEGEND),),
        ),
        Panel(
            "CPU time per call",
            "15 to 40 µs are usual for one to five descriptors under load.",
            "s",
            (Query(f"{per_second('process.cpu.time')} / {per_second(CALLS)}", "per call"),),
        ),
        Panel(
            "Memory",
            "Resident memory, by instance with all of its workers. It grows up to its budgets (RLS_PLAN_CACHE_BYTES "
            "and others) and stays there.",
            "bytes",
            (Query(now("process.memory.usage", by=EACH), EACH_LEGEND),),
        ),
        Panel(
            "Calls by instance",
            "Uneven distribution is normal: connections are long-lived, so the first instances have most. A new "
            "instance gets calls when Envoy opens new connections.",
            "reqps",
            (Query(per_second(CALLS, by=EACH), EACH_LEGEND),),
        ),
        Panel(
            "Open files",
            "Mostly connections. At the limit of the process, new ones are rejected.",
            "short",
            (Query(now("process.open_file_descriptor.count", by=EACH), EACH_LEGEND),),
        ),
        Panel(
            "Versions",
            "Instances by version: two versions during a rollout.",
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
    "Calls, errors, latency and decisions of ratelimit-rls, identity, and the view of Envoy.",
    WHO + ENVOYS,
    (GLANCE, CALL_ROW, DECIDED, CALLERS, ENVOYS_SIDE, PROCESSES),
)
