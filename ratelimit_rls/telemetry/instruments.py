"""Every metric there is, once: what it is called, of what kind and in which unit, and what sets its series apart.

Names are OpenTelemetry's way of writing them; Prometheus's are made from them. Whatever exports metrics, documents them
or draws them reads this list, and a number that is not in it cannot be exported.

Attributes are bounded: by the rules file, by what the process is set to, or by a number stated in metrics.py. Nothing
that a client sends becomes one beyond that.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

DURATIONS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Upper bounds of histograms. Those that OpenTelemetry advises begin at 5 ms, and Envoy waits 20 by default."""

_PROMETHEUS_UNITS = {"s": "_seconds", "By": "_bytes"}


class Kind(Enum):
    COUNTER = "counter"  # only ever grows
    GAUGE = "gauge"
    HISTOGRAM = "histogram"  # of seconds, with DURATIONS_S as bounds


class Together(Enum):
    """What the values of several processes make, when one is asked for all."""

    SUM = "sum"
    MOST = "most"  # all may be speaking of the same thing
    LEAST = "least"  # the one in trouble is the one to hear of


@dataclass(frozen=True, slots=True)
class Instrument:
    name: str
    kind: Kind
    unit: str  # UCUM: s, By, {call}
    about: str
    attributes: tuple[str, ...] = ()
    together: Together = Together.SUM
    reference: str = ""  # a name of the reference's, for Prometheus alone: existing dashboards ask for it

    @property
    def prometheus(self) -> str:
        if self.reference:
            return self.reference
        name = self.name.replace(".", "_") + _PROMETHEUS_UNITS.get(self.unit, "")
        return name + "_total" if self.kind is Kind.COUNTER else name


DOMAIN, RULE, OUTCOME, SOURCE = "ratelimit.domain", "ratelimit.rule", "ratelimit.outcome", "ratelimit.source"
POLICY, REASON, STATE, STORE, VERSION = (
    "ratelimit.policy",
    "ratelimit.reason",
    "ratelimit.state",
    "ratelimit.store",
    "ratelimit.version",
)

