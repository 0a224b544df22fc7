"""Value types of the decision path. This module holds data only; the functions that use it live in its neighbours.

    Request ─► match ─► Match ─► plan ─► Plan ─► store ─► StoreResult ─► decide ─► Decision

All types are immutable. Those created for every call are named tuples, which take a third of the time of a frozen
dataclass to create. Times are integer microseconds (`_us`); counts are plain integers. The terms are Envoy's: domain,
descriptor, entry, key, value, limit, unit, hits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from itertools import chain
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from ratelimit_rls.core.response_policy import DEFAULT_RESPONSE_POLICY, DenyResponse, ResponsePolicy

T = TypeVar("T")

MAX_HITS = 2**32 - 1
"""Maximum hits of one descriptor: the same as the largest limit that can be configured."""

MAX_REQUESTS_PER_UNIT = 2**32 - 1
"""Largest uint32, as in Envoy's API and the YAML of envoyproxy/ratelimit."""


class Unit(IntEnum):
    """Window units, numbered as in RateLimitResponse.RateLimit.Unit and envoy.type.v3.RateLimitUnit."""

    UNKNOWN = 0
    SECOND = 1
    MINUTE = 2
    HOUR = 3
    DAY = 4
    MONTH = 5
    YEAR = 6
    WEEK = 7

    @property
    def seconds(self) -> int:
        return _UNIT_SECONDS[self]


_UNIT_SECONDS = {
    Unit.UNKNOWN: 0,
    Unit.SECOND: 1,
    Unit.MINUTE: 60,
    Unit.HOUR: 3600,
    Unit.DAY: 86_400,
    Unit.WEEK: 604_800,
    Unit.MONTH: 2_592_000,  # 30 days, as in envoyproxy/ratelimit
    Unit.YEAR: 31_536_000,  # 365 days
}


class Algorithm(Enum):
    """Rate limiting algorithms. The value is the name in YAML and the name of the file in lua/."""

    FIXED_WINDOW = "fixed_window"
    SLIDING_WINDOW = "sliding_window"
    SLIDING_LOG = "sliding_log"
    TOKEN_BUCKET = "token_bucket"  # noqa: S105 - an algorithm, not a password
    LEAKY_BUCKET = "leaky_bucket"
    GCRA = "gcra"

    @property
    def has_burst(self) -> bool:
        return self in (Algorithm.TOKEN_BUCKET, Algorithm.LEAKY_BUCKET, Algorithm.GCRA)


class Charge(Enum):
    """Rule for counting the hits of a denied call (docs/algorithms.md, "Charging")."""

    ALWAYS = "always"  # hits count whether or not the call passes; a counter may go into debt
    ADMITTED = "admitted"  # hits count only if the whole call passes


class OnStoreFailure(Enum):
    """Decision for a call when the store did not reply. If a call's rules differ, the first member listed here wins."""

    DENY = "deny"
    ERROR = "error"  # respond with an error: Envoy's own `failure_mode_deny` decides
    LOCAL = "local"  # decide in this process, with its share of the limit
    ALLOW = "allow"


class Code(IntEnum):
    """Verdicts, numbered as in RateLimitResponse.Code."""

    UNKNOWN = 0
    OK = 1
    OVER_LIMIT = 2


class Entry(NamedTuple):
    key: str
    value: str


class Subject(Enum):
    """Kinds of subject whose own limits, if any, replace those of a rule (`limits_of`). The value is the YAML value."""

    USER = "user"
    API_KEY = "api_key"


class Purpose(Enum):
    """Purpose of a request. LOOK and REPORT are Kuadrant's check and report calls, for costs known only afterwards."""

    DECIDE = "decide"
    LOOK = "look"  # check whether one more hit would pass; count nothing
    REPORT = "report"  # count what has already happened, even beyond the limit


@dataclass(frozen=True, slots=True)
class LimitOverride:
    """A limit carried by the request itself. It replaces the rules of a known domain."""

    requests_per_unit: int
    unit: Unit


