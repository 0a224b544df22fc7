"""Where the counters are: how fast it answers, what happens without it, and what is done so that it is asked less."""

from __future__ import annotations

from docs.dashboards.grafana import Dashboard, Level, Panel, Query, Row
from docs.dashboards.queries import CALLS, EACH, EACH_LEGEND, WHO, mean, now, per_second, quantile

BATCHES = "ratelimit.store.duration"
ANSWERED = 'error_type=""'
FAILED = 'error_type!=""'

ANSWERS = Row(
    "Answers",
    (
        Panel(
            "How long a batch took",
            "All calls that arrived together are one batch. Of those that were answered. Envoy's 20 ms leave the "
            "store 17.",
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
            "A second, and those that failed, by what went wrong.",
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
            "Calls for each batch",
            "How much of a batch several calls share: under load it grows, and a call becomes cheaper.",
            "short",
            (Query(f"{per_second(CALLS)} / {per_second(BATCHES)}", "calls"),),
        ),
        Panel(
            "There",
            "1 while there is a connection, by instance. One instance at 0: its network. All of them: the store.",
            "short",
            (Query(now("ratelimit.store.available", by=EACH, how="min"), EACH_LEGEND),),
        ),
        Panel(
            "Calls that wait for it",
            "By instance; at RLS_MAX_IN_FLIGHT (10,000 for each process) the next are told at once what "
            "on_store_failure says.",
            "short",
            (Query(now("ratelimit.store.calls_in_flight", by=EACH), EACH_LEGEND),),
        ),
        Panel(
            "Mean time of a batch, by instance",
            "One instance that is slower than the others is far from the store, or busy itself.",
            "s",
            (Query(mean(BATCHES, ANSWERED, by=EACH), EACH_LEGEND),),
        ),
    ),
)

WITHOUT = Row(
    "Without it",
    (
        Panel(
            "Calls that the store did not decide",
            "late: the caller's deadline came first. overloaded: more than RLS_MAX_IN_FLIGHT waited. unavailable: "
            "there was no connection, or it broke.",
            "reqps",
            (Query(per_second("ratelimit.store.failures", by=["ratelimit.reason"]), "{{ratelimit_reason}}"),),
            stacked=True,
        ),
        Panel(
            "What they were told",
            "By on_store_failure of their rules, else RLS_FAILURE_MODE.",
            "reqps",
            (Query(per_second("ratelimit.fallback.decisions", by=["ratelimit.policy"]), "{{ratelimit_policy}}"),),
            stacked=True,
        ),
        Panel(
            "Counters of `local`",
            "Kept in the processes while the store is away, and those dropped for want of room (32 MiB in each "
            "process): they begin again with their share.",
            "short",
            (
                Query(now("ratelimit.fallback.keys"), "kept"),
                Query(per_second("ratelimit.fallback.evicted"), "dropped a second"),
            ),
        ),
    ),
)

ASKED_LESS = Row(
    "Asked less",
    (
        Panel(
            "Refused from memory",
            "Calls a second that were refused without asking the store.",
            "reqps",
            (Query(per_second("ratelimit.denials.answered", by=EACH), EACH_LEGEND),),
            width=6,
        ),
        Panel(
            "Refusals remembered",
            "That still hold, of all processes; those ended early by a refund, a reset or new rules; and those dropped "
            "for want of room: if many are, raise RLS_DENIAL_CACHE_BYTES.",
            "short",
            (
                Query(now("ratelimit.denials.remembered"), "remembered"),
                Query(per_second("ratelimit.denials.forgotten"), "ended early a second"),
                Query(per_second("ratelimit.denials.evicted"), "dropped a second"),
            ),
            width=6,
        ),
        Panel(
            "Admitted from leases",
            "Calls a second that were admitted without asking the store (hot:), and how often it was asked for "
            "more. The further apart, the more a lease saves.",
            "reqps",
            (
                Query(per_second("ratelimit.leases.served"), "admitted"),
                Query(per_second("ratelimit.leases.asked"), "asked for more"),
            ),
            width=6,
        ),
        Panel(
            "Leases",
            "Counters of which hits are taken in advance, the hits in hand, and those given back unused. Many "
            "given back: the lease is longer than the key is hot.",
            "short",
            (
                Query(now("ratelimit.leases.counters"), "counters"),
                Query(now("ratelimit.leases.hits_in_hand"), "hits in hand"),
                Query(per_second("ratelimit.leases.returned"), "given back a second"),
            ),
            width=6,
        ),
    ),
)

HOT = Row(
    "Hot keys and held calls",
    (
        Panel(
            "The hottest counter",
            "Calls a second to the counter that one instance is asked for most. `ratelimit-rls top` tells which it is.",
            "reqps",
            (Query(now("ratelimit.hot_keys.hottest", by=EACH, how="max"), EACH_LEGEND),),
            width=6,
        ),
        Panel(
            "Counters that deserve a lease",
            "Asked for more often than RLS_HOT_KEY_RATE, and without one. The log names them.",
            "short",
            (Query(now("ratelimit.hot_keys.over_threshold", by=EACH, how="max"), EACH_LEGEND),),
            width=6,
        ),
        Panel(
            "Calls held",
            "Answers held until their slot comes (action: throttle); each instance can hold RLS_MAX_HELD_CALLS.",
            "short",
            (Query(now("ratelimit.throttle.held", by=EACH), EACH_LEGEND),),
            width=6,
        ),
        Panel(
            "What became of held calls",
            "left: their callers did not wait; is Envoy's timeout above max_delay? no room: they were refused "
            "because too many were held.",
            "reqps",
            (
                Query(per_second("ratelimit.throttle.holds"), "held"),
                Query(per_second("ratelimit.throttle.left"), "left"),
                Query(per_second("ratelimit.throttle.room_full"), "no room"),
            ),
            width=6,
        ),
    ),
)

EMBEDDED = Row(
    "What is kept in memory",
    (
        Panel(
            "Counters of the embedded store",
            "Without Redis: how many there are.",
            "short",
            (Query(now("ratelimit.embedded_store.keys", by=EACH), EACH_LEGEND),),
        ),
        Panel(
            "Dropped by the embedded store",
            "Counters a second that were dropped for want of room while they mattered: whoever they belong to "
            "begins again. Above 0, raise RLS_EMBEDDED_MEMORY_BYTES.",
            "ops",
            (Query(per_second("ratelimit.embedded_store.evicted", by=EACH), EACH_LEGEND),),
        ),
        Panel(
            "What is kept",
            "Of all processes: counters of the embedded store, counters of `local`, remembered refusals. Each has "
            "a budget.",
            "bytes",
            (
                Query(now("ratelimit.embedded_store.size"), "embedded store"),
                Query(now("ratelimit.fallback.size"), "local"),
                Query(now("ratelimit.denials.size"), "refusals"),
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
            "Resident, by instance with all of its workers; what is kept is a part of it.",
            "bytes",
            (Query(now("process.memory.usage", by=EACH), EACH_LEGEND),),
            width=12,
        ),
        Panel(
            "Processor",
            "Cores in use, by instance with all of its workers. At RLS_WORKERS cores calls wait for the process, "
            "and not for the store.",
            "short",
            (Query(per_second("process.cpu.time", by=EACH), EACH_LEGEND),),
            width=12,
        ),
    ),
)

STORE = Dashboard(
    "ratelimit-rls-store",
    "Rate limits / Store",
    "How the store of ratelimit-rls answers, what happens without it, and what is done so that it is asked less.",
    WHO,
    (ANSWERS, WITHOUT, ASKED_LESS, HOT, EMBEDDED, PROCESSES),
)