CALL_DURATION = Instrument(
    "rpc.server.call.duration",
    Kind.HISTOGRAM,
    "s",
    "From the moment a gRPC call was received until it was answered, held calls included.",
    ("rpc.system.name", "rpc.method", "rpc.status_code"),
)
DECISIONS = Instrument(
    "ratelimit.decisions",
    Kind.COUNTER,
    "{decision}",
    "Descriptors that were decided. Outcome: ok, over_limit, shadowed, unlimited, replaced, no_rule, and of callers "
    "who are turned away whatever their limits: blocked, unauthorized. Source: store, cache (a remembered refusal), "
    "fallback (the store did not answer), rules (no counter was needed).",
    (DOMAIN, RULE, OUTCOME, SOURCE),
)
HITS = Instrument(
    "ratelimit.hits",
    Kind.COUNTER,
    "{hit}",
    "Hits that were asked for, by what became of them.",
    (DOMAIN, RULE, OUTCOME),
)
NEAR_LIMIT = Instrument(
    "ratelimit.near_limit", Kind.COUNTER, "{hit}", "Hits above NEAR_LIMIT_RATIO of their limit.", (DOMAIN, RULE)
)
STATES = Instrument(
    "ratelimit.states",
    Kind.COUNTER,
    "{decision}",
    "Decisions in one of the states of warn_at: warning, throttled.",
    (DOMAIN, RULE, STATE),
)
UNKNOWN_DOMAINS = Instrument(
    "ratelimit.unknown_domains",
    Kind.COUNTER,
    "{descriptor}",
    "Descriptors of domains that no rules are for: often a slip in Envoy's configuration.",
    (DOMAIN,),
)
GLOBAL_SHADOW = Instrument(
    "ratelimit.global_shadow", Kind.COUNTER, "{call}", "Refusals that SHADOW_MODE turned into passes."
)
CALL_ERRORS = Instrument(
    "ratelimit.call_errors", Kind.COUNTER, "{call}", "Calls without meaning, or that came before there were rules."
)
CALLS_IN_FLIGHT = Instrument(
    "ratelimit.calls_in_flight", Kind.GAUGE, "{call}", "gRPC calls without an answer yet, held ones included."
)
STORE_DURATION = Instrument(
    "ratelimit.store.duration",
    Kind.HISTOGRAM,
    "s",
    "How long the store took for a batch of calls; error.type is empty where it answered.",
    (STORE, "error.type"),
)
STORE_AVAILABLE = Instrument(
    "ratelimit.store.available",
    Kind.GAUGE,
    "{store}",
    "1 while the store can be asked, 0 while there is no connection to it.",
    together=Together.LEAST,
)
STORE_IN_FLIGHT = Instrument(
    "ratelimit.store.calls_in_flight", Kind.GAUGE, "{call}", "Calls that wait for the store (RLS_MAX_IN_FLIGHT)."
)
STORE_FAILURES = Instrument(
    "ratelimit.store.failures",
    Kind.COUNTER,
    "{call}",
    "Calls that the store did not decide: late (the caller's deadline), overloaded (RLS_MAX_IN_FLIGHT), unavailable.",
    (REASON,),
)
FALLBACK_DECISIONS = Instrument(
    "ratelimit.fallback.decisions",
    Kind.COUNTER,
    "{call}",
    "What those calls were told: allow, deny, local, error (on_store_failure).",
    (POLICY,),
)
RULES_LOADS = Instrument(
    "ratelimit.rules.loads", Kind.COUNTER, "{load}", "Updates of the rules: success, error.", (OUTCOME,)
)
RULES_REFUSED = Instrument(
    "ratelimit.rules.refused",
    Kind.GAUGE,
    "{load}",
    "Updates refused since the last good one; above 0, the rules in force are not the newest.",
    together=Together.MOST,
)
RULES_IN_FORCE = Instrument(
    "ratelimit.rules.in_force", Kind.GAUGE, "{rule}", "Rules in force.", together=Together.LEAST
)
RULES_DOMAINS = Instrument(
    "ratelimit.rules.domains", Kind.GAUGE, "{domain}", "Domains that rules are for.", together=Together.LEAST
)
XDS_CONNECTED = Instrument(
    "ratelimit.xds.connected",
    Kind.GAUGE,
    "{stream}",
    "1 while a management server can send rules, 0 while there is no stream to it (CONFIG_TYPE=GRPC_XDS_SOTW).",
    together=Together.LEAST,
)
RULES_AGE = Instrument(
    "ratelimit.rules.age", Kind.GAUGE, "s", "Since the rules in force were loaded.", together=Together.MOST
)
BUILD = Instrument(
    "ratelimit.build", Kind.GAUGE, "{build}", "1, with the version that runs.", (VERSION,), together=Together.MOST
)
WORKERS = Instrument("ratelimit.workers", Kind.GAUGE, "{process}", "Processes that serve the ports together.")
CPU_TIME = Instrument("process.cpu.time", Kind.COUNTER, "s", "Processor time used, user and system.")
MEMORY = Instrument("process.memory.usage", Kind.GAUGE, "By", "Resident memory.")
OPEN_FILES = Instrument("process.open_file_descriptor.count", Kind.GAUGE, "{file}", "Open files and sockets.")

