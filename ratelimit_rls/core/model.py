"""The values that travel through the service, and nothing that acts on them.

    Request ─► match ─► Match ─► plan ─► Plan ─► store ─► Answer ─► decide ─► Decision

All are frozen; those made for every call are named tuples, which take a third of the time to make. Times are integer
microseconds (`_us`), counts are plain integers. Envoy's words are used throughout: domain, descriptor, entry, key,
value, limit, unit, hits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ratelimit_rls.core.style import PLAIN, AnswerStyle, Deny

if TYPE_CHECKING:
    from ratelimit_rls.core.standing import Validity

MAX_HITS = 2**32 - 1
"""The most hits one descriptor may ask for: as many as the largest limit that can be written."""

MAX_REQUESTS_PER_UNIT = 2**32 - 1
"""uint32, as in Envoy's API and the reference's YAML."""


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
    Unit.MONTH: 2_592_000,  # 30 days, as the reference counts
    Unit.YEAR: 31_536_000,  # 365 days
}


class Algorithm(Enum):
    """The value is the name in YAML and of the file in lua/."""

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
    """Who pays when a call is refused (docs/algorithms.md, "Who pays")."""

    ALWAYS = "always"  # hits count whatever the verdict; a limit may run into debt
    ADMITTED = "admitted"  # hits count only if the whole call passes


class OnStoreFailure(Enum):
    """What a call is told when the store did not answer. Where the rules of a call differ, the first of these holds."""

    DENY = "deny"
    ERROR = "error"  # no answer at all: Envoy's own `failure_mode_deny` decides
    LOCAL = "local"  # decided in this process, by its share of the limit
    ALLOW = "allow"


class Code(IntEnum):
    """RateLimitResponse.Code."""

    UNKNOWN = 0
    OK = 1
    OVER_LIMIT = 2


class Entry(NamedTuple):
    key: str
    value: str


class Subject(Enum):
    """Whose limits a rule takes in place of its own, where they have any. The value is the word in YAML."""

    USER = "user"
    API_KEY = "api_key"


class Purpose(Enum):
    """What a request is for. All but DECIDE are Kuadrant's two halves of a cost that is known afterwards."""

    DECIDE = "decide"
    LOOK = "look"  # would one more pass? Nothing is counted
    REPORT = "report"  # it has happened: counted whatever it leaves


@dataclass(frozen=True, slots=True)
class Override:
    """A limit that the request itself carries; it wins over the rules of a known domain."""

    requests_per_unit: int
    unit: Unit


class Descriptor(NamedTuple):
    entries: tuple[Entry, ...]
    limit: Override | None = None
    hits: int | None = None  # None: the request's hits; 0 looks without spending
    is_refund: bool = False


class Request(NamedTuple):
    domain: str
    descriptors: tuple[Descriptor, ...]
    hits: int = 0  # as on the wire: 0 means 1
    purpose: Purpose = Purpose.DECIDE


