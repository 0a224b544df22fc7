"""Definitions of all metrics: name, kind, unit and attributes.

Names follow OpenTelemetry; Prometheus names are derived from them. Exporters, documentation and dashboards read this
list, and a value that is not in it cannot be exported.

Attribute values are bounded by the rules file, by the settings of the process, or by a constant in metrics.py. Client
data becomes an attribute value only within those bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

DURATIONS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Upper bounds of histogram buckets. Those recommended by OpenTelemetry begin at 5 ms; Envoy waits 20 by default."""

_PROMETHEUS_UNITS = {"s": "_seconds", "By": "_bytes"}


class InstrumentKind(Enum):
    COUNTER = "counter"  # only ever grows
    GAUGE = "gauge"
    HISTOGRAM = "histogram"  # of seconds, with DURATIONS_S as bounds


class MergeRule(Enum):
    """The way in which the values of several processes are merged into one."""

    SUM = "sum"
    MAX = "max"  # the largest: all processes may report the same thing
    MIN = "min"  # the smallest: the process with a problem must be visible


@dataclass(frozen=True, slots=True)
class Instrument:
    """A metric."""

    name: str
    kind: InstrumentKind
    unit: str  # UCUM: s, By, {call}
    about: str
    attributes: tuple[str, ...] = ()
    merge_rule: MergeRule = MergeRule.SUM
    reference: str = ""  # its name in envoyproxy/ratelimit, for Prometheus only: existing dashboards use it

    @property
    def prometheus(self) -> str:
        if self.reference:
            return self.reference
        name = self.name.replace(".", "_") + _PROMETHEUS_UNITS.get(self.unit, "")
        return name + "_total" if self.kind is InstrumentKind.COUNTER else name


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
    InstrumentKind.HISTOGRAM,
    "s",
    "Duration of gRPC calls from receipt to response, including throttling delays.",
    ("rpc.system.name", "rpc.method", "rpc.response.status_code"),
)
DECISIONS = Instrument(
    "ratelimit.decisions",
    InstrumentKind.COUNTER,
    "{decision}",
    "Decided descriptors. Outcome: ok, over_limit, shadowed, unlimited, replaced, no_rule, and for callers that are "
    "rejected whatever their limits: blocked, unauthorized, malformed. Source: store, cache (a cached denial), "
    "fallback (the store did not answer), rules (no counter was needed).",
    (DOMAIN, RULE, OUTCOME, SOURCE),
)
HITS = Instrument(
    "ratelimit.hits",
    InstrumentKind.COUNTER,
    "{hit}",
    "Requested hits by outcome.",
    (DOMAIN, RULE, OUTCOME),
)
NEAR_LIMIT = Instrument(
    "ratelimit.near_limit",
    InstrumentKind.COUNTER,
    "{hit}",
    "Hits above NEAR_LIMIT_RATIO of their limit.",
    (DOMAIN, RULE),
)
STATES = Instrument(
    "ratelimit.warning_states",
    InstrumentKind.COUNTER,
    "{decision}",
    "Decisions in a state of warn_at: warning, or throttled (denied by the limit).",
    (DOMAIN, RULE, STATE),
)
UNKNOWN_DOMAINS = Instrument(
    "ratelimit.unknown_domains",
    InstrumentKind.COUNTER,
    "{descriptor}",
    "Descriptors of domains without rules: often a mistake in Envoy's configuration.",
    (DOMAIN,),
)
GLOBAL_SHADOW = Instrument(
    "ratelimit.global_shadow", InstrumentKind.COUNTER, "{call}", "Denials that SHADOW_MODE let pass."
)
CALL_ERRORS = Instrument(
    "ratelimit.call_errors",
    InstrumentKind.COUNTER,
    "{call}",
    "Invalid calls, and calls before rules were loaded.",
)
ABUSE = Instrument(
    "ratelimit.abuse",
    InstrumentKind.COUNTER,
    "{event}",
    "Connections, streams and requests that a defence rejected or ended, by reason; docs/security.md lists them.",
    (REASON,),
)
CALLS_IN_FLIGHT = Instrument(
    "ratelimit.calls_in_flight",
    InstrumentKind.GAUGE,
    "{call}",
    "gRPC calls without a response yet, including delayed ones.",
)
STORE_DURATION = Instrument(
    "ratelimit.store.duration",
    InstrumentKind.HISTOGRAM,
    "s",
    "Duration of a batch of calls in the store; error.type is empty if it succeeded.",
    (STORE, "error.type"),
)
STORE_AVAILABLE = Instrument(
    "ratelimit.store.available",
    InstrumentKind.GAUGE,
    "{store}",
    "1 while the store is connected, 0 while it is not.",
    merge_rule=MergeRule.MIN,
)
STORE_IN_FLIGHT = Instrument(
    "ratelimit.store.calls_in_flight",
    InstrumentKind.GAUGE,
    "{call}",
    "Calls that wait for the store (RLS_MAX_IN_FLIGHT).",
)
STORE_FAILURES = Instrument(
    "ratelimit.store.failures",
    InstrumentKind.COUNTER,
    "{call}",
    "Calls that the store did not decide: deadline_exceeded, overloaded (RLS_MAX_IN_FLIGHT), unavailable, or "
    "unknown_state: one of their states was not written by this release or an earlier one.",
    (REASON,),
)
FALLBACK_DECISIONS = Instrument(
    "ratelimit.fallback.decisions",
    InstrumentKind.COUNTER,
    "{call}",
    "Calls decided without the store, by policy: allow, deny, local, error (on_store_failure).",
    (POLICY,),
)
RULES_LOADS = Instrument(
    "ratelimit.rules.loads", InstrumentKind.COUNTER, "{load}", "Rules updates by outcome: success, error.", (OUTCOME,)
)
RULES_REJECTED_UPDATES = Instrument(
    "ratelimit.rules.rejected_updates",
    InstrumentKind.GAUGE,
    "{load}",
    "Updates rejected since the last successful one; above 0, the rules in force are not the newest.",
    merge_rule=MergeRule.MAX,
)
RULES_IN_FORCE = Instrument(
    "ratelimit.rules.in_force", InstrumentKind.GAUGE, "{rule}", "Rules in force.", merge_rule=MergeRule.MIN
)
RULES_DOMAINS = Instrument(
    "ratelimit.rules.domains",
    InstrumentKind.GAUGE,
    "{domain}",
    "Domains with rules.",
    merge_rule=MergeRule.MIN,
)
XDS_CONNECTED = Instrument(
    "ratelimit.xds.connected",
    InstrumentKind.GAUGE,
    "{stream}",
    "1 while there is a stream to the xDS management server, 0 while there is none (CONFIG_TYPE=GRPC_XDS_SOTW).",
    merge_rule=MergeRule.MIN,
)
RULES_AGE = Instrument(
    "ratelimit.rules.age",
    InstrumentKind.GAUGE,
    "s",
    "Time since the rules in force were loaded.",
    merge_rule=MergeRule.MAX,
)
BUILD = Instrument(
    "ratelimit.build",
    InstrumentKind.GAUGE,
    "{build}",
    "Always 1, with the running version.",
    (VERSION,),
    merge_rule=MergeRule.MAX,
)
WORKERS = Instrument("ratelimit.workers", InstrumentKind.GAUGE, "{process}", "Processes that share the ports.")
CPU_TIME = Instrument("process.cpu.time", InstrumentKind.COUNTER, "s", "CPU time used, user and system.")
MEMORY = Instrument("process.memory.usage", InstrumentKind.GAUGE, "By", "Resident memory.")
OPEN_FILES = Instrument("process.open_file_descriptor.count", InstrumentKind.GAUGE, "{file}", "Open files and sockets.")

