"""Dashboard of the store: latency, decisions without it, and what reduces its load."""

from __future__ import annotations

from tools.dashboards.grafana import Dashboard, Level, Panel, Query, Row
from tools.dashboards.queries import CALLS, EACH, EACH_LEGEND, WHO, mean, now, per_second, quantile

BATCHES = "ratelimit.store.duration"
ANSWERED = 'error_type=""'
FAILED = 'error_type!=""'

LATENCY = Row(
    "Latency and throughput",
    (
        Panel(
            "Batch latency",
            "Calls that arrive together form one batch. Failed batches are not included. Of Envoy's default timeout "
            "of 20 ms, 17 ms remain for the store.",
            "s",
            tuple(
                Query(
                    quantile(one, BATCHES, ANSWERED, by=["ratelimit.store"]),
                    f"{one * 100:g} % {{{{ratelimit_store}}}}",
                )
                for one in (0.5, 0.99, 0.999)
            ),
            levels=(Level(0.017, "red"),),
        ),
        Panel(
            "Batches",
            "Batches per second, and failed batches by error.",
            "ops",
            (
                Query(per_second(BATCHES, ANSWERED, by=["ratelimit.store"]), "{{ratelimit_store}}"),
                Query(
                    per_second(BATCHES, FAILED, by=["ratelimit.store", "error.type"]),
                    "{{ratelimit_store}} {{error_type}}",
                ),
            ),
        ),
        Panel(
            "Calls per batch",
            "Grows with load, which makes each call cheaper.",
            "short",
            (Query(f"{per_second(CALLS)} / {per_second(BATCHES)}", "calls"),),
        ),
        Panel(
            "Available",
            "1 while connected, by instance. If one instance is at 0, check its network; if all are, check the store.",
            "short",
            (Query(now("ratelimit.store.available", by=EACH, how="min"), EACH_LEGEND),),
        ),
        Panel(
            "Calls waiting for the store",
            "By instance. At RLS_MAX_IN_FLIGHT (10,000 per process) further calls are decided at once by "
            "on_store_failure.",
            "short",
            (Query(now("ratelimit.store.calls_in_flight", by=EACH), EACH_LEGEND),),
        ),
        Panel(
            "Mean batch latency, by instance",
            "An instance that is slower than the others is far from the store, or busy itself.",
            "s",
            (Query(mean(BATCHES, ANSWERED, by=EACH), EACH_LEGEND),),
        ),
    ),
)

WITHOUT = Row(
    "Fallback",
    (
        Panel(
            "Calls without a store decision",
            "deadline_exceeded: the deadline of the call came first. overloaded: more than RLS_MAX_IN_FLIGHT calls "
            "waited. unavailable: there was no connection, or it was lost.",
            "reqps",
            (Query(per_second("ratelimit.store.failures", by=["ratelimit.reason"]), "{{ratelimit_reason}}"),),
            stacked=True,
        ),
        Panel(
            "Fallback decisions",
            "By policy: on_store_failure of the rules, else RLS_FAILURE_MODE.",
            "reqps",
            (Query(per_second("ratelimit.fallback.decisions", by=["ratelimit.policy"]), "{{ratelimit_policy}}"),),
            stacked=True,
        ),
        Panel(
            "Counters of `local`",
            "Counters kept in the processes while the store is unavailable, and those evicted for lack of memory (32 "
            "MiB per process), which restart with their share.",
            "short",
            (
                Query(now("ratelimit.fallback.keys"), "kept"),
                Query(per_second("ratelimit.fallback.evictions"), "evicted per second"),
            ),
        ),
    ),
)