CREDENTIALS = Instrument(
    "ratelimit.credentials",
    Kind.COUNTER,
    "{credential}",
    "Credentials that were looked at. Kind: api_key, jwt. Outcome: valid, invalid.",
    ("ratelimit.credential", OUTCOME),
)
TOKENS_REFUSED = Instrument(
    "ratelimit.tokens.refused", Kind.COUNTER, "{token}", "Tokens that were not believed, by the reason.", (REASON,)
)
ISSUER_KEYS = Instrument(
    "ratelimit.issuer_keys",
    Kind.GAUGE,
    "{key}",
    "Keys that tokens of an issuer are verified with; none: all of its tokens are refused.",
    ("ratelimit.issuer",),
    together=Together.LEAST,
)
ACCOUNTS = Instrument(
    "ratelimit.accounts",
    Kind.GAUGE,
    "{account}",
    "What is held in memory of callers: tiers, users, keys, and standings in use.",
    ("ratelimit.account",),
    together=Together.MOST,
)
DATABASE_AVAILABLE = Instrument(
    "ratelimit.database.available",
    Kind.GAUGE,
    "1",
    "1: the database is followed. 0: it is away, and what was last read is in force.",
    together=Together.LEAST,
)
FEED_SEQUENCE = Instrument(
    "ratelimit.database.sequence",
    Kind.GAUGE,
    "1",
    "The newest change of an administrator that is in force here.",
    together=Together.LEAST,
)
KEPT_BY_OTHERS: dict[str, Instrument] = {
    "ratelimit.store.calls_in_flight": STORE_IN_FLIGHT,
    "ratelimit.denials.remembered": Instrument(
        "ratelimit.denials.remembered", Kind.GAUGE, "{refusal}", "Refusals that still hold, known without the store."
    ),
    "ratelimit.denials.bytes": Instrument("ratelimit.denials.size", Kind.GAUGE, "By", "What they take."),
    "ratelimit.denials.answered": Instrument(
        "ratelimit.denials.answered", Kind.COUNTER, "{call}", "Calls refused without asking the store."
    ),
    "ratelimit.denials.forgotten": Instrument(
        "ratelimit.denials.forgotten", Kind.COUNTER, "{refusal}", "Ended early by a refund, a reset or new rules."
    ),
    "ratelimit.denials.evicted": Instrument(
        "ratelimit.denials.evicted", Kind.COUNTER, "{refusal}", "Dropped for want of room."
    ),
    "ratelimit.leases.counters": Instrument(
        "ratelimit.leases.counters", Kind.GAUGE, "{counter}", "Counters of which hits are taken in advance (hot:)."
    ),
    "ratelimit.leases.hits_in_hand": Instrument(
        "ratelimit.leases.hits_in_hand", Kind.GAUGE, "{hit}", "Hits taken in advance and not used yet."
    ),
    "ratelimit.leases.served_total": Instrument(
        "ratelimit.leases.served", Kind.COUNTER, "{call}", "Calls admitted from them without asking the store."
    ),
    "ratelimit.leases.asked_total": Instrument(
        "ratelimit.leases.asked", Kind.COUNTER, "{request}", "Times the store was asked for more."
    ),
    "ratelimit.leases.returned_total": Instrument(
        "ratelimit.leases.returned", Kind.COUNTER, "{hit}", "Hits given back unused."
    ),
    "ratelimit.throttle.held": Instrument(
        "ratelimit.throttle.held", Kind.GAUGE, "{call}", "Calls whose answers are held (action: throttle)."
    ),
    "ratelimit.throttle.held_total": Instrument(
        "ratelimit.throttle.holds", Kind.COUNTER, "{call}", "Calls whose answers were held."
    ),
    "ratelimit.throttle.left_total": Instrument(
        "ratelimit.throttle.left", Kind.COUNTER, "{call}", "Held calls whose callers did not wait."
    ),
    "ratelimit.throttle.room_full_total": Instrument(
        "ratelimit.throttle.room_full", Kind.COUNTER, "{call}", "Calls that could not be held (RLS_MAX_HELD_CALLS)."
    ),
    "ratelimit.audit.waiting": Instrument(
        "ratelimit.audit.waiting", Kind.GAUGE, "{decision}", "Decisions that are to be written to the database."
    ),
    "ratelimit.audit.dropped_total": Instrument(
        "ratelimit.audit.dropped", Kind.COUNTER, "{decision}", "Not recorded for want of room (RLS_AUDIT_BUFFER)."
    ),
    "ratelimit.audit.written_total": Instrument(
        "ratelimit.audit.written", Kind.COUNTER, "{decision}", "Decisions that are in the database."
    ),
    "ratelimit.audit.refused_total": Instrument(
        "ratelimit.audit.refused", Kind.COUNTER, "{decision}", "Decisions that the database would not take."
    ),
    "ratelimit.usage.waiting": Instrument(
        "ratelimit.usage.waiting", Kind.GAUGE, "{line}", "Lines of usage that wait for the database, by the minute."
    ),
    "ratelimit.usage.dropped_total": Instrument(
        "ratelimit.usage.dropped", Kind.COUNTER, "{call}", "Calls that are in no usage, for want of room."
    ),
    "ratelimit.usage.lines": Instrument(
        "ratelimit.usage.lines", Kind.GAUGE, "{line}", "Lines that usage is counted under, not taken to be written yet."
    ),
    "ratelimit.limiter.clock_skew_total": Instrument(
        "ratelimit.limiter.clock_skew",
        Kind.COUNTER,
        "{call}",
        "Calls of CheckRateLimit whose caller's clock is more than five minutes from ours. Limits go by the store's.",
    ),
    "ratelimit.embedded_store.keys": Instrument(
        "ratelimit.embedded_store.keys", Kind.GAUGE, "{key}", "Counters of the embedded store."
    ),
    "ratelimit.embedded_store.bytes": Instrument(
        "ratelimit.embedded_store.size", Kind.GAUGE, "By", "What they take (RLS_EMBEDDED_MEMORY_BYTES)."
    ),
    "ratelimit.embedded_store.evicted": Instrument(
        "ratelimit.embedded_store.evicted", Kind.COUNTER, "{key}", "Counters dropped for room while they mattered."
    ),
    "ratelimit.store_failure.local_keys": Instrument(
        "ratelimit.fallback.keys", Kind.GAUGE, "{key}", "Counters kept here for on_store_failure: local."
    ),
    "ratelimit.store_failure.local_bytes": Instrument("ratelimit.fallback.size", Kind.GAUGE, "By", "What they take."),
    "ratelimit.store_failure.local_evicted": Instrument(
        "ratelimit.fallback.evicted", Kind.COUNTER, "{key}", "Dropped for room while they mattered."
    ),
    "ratelimit.hot_keys.hottest_per_second": Instrument(
        "ratelimit.hot_keys.hottest",
        Kind.GAUGE,
        "{call}",
        "Calls a second to the counter that is asked for most.",
        together=Together.MOST,
    ),
    "ratelimit.hot_keys.over_threshold": Instrument(
        "ratelimit.hot_keys.over_threshold",
        Kind.GAUGE,
        "{counter}",
        "Counters asked for more often than RLS_HOT_KEY_RATE that are not leased.",
        together=Together.MOST,
    ),
}
"""Numbers that other parts keep and tell (Metrics.watch), by the name under which /stats and statsd have them."""