class Descriptor(NamedTuple):
    entries: tuple[Entry, ...]
    limit: LimitOverride | None = None
    hits: int | None = None  # None: the request's hits; 0: check without counting
    is_refund: bool = False


class Request(NamedTuple):
    domain: str
    descriptors: tuple[Descriptor, ...]
    hits: int = 0  # as on the wire: 0 means 1
    purpose: Purpose = Purpose.DECIDE


class Position(NamedTuple):
    """Source position in the rules, for messages and `explain`."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Limit:
    """A number of requests per window, and the algorithm that counts them."""

    requests_per_unit: int
    unit: Unit
    algorithm: Algorithm = Algorithm.FIXED_WINDOW
    burst: int = 0  # token_bucket, leaky_bucket and gcra only: maximum hits admitted at once
    name: str = ""
    unit_multiplier: int = 1
    timezone: str = ""  # calendar windows in this time zone; "": windows of equal length since the epoch

    @property
    def window_us(self) -> int:
        """Window length in microseconds. For a calendar window it is nominal: the real length depends on the date."""
        return self.unit.seconds * self.unit_multiplier * 1_000_000

    @property
    def window(self) -> str:
        """Identifier of the window in storage keys, e.g. `60` (seconds) or `month@Europe/Berlin`."""
        if self.timezone:
            return f"{self.unit.name.lower()}@{self.timezone}"
        return str(self.window_us // 1_000_000)

    @property
    def wire_unit(self) -> Unit:
        """Unit for Envoy's messages. They have no 30-second or 5-minute windows, so those are sent as UNKNOWN."""
        return self.unit if self.unit_multiplier == 1 else Unit.UNKNOWN


@dataclass(frozen=True, slots=True)
class Penalty:
    """Longer waits after repeated violations (lua/penalty.lua defines what counts as a violation)."""

    within_us: int
    after: int  # number of violations within the period from which the first multiplier applies
    multipliers: tuple[int, ...]  # of the wait, one per further violation; the last one applies to all beyond


@dataclass(frozen=True, slots=True)
class WarnAt:
    """Thresholds of the warning state, in thousandths of the limit.

    The state begins above `permille` and ends a tenth of the limit below it.
    """

    permille: int

    @property
    def leave_permille(self) -> int:
        return max(0, self.permille - 100)


Watcher = Penalty | WarnAt
"""Additional state of a descriptor, stored beside its counters and updated from their results."""


@dataclass(frozen=True, slots=True)
class LeasePolicy:
    """Settings for a hot counter: each process leases hits in advance instead of sending every call (store/leases/)."""

    lease_us: int


class WarningState(IntEnum):
    """State of a descriptor with `warn_at`, numbered as in lua/warning.lua."""

    NORMAL = 0
    WARNING = 1
    THROTTLED = 2  # the limit denies calls; not `action: throttle`


class Rule(NamedTuple):
    """Compiled form of a descriptor in the rules that has `rate_limit`.

    A named tuple, like Node: large configurations have a hundred thousand, and a frozen dataclass takes four times as
    long to create.
    """

    path: str  # "domain.key_value.key": its name in metrics and /rlconfig of envoyproxy/ratelimit
    limits: tuple[Limit, ...]  # all of them apply; empty exactly when the rule is unlimited
    replaces: frozenset[str] = frozenset()
    charge: Charge = Charge.ALWAYS
    shadow_mode: bool = False
    quota_mode: bool = False
    detailed_metric: bool = False
    metadata: Mapping[str, Any] | None = None
    position: Position | None = None
    max_delay_us: int = 0  # `action: throttle`: maximum delay of a call; 0: calls are never delayed
    penalty: Penalty | None = None
    warn_at: WarnAt | None = None
    response_policy: ResponsePolicy = DEFAULT_RESPONSE_POLICY
    deny: DenyResponse | None = None
    on_store_failure: OnStoreFailure | None = None  # None: the process-wide default
    hot: LeasePolicy | None = None
    limits_of: Subject | None = None  # use the own limits of the subject named by the last value

    @property
    def unlimited(self) -> bool:
        return not self.limits


