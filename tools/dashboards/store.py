"""Dashboard of the store: latency, decisions without it, and what reduces its load."""

from __future__ import annotations

from tools.dashboards.grafana import Dashboard, Level, Panel, Query, Row
from tools.dashboards.queries import (
    CALLS,
    EACH,
    EACH_LEGEND,
    NODE,
    NODE_LEGEND,
    WHO,
    mean,
    now,
    per_second,
    per_second_of_node,
    quantile,
)

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

REDIS = Row(
    "Redis",
    (
        Panel(
            "Memory of Redis",
            "Used share of maxmemory, by node; a node without maxmemory has none. At 1, writes fail or keys are "
            "evicted, by maxmemory-policy.",
            "percentunit",
            (Query(now("ratelimit.redis.memory.utilization", by=NODE, how="max"), NODE_LEGEND),),
            levels=(Level(0.8, "red"),),
        ),
        Panel(
            "Used memory of Redis",
            "Bytes used, by node. `ratelimit-rls top --memory` shows what fills it.",
            "bytes",
            (Query(now("ratelimit.redis.memory.used", by=NODE, how="max"), NODE_LEGEND),),
        ),
        Panel(
            "CPU of Redis",
            "Cores in use, by node. One core runs all scripts of a node, so calls wait when it comes near 1.",
            "short",
            (Query(per_second_of_node("ratelimit.redis.cpu.time", of_modes=True), NODE_LEGEND),),
            levels=(Level(0.6, "red"),),
        ),
        Panel(
            "Commands of Redis",
            "Commands per second, by node, of all clients and of the scripts.",
            "ops",
            (Query(per_second_of_node("ratelimit.redis.commands"), NODE_LEGEND),),
        ),
        Panel(
            "Latency of Redis",
            "From sending the commands of a batch to a node until all replies have arrived, measured by the instances: "
            "the network and the event loop are included.",
            "s",
            tuple(
                Query(quantile(one, "ratelimit.redis.duration", by=NODE), f"{one * 100:g} % {NODE_LEGEND}")
                for one in (0.5, 0.95, 0.99)
            ),
            levels=(Level(0.005, "red"),),
        ),
        Panel(
            "Evicted and expired keys",
            "Keys per second, by node. Evicted counters start again with the full limit: raise maxmemory. Expiry is "
            "normal.",
            "ops",
            (
                Query(per_second_of_node("ratelimit.redis.keys.evicted"), f"evicted {NODE_LEGEND}"),
                Query(per_second_of_node("ratelimit.redis.keys.expired"), f"expired {NODE_LEGEND}"),
            ),
        ),
        Panel(
            "Keyspace hits and misses",
            "Lookups per second, by node. A miss is a counter that does not exist yet, or no longer.",
            "ops",
            (
                Query(per_second_of_node("ratelimit.redis.keyspace.hits"), f"hits {NODE_LEGEND}"),
                Query(per_second_of_node("ratelimit.redis.keyspace.misses"), f"misses {NODE_LEGEND}"),
            ),
        ),
        Panel(
            "Clients of Redis",
            "Connected clients, by node. An instance has one connection per worker and node, and one per worker for "
            "pub/sub.",
            "short",
            (Query(now("ratelimit.redis.clients", by=NODE, how="max"), NODE_LEGEND),),
        ),
        Panel(
            "Replication lag",
            "Data that the slowest replica has not acknowledged: lost if the node fails now. Replicas acknowledge once "
            "a second, so some lag is normal under load.",
            "bytes",
            (Query(now("ratelimit.redis.replication.lag", by=NODE, how="max"), NODE_LEGEND),),
            width=6,
        ),
        Panel(
            "Silence of replicas",
            "Seconds since a replica last acknowledged, of the one that has been silent longest.",
            "s",
            (Query(now("ratelimit.redis.replication.ack_age", by=NODE, how="max"), NODE_LEGEND),),
            levels=(Level(10, "red"),),
            width=6,
        ),
        Panel(
            "Online replicas",
            "By node. Without one, nothing takes over when the node fails.",
            "short",
            (Query(now("ratelimit.redis.replicas", by=NODE, how="min"), NODE_LEGEND),),
            width=6,
        ),
        Panel(
            "Slots of the cluster",
            "Hash slots, of 16384, as the node with the fewest sees them. Calls whose slot is not ok are decided "
            "without Redis.",
            "short",
            (Query(now("ratelimit.redis.cluster.slots", by=["ratelimit.state"], how="min"), "{{ratelimit_state}}"),),
            width=6,
        ),
    ),
)

STORE = Dashboard(
    "ratelimit-rls-store",
    "Rate limits / Store",
    "Latency of the store of ratelimit-rls, decisions without it, and what reduces its load.",
    WHO,
    (LATENCY, WITHOUT, LOAD_REDUCTION, HOT, EMBEDDED, PROCESSES, REDIS),
)