class Position(NamedTuple):
    """Where in the rules something was written, for messages and `explain`."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Limit:
    """So many requests in so long, counted in such a way."""

    requests_per_unit: int
    unit: Unit
    algorithm: Algorithm = Algorithm.FIXED_WINDOW
    burst: int = 0  # buckets and GCRA only: the most that passes at once
    name: str = ""
    unit_multiplier: int = 1
    timezone: str = ""  # a calendar's day, week, month or year there; "": windows of equal length since the epoch

    @property
    def window_us(self) -> int:
        """Of a calendar's window, the usual length: its real one depends on the moment."""
        return self.unit.seconds * self.unit_multiplier * 1_000_000

    @property
    def window(self) -> str:
        """What tells this limit's window from any other, e.g. `60` or `month@Europe/Berlin`."""
        if self.timezone:
            return f"{self.unit.name.lower()}@{self.timezone}"
        return str(self.window_us // 1_000_000)

    @property
    def spoken_unit(self) -> Unit:
        """The unit as Envoy can be told: it knows no 30 seconds and no 5 minutes, and is told UNKNOWN."""
        return self.unit if self.unit_multiplier == 1 else Unit.UNKNOWN


@dataclass(frozen=True, slots=True)
class Penalty:
    """Who is refused again and again waits longer (lua/penalty.lua says what is counted)."""

    within_us: int
    after: int  # so many violations within the period, and the first multiplier counts
    multipliers: tuple[int, ...]  # of the wait: the last one for every violation beyond them


@dataclass(frozen=True, slots=True)
class WarnAt:
    """The warning state begins above this part of the limit, and ends below a tenth of the limit less."""

    permille: int

    @property
    def leave_permille(self) -> int:
        return max(0, self.permille - 100)


Watcher = Penalty | WarnAt
"""What looks at how a descriptor's limits fare, and keeps a state of its own beside theirs."""


@dataclass(frozen=True, slots=True)
class Hot:
    """A counter that is moved so often that each process takes hits in advance (store/leases/)."""

    lease_us: int


class State(IntEnum):
    """How a descriptor with `warn_at` stands, numbered as in lua/warning.lua."""

    NORMAL = 0
    WARNING = 1
    THROTTLED = 2


class Rule(NamedTuple):
    """What the rules say about one descriptor: the compiled form of a node that has `rate_limit`.

    A tuple, as Node is: large rules have a hundred thousand, and to make a frozen dataclass takes four times as long.
    """

    path: str  # "domain.key_value.key": the name the reference gives it in metrics and /rlconfig
    limits: tuple[Limit, ...]  # all of them hold; none at all exactly when unlimited
    replaces: frozenset[str] = frozenset()
    charge: Charge = Charge.ALWAYS
    shadow_mode: bool = False
    quota_mode: bool = False
    detailed_metric: bool = False
    metadata: Mapping[str, Any] | None = None
    position: Position | None = None
    max_delay_us: int = 0  # `action: throttle`: what fits within so long waits for it; 0: nothing waits
    penalty: Penalty | None = None
    warn_at: WarnAt | None = None
    style: AnswerStyle = PLAIN
    deny: Deny | None = None
    on_store_failure: OnStoreFailure | None = None  # None: as the process is set
    hot: Hot | None = None
    limits_of: Subject | None = None  # who is named by the descriptor's last value: their own limits, if they have any

    @property
    def unlimited(self) -> bool:
        return not self.limits


class Match(NamedTuple):
    """The rule one descriptor meets, with what its counter and its metrics are called."""

    rule: Rule | None  # None: no limit applies
    entries: tuple[Entry, ...] = ()  # the descriptor's, with a shared wildcard's pattern in place of the value
    metric_path: str = ""  # the rule's path, or a longer one where the rule asks for values in metrics


@dataclass(frozen=True, slots=True)
class Step:
    """What is asked of one counter."""

    limit: Limit
    cost: int  # negative gives back; 0 looks
    charge: Charge
    shadow_mode: bool = False
    quota_mode: bool = False
    max_delay_us: int = 0  # above 0: if it fits within so long, it is charged now and admitted then


@dataclass(frozen=True, slots=True)
class Slot:
    """How one descriptor of the request is answered."""

    rule: Rule | None
    steps: tuple[Step, ...]  # one per limit; none: answered without the store
    hits: int
    metric_path: str = ""
    unlimited: bool = False
    watchers: tuple[Watcher, ...] = ()  # none without steps


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a call does not pass whatever its limits say: nothing is asked of the store, and nothing is charged."""

    reason: Literal["blocked", "unauthorized"]
    message: str  # for whoever is refused
    status: int  # of HTTP, where the protocol lets us choose
    until_s: float | None = None  # when it ends, in seconds since the epoch; None: nobody knows
    slot: int = 0  # the number of the descriptor by which it came


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """All of a plan but whose counters it moves: shared by every request that meets the same rules with the same hits.

    Requests differ in their values far more than in their rules, so whatever a store, a metric or an encoder can
    prepare is prepared once per outline. Two outlines are equal only if they are the same object.
    """

    domain: str
    domain_known: bool
    steps: tuple[Step, ...]
    slots: tuple[Slot, ...]  # one per descriptor, in order; their steps together are `steps`
    # Under the global quota mode a descriptor without a limit is a quota that passes: the call cannot fail by quotas.
    quota_passes: bool = False
    shadow_mode: bool = False  # the global one: the verdict is counted and told, but does not hold
    own_bytes: int = 0  # its weight, if the request brought some of it (limits, hits, names of metrics): few share it
    purpose: Purpose = Purpose.DECIDE
    can_wait: bool = False  # an answer may have to be held
    on_store_failure: OnStoreFailure = OnStoreFailure.ERROR
    refusal: Refusal | None = None  # then there are no steps
    # What was prepared, by what prepares it. Never another's: an outline made from this one begins with nothing.
    made_of_it: dict[object, Any] = field(default_factory=dict, repr=False, init=False)


class Plan(NamedTuple):
    """All that one request asks of the store: a function of the request, the rules and how its callers stand.

    The moment is no part of it; but where a standing ends, or is changed, the plan ends with it.
    """

    outline: Outline
    keys: tuple[bytes, ...]  # for each descriptor, one state per step, then one per watcher
    valid: Validity | None = None  # None: for as long as the rules


filled = tuple.__new__
"""A tuple with names, from all its fields in their order: by names, it takes twice as long. For those of every call."""


class Reading(NamedTuple):
    """What the store says of one step, after the call."""

    left: int  # how many more hits fit; negative is debt
    retry_us: int  # 0: allowed. Positive: refused, and admitted after exactly this long. -1: never; below: see wait_us
    reset_us: int  # until the limit is as if never used (fixed_window: until its window ends)

    @property
    def allowed(self) -> bool:
        return self.retry_us == 0 or self.retry_us < -1

    @property
    def wait_us(self) -> int:
        """How long the answer is held: it was charged now for a slot that comes then."""
        return -1 - self.retry_us if self.retry_us < -1 else 0


class Answer(NamedTuple):
    """What the store says of one call."""

    refused: bool  # the call's verdict, on which the spending hung
    now_us: int  # the store's clock when it decided
    readings: tuple[Reading, ...]  # one per key of the plan
    granted: int = 0  # of a plan that takes as many hits as there are: how many it took
    remembered: bool = False  # a refusal that still held, so that the store was not asked
    again: bool = False  # of a call that counts once: this was told before, and nothing was charged now
    moments_us: tuple[int, ...] = ()  # for each key, where not all were decided at `now_us`, by one clock


class Status(NamedTuple):
    """What is told of one descriptor."""

    code: Code
    step: Step | None  # the limit spoken of; None: none applies, or unlimited
    remaining: int
    reset_s: int  # whole seconds, rounded up; retry-after when refused
    slot: Slot
    reading: Reading | None = None  # of that limit
    readings: tuple[Reading, ...] = ()  # of every limit of the descriptor, in the order of `slot.steps`
    state: State | None = None  # with `warn_at`
    violations: int = 0  # with `penalty`: how many of late
    cooldown: Reading | None = None  # a penalty that refuses, and not the limits alone; `reading` then is the same


class Decision(NamedTuple):
    """What is told of one call."""

    code: Code
    statuses: tuple[Status, ...]
    outline: Outline
    shadowed: bool = False  # OVER_LIMIT was turned into OK by the global shadow mode
    now_us: int = 0
    wait_us: int = 0  # above 0: admitted, and to be answered after so long
    held_by: int = -1  # then: the number of the plan's key whose slot is waited for
    without_store: OnStoreFailure | None = None  # the store did not answer, and this is what was done instead
    remembered: bool = False  # a refusal that still held, so that the store was not asked
    moments_us: tuple[int, ...] = ()  # as of the answer