CREDENTIALS = Instrument(
    "ratelimit.credentials",
    InstrumentKind.COUNTER,
    "{credential}",
    "Verified credentials. Kind: api_key, jwt. Outcome: valid, invalid.",
    ("ratelimit.credential", OUTCOME),
)
TOKENS_REJECTED = Instrument(
    "ratelimit.tokens.rejected",
    InstrumentKind.COUNTER,
    "{token}",
    "Rejected tokens by reason.",
    (REASON,),
)
ISSUER_KEYS = Instrument(
    "ratelimit.issuer_keys",
    InstrumentKind.GAUGE,
    "{key}",
    "Keys for verifying tokens of an issuer; with 0, all of its tokens are rejected.",
    ("ratelimit.issuer",),
    merge_rule=MergeRule.MIN,
)
ACCOUNTS = Instrument(
    "ratelimit.accounts",
    InstrumentKind.GAUGE,
    "{account}",
    "Accounts in memory: tiers, users, keys, and entitlements in use.",
    ("ratelimit.account",),
    merge_rule=MergeRule.MAX,
)
DATABASE_AVAILABLE = Instrument(
    "ratelimit.database.available",
    InstrumentKind.GAUGE,
    "1",
    "1 while changes are read from the database, 0 while it is unavailable and the last read state is in force.",
    merge_rule=MergeRule.MIN,
)
DATABASE_WRITABLE = Instrument(
    "ratelimit.database.writable",
    InstrumentKind.GAUGE,
    "1",
    "1 if the last write to the database succeeded, 0 if it failed; reads may still work.",
    merge_rule=MergeRule.MIN,
)
FEED_SEQUENCE = Instrument(
    "ratelimit.database.sequence",
    InstrumentKind.GAUGE,
    "1",
    "Number of the newest change by an administrator that is in force.",
    merge_rule=MergeRule.MIN,
)
EXTERNAL_INSTRUMENTS: dict[str, Instrument] = {
    "ratelimit.store.calls_in_flight": STORE_IN_FLIGHT,
    "ratelimit.denial_cache.entries": Instrument(
        "ratelimit.denial_cache.entries",
        InstrumentKind.GAUGE,
        "{entry}",
        "Denials in the cache.",
    ),
    "ratelimit.denial_cache.size": Instrument(
        "ratelimit.denial_cache.size", InstrumentKind.GAUGE, "By", "Memory of the denial cache."
    ),
    "ratelimit.denial_cache.hits": Instrument(
        "ratelimit.denial_cache.hits",
        InstrumentKind.COUNTER,
        "{call}",
        "Calls denied from the cache without the store.",
    ),
    "ratelimit.denial_cache.invalidations": Instrument(
        "ratelimit.denial_cache.invalidations",
        InstrumentKind.COUNTER,
        "{entry}",
        "Cached denials dropped early because of a refund, a reset or new rules.",
    ),
    "ratelimit.denial_cache.evictions": Instrument(
        "ratelimit.denial_cache.evictions",
        InstrumentKind.COUNTER,
        "{entry}",
        "Cached denials evicted for lack of memory.",
    ),
    "ratelimit.leases.counters": Instrument(
        "ratelimit.leases.counters",
        InstrumentKind.GAUGE,
        "{counter}",
        "Counters whose hits are leased in advance (hot:).",
    ),
    "ratelimit.leases.available_hits": Instrument(
        "ratelimit.leases.available_hits", InstrumentKind.GAUGE, "{hit}", "Leased hits that are not spent yet."
    ),
    "ratelimit.leases.admitted_calls": Instrument(
        "ratelimit.leases.admitted_calls",
        InstrumentKind.COUNTER,
        "{call}",
        "Calls admitted from leases without the store.",
    ),
    "ratelimit.leases.requests": Instrument(
        "ratelimit.leases.requests", InstrumentKind.COUNTER, "{request}", "Requests to the store for leases."
    ),
    "ratelimit.leases.returned_hits": Instrument(
        "ratelimit.leases.returned_hits", InstrumentKind.COUNTER, "{hit}", "Unused leased hits that were refunded."
    ),
    "ratelimit.throttle.queue_length": Instrument(
        "ratelimit.throttle.queue_length",
        InstrumentKind.GAUGE,
        "{call}",
        "Calls whose responses are delayed (action: throttle).",
    ),
    "ratelimit.throttle.delayed": Instrument(
        "ratelimit.throttle.delayed", InstrumentKind.COUNTER, "{call}", "Calls whose responses were delayed."
    ),
    "ratelimit.throttle.cancelled": Instrument(
        "ratelimit.throttle.cancelled", InstrumentKind.COUNTER, "{call}", "Delayed calls whose callers disconnected."
    ),
    "ratelimit.throttle.queue_full": Instrument(
        "ratelimit.throttle.queue_full",
        InstrumentKind.COUNTER,
        "{call}",
        "Calls denied because the throttle queue was full (RLS_MAX_HELD_CALLS).",
    ),
    "ratelimit.audit.buffered": Instrument(
        "ratelimit.audit.buffered",
        InstrumentKind.GAUGE,
        "{decision}",
        "Decisions waiting to be written to the database.",
    ),
    "ratelimit.audit.dropped": Instrument(
        "ratelimit.audit.dropped",
        InstrumentKind.COUNTER,
        "{decision}",
        "Decisions dropped because the buffer is full (RLS_AUDIT_BUFFER).",
    ),
    "ratelimit.audit.sampled_out": Instrument(
        "ratelimit.audit.sampled_out",
        InstrumentKind.COUNTER,
        "{decision}",
        "Denials beyond RLS_AUDIT_REFUSALS_PER_MINUTE that are not in the recorded sample.",
    ),
    "ratelimit.audit.written": Instrument(
        "ratelimit.audit.written", InstrumentKind.COUNTER, "{decision}", "Decisions written to the database."
    ),
    "ratelimit.audit.rejected": Instrument(
        "ratelimit.audit.rejected", InstrumentKind.COUNTER, "{decision}", "Decisions that the database rejected."
    ),
    "ratelimit.usage.buffered": Instrument(
        "ratelimit.usage.buffered",
        InstrumentKind.GAUGE,
        "{row}",
        "Rows of usage of past minutes waiting to be written to the database.",
    ),
    "ratelimit.usage.dropped": Instrument(
        "ratelimit.usage.dropped", InstrumentKind.COUNTER, "{call}", "Calls missing from usage for lack of memory."
    ),
    "ratelimit.usage.entries": Instrument(
        "ratelimit.usage.entries",
        InstrumentKind.GAUGE,
        "{row}",
        "Rows of usage that are being counted and are not yet waiting to be written.",
    ),
    "ratelimit.limiter.clock_skew": Instrument(
        "ratelimit.limiter.clock_skew",
        InstrumentKind.COUNTER,
        "{call}",
        "CheckRateLimit calls whose caller's clock differs by over five minutes; limits use the store's clock.",
    ),
    "ratelimit.embedded_store.keys": Instrument(
        "ratelimit.embedded_store.keys", InstrumentKind.GAUGE, "{key}", "Counters of the embedded store."
    ),
    "ratelimit.embedded_store.size": Instrument(
        "ratelimit.embedded_store.size",
        InstrumentKind.GAUGE,
        "By",
        "Memory of the embedded store (RLS_EMBEDDED_MEMORY_BYTES).",
    ),
    "ratelimit.embedded_store.evictions": Instrument(
        "ratelimit.embedded_store.evictions",
        InstrumentKind.COUNTER,
        "{key}",
        "Unexpired counters evicted for lack of memory.",
    ),
    "ratelimit.fallback.keys": Instrument(
        "ratelimit.fallback.keys",
        InstrumentKind.GAUGE,
        "{key}",
        "Counters in this process for on_store_failure: local.",
    ),
    "ratelimit.fallback.size": Instrument(
        "ratelimit.fallback.size", InstrumentKind.GAUGE, "By", "Memory of the counters for on_store_failure: local."
    ),
    "ratelimit.fallback.evictions": Instrument(
        "ratelimit.fallback.evictions",
        InstrumentKind.COUNTER,
        "{key}",
        "Unexpired counters of on_store_failure: local evicted for lack of memory.",
    ),
    "ratelimit.hot_keys.max_rate": Instrument(
        "ratelimit.hot_keys.max_rate",
        InstrumentKind.GAUGE,
        "{call}/s",
        "Calls per second to the most used counter.",
        merge_rule=MergeRule.MAX,
    ),
    "ratelimit.hot_keys.over_threshold": Instrument(
        "ratelimit.hot_keys.over_threshold",
        InstrumentKind.GAUGE,
        "{counter}",
        "Counters used more often than RLS_HOT_KEY_RATE that are not leased.",
        merge_rule=MergeRule.MAX,
    ),
}
"""Values that other components keep and report (Metrics.export_values), by their name in /stats and statsd."""