class Match(NamedTuple):
    """The rule that a descriptor matches, and the names of its counter and metrics."""

    rule: Rule | None  # None: no limit applies
    entries: tuple[Entry, ...] = ()  # the descriptor's entries; a shared wildcard's pattern replaces the value
    metric_path: str = ""  # the rule's path, with request values where the rule asks for them


@dataclass(frozen=True, slots=True)
class Step:
    """Operation on one counter."""

    limit: Limit
    cost: int  # negative: refund; 0: check without counting
    charge: Charge
    shadow_mode: bool = False
    quota_mode: bool = False
    max_delay_us: int = 0  # above 0: if it fits within this delay, charge now and admit later


@dataclass(frozen=True, slots=True)
class DescriptorPlan:
    """Counter operations of one descriptor of the request."""

    rule: Rule | None
    steps: tuple[Step, ...]  # one per limit; empty: decided without the store
    hits: int
    metric_path: str = ""
    unlimited: bool = False
    watchers: tuple[Watcher, ...] = ()  # empty if there are no steps


@dataclass(frozen=True, slots=True)
class Rejection:
    """Reason to reject a call regardless of its limits. The store is not called and nothing is charged."""

    reason: Literal["blocked", "unauthorized", "malformed"]
    message: str  # for the client
    status: int  # HTTP status, where the protocol lets us choose
    until_s: float | None = None  # end of the block, in seconds since the epoch; None: unknown
    descriptor_index: int = 0  # of the descriptor that caused it


class DerivedKey(Generic[T]):
    """Key of one kind of value that is derived from plan templates. T is the type of the values. Compares by identity.

    It belongs to the code that derives the values (`core.plan.per_template`).
    """

    __slots__ = ()


class DerivedValues(Protocol):
    """The values derived from one template: a dictionary in which the key determines the type of the value."""

    def get(self, key: DerivedKey[T], /) -> T | None:
        """Return the value under this key; None if it was not derived yet."""
        ...

    def __setitem__(self, key: DerivedKey[T], value: T, /) -> None: ...


_no_values: Callable[[], dict[DerivedKey[Any], Any]] = dict


@dataclass(frozen=True, slots=True, eq=False)
class PlanTemplate:
    """A plan without its counter keys, shared by all requests that match the same rules with the same hits.

    Requests differ far more in their values than in their rules, so stores, metrics and encoders prepare their data
    once per template. Templates compare by identity.
    """

    domain: str
    domain_known: bool
    steps: tuple[Step, ...]
    descriptor_plans: tuple[DescriptorPlan, ...]  # one per descriptor, in order; their steps concatenated are `steps`
    # In the global quota mode a descriptor without a limit is a quota that passes, so quotas cannot deny the call.
    quota_passes: bool = False
    shadow_mode: bool = False  # the global one: the verdict is counted and reported but not enforced
    own_bytes: int = 0  # size if it holds data of one request (limits, hits, metric names), which few share
    purpose: Purpose = Purpose.DECIDE
    can_wait: bool = False  # the response may have to be delayed
    is_plain: bool = False  # a result that passes may be its outcome (`core.decision.passes`)
    on_store_failure: OnStoreFailure = OnStoreFailure.ERROR
    rejection: Rejection | None = None  # if set, there are no steps
    # A copy of the template starts empty.
    derived: DerivedValues = field(default_factory=_no_values, repr=False, init=False)


class Validity(Protocol):
    """Condition under which a plan that was made from entitlements is still valid."""

    def holds(self, now_s: float) -> bool:
        """Return True if the plan may be used. `now_s` is in seconds since the epoch."""
        ...