_OF_A_LIMIT = ("domain", "key1", "key2")


def _reference(name: str, kind: Kind, unit: str, about: str, *attributes: str) -> Instrument:
    return Instrument(name.replace("_", "."), kind, unit, about, attributes, reference=name)


REFERENCE_LIMITS = {
    field: _reference(f"ratelimit_service_rate_limit_{field}", Kind.COUNTER, "{hit}", about, *_OF_A_LIMIT)
    for field, about in {
        "total_hits": "Hits of a limit.",
        "over_limit": "Hits above it.",
        "near_limit": "Hits above NEAR_LIMIT_RATIO of it.",
        "over_limit_with_local_cache": "Hits above it that were refused without the store.",
        "within_limit": "Hits within it.",
        "shadow_mode": "Hits above it that passed in shadow mode.",
    }.items()
}
REFERENCE_ERRORS = _reference(
    "ratelimit_service_should_rate_limit_error",
    Kind.COUNTER,
    "{call}",
    "redis_error: the store did not decide. service_error: the call had no meaning, or there were no rules.",
    "err_type",
)
REFERENCE_REQUESTS = _reference(
    "ratelimit_service_total_requests", Kind.COUNTER, "{call}", "gRPC calls.", "grpc_method"
)
REFERENCE_TIMES = _reference(
    "ratelimit_service_response_time_seconds", Kind.HISTOGRAM, "s", "How long they took.", "grpc_method"
)
REFERENCE_LOADED = _reference(
    "ratelimit_service_config_load_success", Kind.COUNTER, "{load}", "Updates of the rules that were taken."
)
REFERENCE_REFUSED = _reference(
    "ratelimit_service_config_load_error", Kind.COUNTER, "{load}", "Updates of the rules that were refused."
)

INSTRUMENTS: tuple[Instrument, ...] = (
    CALL_DURATION,
    DECISIONS,
    HITS,
    NEAR_LIMIT,
    STATES,
    UNKNOWN_DOMAINS,
    GLOBAL_SHADOW,
    CALL_ERRORS,
    CALLS_IN_FLIGHT,
    STORE_DURATION,
    STORE_AVAILABLE,
    STORE_FAILURES,
    FALLBACK_DECISIONS,
    *KEPT_BY_OTHERS.values(),
    RULES_LOADS,
    RULES_REFUSED,
    RULES_IN_FORCE,
    RULES_DOMAINS,
    RULES_AGE,
    XDS_CONNECTED,
    CREDENTIALS,
    TOKENS_REFUSED,
    ISSUER_KEYS,
    ACCOUNTS,
    DATABASE_AVAILABLE,
    FEED_SEQUENCE,
    BUILD,
    WORKERS,
    CPU_TIME,
    MEMORY,
    OPEN_FILES,
    *REFERENCE_LIMITS.values(),
    REFERENCE_ERRORS,
    REFERENCE_REQUESTS,
    REFERENCE_TIMES,
    REFERENCE_LOADED,
    REFERENCE_REFUSED,
)

BY_NAME = {instrument.name: instrument for instrument in INSTRUMENTS}