LOAD_REDUCTION = Row(
    "Load reduction",
    (
        Panel(
            "Denied from the denial cache",
            "Calls per second that were denied without the store.",
            "reqps",
            (Query(per_second("ratelimit.denial_cache.hits", by=EACH), EACH_LEGEND),),
            width=6,
        ),
        Panel(
            "Denial cache",
            "Valid entries of all processes; entries invalidated by a refund, a reset or new rules; and entries "
            "evicted for lack of memory: if there are many, raise RLS_DENIAL_CACHE_BYTES.",
            "short",
            (
                Query(now("ratelimit.denial_cache.entries"), "entries"),
                Query(per_second("ratelimit.denial_cache.invalidations"), "invalidated per second"),
                Query(per_second("ratelimit.denial_cache.evictions"), "evicted per second"),
            ),
            width=6,
        ),
        Panel(
            "Admitted from leases",
            "Calls per second that were admitted from a lease (hot:), without the store, and lease requests to the "
            "store. The larger the difference, the more a lease saves.",
            "reqps",
            (
                Query(per_second("ratelimit.leases.admitted_calls"), "admitted"),
                Query(per_second("ratelimit.leases.requests"), "lease requests"),
            ),
            width=6,
        ),
        Panel(
            "Leases",
            "Leased counters, unused hits of the leases, and hits returned unused. Many returned hits mean that the "
            "lease is longer than the key is hot.",
            "short",
            (
                Query(now("ratelimit.leases.counters"), "counters"),
                Query(now("ratelimit.leases.available_hits"), "unused hits"),
                Query(per_second("ratelimit.leases.returned_hits"), "returned per second"),
            ),
            width=6,
        ),
    ),
)

HOT = Row(
    "Hot keys and delayed calls",
    (
        Panel(
            "Hottest counter",
            "Calls per second to the hottest counter, by instance. `ratelimit-rls top` shows which counter it is.",
            "reqps",
            (Query(now("ratelimit.hot_keys.max_rate", by=EACH, how="max"), EACH_LEGEND),),
            width=6,
        ),
        Panel(
            "Candidates for a lease",
            "Counters above RLS_HOT_KEY_RATE without a lease. The log names them.",
            "short",
            (Query(now("ratelimit.hot_keys.over_threshold", by=EACH, how="max"), EACH_LEGEND),),
            width=6,
        ),
        Panel(
            "Delayed calls",
            "Calls delayed until their slot (action: throttle); at most RLS_MAX_HELD_CALLS per process.",
            "short",
            (Query(now("ratelimit.throttle.queue_length", by=EACH), EACH_LEGEND),),
            width=6,
        ),
        Panel(
            "Outcome of delayed calls",
            "cancelled: the client did not wait; is Envoy's timeout above max_delay? queue full: denied because the "
            "throttle queue was full.",
            "reqps",
            (
                Query(per_second("ratelimit.throttle.delayed"), "delayed"),
                Query(per_second("ratelimit.throttle.cancelled"), "cancelled"),
                Query(per_second("ratelimit.throttle.queue_full"), "queue full"),
            ),
            width=6,
        ),
    ),
)

EMBEDDED = Row(
    "Counters in memory",
    (
        Panel(
            "Counters of the embedded store",
            "Number of counters without Redis, by instance.",
            "short",
            (Query(now("ratelimit.embedded_store.keys", by=EACH), EACH_LEGEND),),
        ),
        Panel(
            "Evicted by the embedded store",
            "Unexpired counters per second that were evicted for lack of memory: their callers start again with the "
            "full limit. Above 0, raise RLS_EMBEDDED_MEMORY_BYTES.",
            "ops",
            (Query(per_second("ratelimit.embedded_store.evictions", by=EACH), EACH_LEGEND),),
        ),
        Panel(
            "Memory by use",
            "Of all processes: counters of the embedded store, counters of `local`, denial cache. Each has a budget.",
            "bytes",
            (
                Query(now("ratelimit.embedded_store.size"), "embedded store"),
                Query(now("ratelimit.fallback.size"), "local"),
                Query(now("ratelimit.denial_cache.size"), "denial cache"),
            ),
            stacked=True,
        ),
    ),
)

PROCESSES = Row(
    "Processes",
    (
        Panel(
            "Memory",
            "Resident memory, by instance with all of its workers; it includes the memory above.",
            "bytes",
            (Query(now("process.memory.usage", by=EACH), EACH_LEGEND),),
            width=12,
        ),
        Panel(
            "CPU",
            "Cores in use, by instance with all of its workers. At RLS_WORKERS cores calls wait for the process, not "
            "for the store.",
            "short",
            (Query(per_second("process.cpu.time", by=EACH), EACH_LEGEND),),
            width=12,
        ),
    ),
)

STORE = Dashboard(
    "ratelimit-rls-store",
    "Rate limits / Store",
    "Latency of the store of ratelimit-rls, decisions without it, and what reduces its load.",
    WHO,
    (LATENCY, WITHOUT, LOAD_REDUCTION, HOT, EMBEDDED, PROCESSES),
)