class Plan(NamedTuple):
    """Everything that one request asks of the store: a function of the request, the rules and the entitlements.

    It does not depend on the current time. It becomes invalid when an entitlement it was made from ends or changes.
    """

    template: PlanTemplate
    keys: tuple[bytes, ...]  # for each descriptor, one key per step, then one per watcher
    valid: Validity | None = None  # None: valid as long as the rules


construct = tuple.__new__
"""Create a named tuple from an iterable of all its fields, in order.

Used for the types created on every call: the generated constructor takes twice as long.
"""


class Reading(NamedTuple):
    """State of one limit after the call, as reported by the store."""

    left: int  # hits that still fit; negative: debt
    retry_us: int  # 0: allowed; > 0: denied, admitted after exactly this long; -1: never; < -1: see wait_us
    reset_us: int  # until the counter is as if never used (fixed_window: until its window ends)

    @property
    def allowed(self) -> bool:
        return self.retry_us == 0 or self.retry_us < -1

    @property
    def wait_us(self) -> int:
        """Delay of the response: the hits were charged now for a slot that begins after this time."""
        return -1 - self.retry_us if self.retry_us < -1 else 0


class StoreResult(NamedTuple):
    """Result of one call, as reported by the store."""

    denied: bool  # the call's verdict; charging depended on it
    now_us: int  # time of the decision, on the store's clock
    numbers: tuple[int, ...]  # the readings one after the other: three numbers per key of the plan
    granted: int = 0  # for a plan that takes up to a number of hits: how many it took
    remembered: bool = False  # a cached denial: the store was not called
    replayed: bool = False  # repeated result of an idempotent call: nothing was charged now
    decided_at_us: tuple[int, ...] = ()  # per key, if not all were decided at `now_us` by one clock

    @classmethod
    def of(
        cls,
        denied: bool,
        now_us: int,
        readings: Iterable[Reading],
        *,
        remembered: bool = False,
        replayed: bool = False,
        decided_at_us: tuple[int, ...] = (),
    ) -> StoreResult:
        """Return a result with these readings."""
        numbers = tuple(chain.from_iterable(readings))
        return cls(denied, now_us, numbers, 0, remembered, replayed, decided_at_us)

    @property
    def readings(self) -> tuple[Reading, ...]:
        """One reading per key of the plan."""
        numbers = iter(self.numbers)
        return tuple([construct(Reading, one) for one in zip(numbers, numbers, numbers, strict=True)])


class Status(NamedTuple):
    """Outcome for one descriptor."""

    code: Code
    step: Step | None  # the limit reported; None: no limit applies, or unlimited
    remaining: int
    reset_s: int  # whole seconds, rounded up; retry-after if denied
    descriptor_plan: DescriptorPlan
    reading: Reading | None = None  # of the limit reported
    readings: tuple[Reading, ...] = ()  # of all limits of the descriptor, in the order of `descriptor_plan.steps`
    state: WarningState | None = None  # with `warn_at`
    violations: int = 0  # with `penalty`: violations within its period
    cooldown: Reading | None = None  # set if a penalty denies the call; `reading` is then the same object


class Decision(NamedTuple):
    """Outcome for one call."""

    code: Code
    statuses: tuple[Status, ...]
    template: PlanTemplate
    shadowed: bool = False  # the global shadow mode turned OVER_LIMIT into OK
    now_us: int = 0
    wait_us: int = 0  # above 0: admitted, respond after this delay
    delayed_by: int = -1  # if delayed: index of the plan's key whose slot is waited for
    without_store: OnStoreFailure | None = None  # the fallback applied because the store did not reply
    remembered: bool = False  # a cached denial: the store was not called
    decided_at_us: tuple[int, ...] = ()  # as in StoreResult
    replayed: bool = False  # repeated result of an idempotent call: nothing was charged now
    share: Decision | None = None  # decided locally: the decision by this process's share of each limit


Outcome = Decision | StoreResult
"""The decision of a call. It is the result of the store itself if every limit passes (`core.decision.passes`): nearly
every call ends like this, and then what is left of each limit is all that responses and metrics need.
`core.decision.decision_of` returns the decision for it."""