_NODE = ("server.address", "server.port")


def _of_node(
    name: str,
    kind: InstrumentKind,
    unit: str,
    about: str,
    *attributes: str,
    merge_rule: MergeRule = MergeRule.MAX,
) -> Instrument:
    """Return a metric of a Redis node that the node itself counts: every worker reports the same value."""
    return Instrument(f"ratelimit.redis.{name}", kind, unit, about, (*_NODE, *attributes), merge_rule=merge_rule)


REDIS_DURATION = Instrument(
    "ratelimit.redis.duration",
    InstrumentKind.HISTOGRAM,
    "s",
    "Time from sending commands to a node of Redis until all of their replies have arrived, or until the timeout.",
    _NODE,
)
REDIS_MEMORY_USED = _of_node("memory.used", InstrumentKind.GAUGE, "By", "Memory used by a node of Redis (used_memory).")
REDIS_MEMORY_LIMIT = _of_node("memory.limit", InstrumentKind.GAUGE, "By", "maxmemory of a node; absent if it is 0.")
REDIS_MEMORY_UTILIZATION = _of_node(
    "memory.utilization", InstrumentKind.GAUGE, "1", "Used share of maxmemory, from 0 to 1; absent if maxmemory is 0."
)
REDIS_KEYS_EVICTED = _of_node(
    "keys.evicted", InstrumentKind.COUNTER, "{key}", "Keys that a node evicted because its memory was full."
)
REDIS_KEYS_EXPIRED = _of_node("keys.expired", InstrumentKind.COUNTER, "{key}", "Keys that expired on a node.")
REDIS_KEYSPACE_HITS = _of_node(
    "keyspace.hits", InstrumentKind.COUNTER, "{lookup}", "Lookups of keys that existed on a node."
)
REDIS_KEYSPACE_MISSES = _of_node(
    "keyspace.misses", InstrumentKind.COUNTER, "{lookup}", "Lookups of keys that did not exist on a node."
)
REDIS_CPU_TIME = _of_node(
    "cpu.time", InstrumentKind.COUNTER, "s", "CPU time used by a node, by mode: user, system.", "cpu.mode"
)
REDIS_CLIENTS = _of_node("clients", InstrumentKind.GAUGE, "{client}", "Clients connected to a node.")
REDIS_COMMANDS = _of_node("commands", InstrumentKind.COUNTER, "{command}", "Commands processed by a node.")
REDIS_MASTER = _of_node(
    "master",
    InstrumentKind.GAUGE,
    "{server}",
    "1 if the node is a master, 0 if it is a replica.",
    merge_rule=MergeRule.MIN,
)
REDIS_REPLICAS = _of_node(
    "replicas", InstrumentKind.GAUGE, "{replica}", "Replicas of a node that are online.", merge_rule=MergeRule.MIN
)
REDIS_REPLICATION_LAG = _of_node(
    "replication.lag",
    InstrumentKind.GAUGE,
    "By",
    "Written data that the slowest replica of a node has not acknowledged; replicas acknowledge once a second.",
)
REDIS_REPLICATION_ACK_AGE = _of_node(
    "replication.ack_age",
    InstrumentKind.GAUGE,
    "s",
    "Time since a replica last acknowledged, of the one that has been silent longest; on a replica, since its master "
    "last sent data.",
)
REDIS_REPLICATION_LINK = _of_node(
    "replication.link",
    InstrumentKind.GAUGE,
    "{connection}",
    "Only on a replica: 1 while it is connected to its master, 0 while it is not.",
    merge_rule=MergeRule.MIN,
)
REDIS_CLUSTER_SLOTS = _of_node(
    "cluster.slots",
    InstrumentKind.GAUGE,
    "{slot}",
    "Hash slots of the cluster as a node sees them, of 16384. State: assigned (has an owner), ok (its owner is not "
    "failing).",
    STATE,
    merge_rule=MergeRule.MIN,
)
REDIS_INSTRUMENTS = (
    REDIS_DURATION,
    REDIS_MEMORY_USED,
    REDIS_MEMORY_LIMIT,
    REDIS_MEMORY_UTILIZATION,
    REDIS_KEYS_EVICTED,
    REDIS_KEYS_EXPIRED,
    REDIS_KEYSPACE_HITS,
    REDIS_KEYSPACE_MISSES,
    REDIS_CPU_TIME,
    REDIS_CLIENTS,
    REDIS_COMMANDS,
    REDIS_MASTER,
    REDIS_REPLICAS,
    REDIS_REPLICATION_LAG,
    REDIS_REPLICATION_ACK_AGE,
    REDIS_REPLICATION_LINK,
    REDIS_CLUSTER_SLOTS,
)
"""Metrics of the nodes of Redis, from INFO and CLUSTER INFO, and the durations of our own commands."""

_LIMIT_ATTRIBUTES = ("domain", "key1", "key2")


def _reference(name: str, kind: InstrumentKind, unit: str, about: str, *attributes: str) -> Instrument:
    return Instrument(name.replace("_", "."), kind, unit, about, attributes, reference=name)


REFERENCE_LIMITS = {
    field: _reference(
        f"ratelimit_service_rate_limit_{field}", InstrumentKind.COUNTER, "{hit}", about, *_LIMIT_ATTRIBUTES
    )
    for field, about in {
        "total_hits": "Hits of a limit.",
        "over_limit": "Hits above the limit.",
        "near_limit": "Hits above NEAR_LIMIT_RATIO of the limit.",
        "over_limit_with_local_cache": "Hits above the limit that were denied without the store.",
        "within_limit": "Hits within the limit.",
        "shadow_mode": "Hits above the limit that passed in shadow mode.",
    }.items()
}
REFERENCE_ERRORS = _reference(
    "ratelimit_service_should_rate_limit_error",
    InstrumentKind.COUNTER,
    "{call}",
    "redis_error: the store did not decide. service_error: the call was invalid, or there were no rules.",
    "err_type",
)
REFERENCE_REQUESTS = _reference(
    "ratelimit_service_total_requests", InstrumentKind.COUNTER, "{call}", "gRPC calls.", "grpc_method"
)
REFERENCE_TIMES = _reference(
    "ratelimit_service_response_time_seconds", InstrumentKind.HISTOGRAM, "s", "Response times.", "grpc_method"
)
REFERENCE_LOADED = _reference(
    "ratelimit_service_config_load_success", InstrumentKind.COUNTER, "{load}", "Rules updates that were accepted."
)
REFERENCE_REJECTED = _reference(
    "ratelimit_service_config_load_error", InstrumentKind.COUNTER, "{load}", "Rules updates that were rejected."
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
    ABUSE,
    CALLS_IN_FLIGHT,
    STORE_DURATION,
    STORE_AVAILABLE,
    STORE_FAILURES,
    FALLBACK_DECISIONS,
    *EXTERNAL_INSTRUMENTS.values(),
    RULES_LOADS,
    RULES_REJECTED_UPDATES,
    RULES_IN_FORCE,
    RULES_DOMAINS,
    RULES_AGE,
    XDS_CONNECTED,
    CREDENTIALS,
    TOKENS_REJECTED,
    ISSUER_KEYS,
    ACCOUNTS,
    DATABASE_AVAILABLE,
    DATABASE_WRITABLE,
    FEED_SEQUENCE,
    BUILD,
    WORKERS,
    CPU_TIME,
    MEMORY,
    OPEN_FILES,
    *REDIS_INSTRUMENTS,
    *REFERENCE_LIMITS.values(),
    REFERENCE_ERRORS,
    REFERENCE_REQUESTS,
    REFERENCE_TIMES,
    REFERENCE_LOADED,
    REFERENCE_REJECTED,
)

BY_NAME = {instrument.name: instrument for instrument in INSTRUMENTS}
