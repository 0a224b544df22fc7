"""What the API takes, field by field. Unknown fields are refused, and nothing is read as what it is not."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self
from urllib.parse import unquote

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from ratelimit_rls.core.accounts import LONGEST_ID, Role, Scope
from ratelimit_rls.core.model import MAX_HITS, MAX_REQUESTS_PER_UNIT
from ratelimit_rls.rules.load import DEEPEST
from ratelimit_rls.transport.http.admin.moments import Moment, Span

LONGEST_TEXT = 2000
LONGEST_DOCUMENT = 512 * 1024
LONGEST_VALUE = 4096
MOST_OF_A_KIND = 256
"""Alternatives in one field of targeting."""

MOST_PARTS = 20_000
"""Values in a document that comes as an object: to write one as YAML takes Python ten times as long as to read it."""

MOST_UNKNOWN = 20
"""Fields that a body may have too many, each of which is told of."""

MOST_LIMITS = 16
MOST_DESCRIPTORS = 100
MOST_ENTRIES = 64
MOST_SIMULATED = 10_000

NAME_PATTERN = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]+$"
TEXT_PATTERN = r"^[^\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]*$"  # of several lines, perhaps
PUBLIC_ID_PATTERN = "^[a-z2-7]{12}$"
RULE_ID_PATTERN = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"


def _is_text(value: str) -> str:
    """Not every string of Python can be written down: JSON can say half of a character."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("it is not Unicode text") from None
    return value


def _of_few_parts(value: Any) -> Any:
    """Counted level by level before anything else looks at it: as quick for a million values as for a few."""
    parts, level = 0, [value]
    for _ in range(DEEPEST + 2):  # a list of documents is a level of its own, and so is what the deepest hold
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner.extend(one.values())
            elif isinstance(one, list):
                inner.extend(one)
            if parts + len(inner) > MOST_PARTS:
                raise ValueError(f"it is an object of more than {MOST_PARTS} values; send the document as text")
        if not inner:
            return value
        parts += len(inner)
        level = inner
    raise ValueError("it is nested too deep")


def _unescaped(value: Any) -> Any:
    """Paths come as they were written (frame.py)."""
    try:
        return unquote(value, errors="strict")
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None


Name = Annotated[str, Field(min_length=1, max_length=LONGEST_ID, pattern=NAME_PATTERN), AfterValidator(_is_text)]
"""Of a user, a tier, a rule."""

OptionalName = Annotated[
    str, Field(max_length=LONGEST_ID, pattern=NAME_PATTERN.replace("+$", "*$")), AfterValidator(_is_text)
]
Text = Annotated[str, Field(max_length=LONGEST_TEXT, pattern=TEXT_PATTERN), AfterValidator(_is_text)]

UserId = Annotated[Name, BeforeValidator(_unescaped)]
TierName = Annotated[Name, BeforeValidator(_unescaped)]
RuleId = Annotated[str, BeforeValidator(_unescaped), Field(pattern=RULE_ID_PATTERN)]
PublicId = Annotated[str, BeforeValidator(_unescaped), Field(pattern=PUBLIC_ID_PATTERN)]
"""These stand in paths."""


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: Any) -> Any:
        """Every unknown one is told of, and a body has room for a hundred thousand."""
        if isinstance(value, dict) and len(value) > len(cls.model_fields) + MOST_UNKNOWN:
            raise ValueError(f"it has {len(value)} fields; there are {', '.join(cls.model_fields)}")
        return value


class Limit(Model):
    """A limit as rules write `rate_limit`; read by their compiler, with their errors."""

    unit: Literal["second", "minute", "hour", "day", "week", "month", "year"]
    requests_per_unit: int = Field(ge=0, le=MAX_REQUESTS_PER_UNIT)
    unit_multiplier: int | None = Field(None, ge=1, le=MAX_REQUESTS_PER_UNIT)
    algorithm: (
        Literal["fixed_window", "sliding_window", "sliding_log", "token_bucket", "leaky_bucket", "gcra"] | None
    ) = None
    burst: int | None = Field(None, ge=1, le=MAX_REQUESTS_PER_UNIT)
    calendar: bool | None = None
    timezone: OptionalName | None = None


Limits = Annotated[list[Limit], Field(max_length=MOST_LIMITS)]


class Term(Model):
    """Something that ends: at a moment, or after a span from now."""

    until: Moment | None = Field(None, description="When it ends.")
    duration: Span | None = Field(None, description="After how long it ends, in place of `until`: 90m, 12h, 30d.")

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.until is not None and self.duration is not None:
            raise ValueError("until and duration both say when it ends; give one of them")
        return self

    def ends_s(self, now_s: float) -> float | None:
        return self.until if self.duration is None else now_s + self.duration


class TierBody(Model):
    limits: Limits
    description: Text = ""


class NewTier(TierBody):
    name: Name


class UserBody(Model):
    tier: OptionalName = Field("", description="Empty: none.")
    org: OptionalName = ""
    limits: Limits = Field(default_factory=list, description="Custom ones, in place of the tier's.")


class UserTier(Model):
    tier: OptionalName = Field(description="Empty: none.")


class OverrideBody(Term):
    limits: Annotated[list[Limit], Field(min_length=1, max_length=MOST_LIMITS)]
    reason: Text = ""

    @model_validator(mode="after")
    def _an_end(self) -> Self:
        if self.until is None and self.duration is None:
            raise ValueError("an override is for a while; give until or duration")
        return self


class BlockBody(Term):
    """Without an end it lasts until it is lifted."""

    reason: Text = ""


class KeyBody(Model):
    """All fields are optional; what is not given stays as it is."""

    name: OptionalName | None = None
    tier: OptionalName | None = Field(None, description="Empty: its user's.")
    limits: Limits | None = None
    expires: Moment | None = Field(None, description="null: never.")


class NewKey(Model):
    user_id: Name
    name: OptionalName = ""
    tier: OptionalName = Field("", description="Empty: its user's.")
    limits: Limits = Field(default_factory=list, description="Its own, beside its user's.")
    expires: Moment | None = Field(None, description="null: never.")
    expires_in: Span | None = Field(None, description="In place of `expires`: 12h, 90d.")

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        _check_expiry(self.expires, self.expires_in)
        return self


class NewToken(Model):
    name: Name
    role: Annotated[Role, Field(strict=False)]
    expires: Moment | None = Field(None, description="null: never.")
    expires_in: Span | None = Field(None, description="In place of `expires`: 12h, 90d.")

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        _check_expiry(self.expires, self.expires_in)
        return self


def _check_expiry(expires: float | None, expires_in: float | None) -> None:
    if expires is not None and expires_in is not None:
        raise ValueError("expires and expires_in both say when it ends; give one of them")


def expires_s(body: NewKey | NewToken, now_s: float) -> float | None:
    return body.expires if body.expires_in is None else now_s + body.expires_in


Alternatives = Annotated[list[Name], Field(max_length=MOST_OF_A_KIND)]


class TargetingBody(Model):
    """Which requests the rule is for; what is not said means all."""

    tiers: Alternatives = Field(default_factory=list)
    endpoints: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=500)]], Field(max_length=MOST_OF_A_KIND)
    ] = Field(default_factory=list, description="Paths; `*` stands for anything.", examples=[["/api/*"]])
    methods: Alternatives = Field(default_factory=list)
    cidrs: Alternatives = Field(default_factory=list, examples=[["10.0.0.0/8"]])
    scope: Annotated[Scope, Field(strict=False)] | None = Field(None, description="Whose counter it moves.")


Document = Annotated[
    Annotated[str, Field(max_length=LONGEST_DOCUMENT), AfterValidator(_is_text)] | dict[str, JsonValue],
    Field(
        description="A rules document: its YAML as text, or the same as an object.",
        examples=["domain: edge\nrate_limit: {unit: minute, requests_per_unit: 100}\n"],
    ),
]
"""Of few parts, wherever one is taken."""


class RuleBody(Model):
    name: Name
    document: Annotated[Document, BeforeValidator(_of_few_parts)]
    priority: int = Field(100, ge=0, le=1_000_000, description="Lower comes first.")
    enabled: bool = True
    targeting: TargetingBody = Field(default_factory=lambda: TargetingBody(scope=None))


class EntryBody(Model):
    key: Annotated[str, Field(min_length=1, max_length=LONGEST_VALUE), AfterValidator(_is_text)]
    value: Annotated[str, Field(max_length=LONGEST_VALUE), AfterValidator(_is_text)] = ""


class DescriptorBody(Model):
    entries: Annotated[list[EntryBody], Field(min_length=1, max_length=MOST_ENTRIES)]


Sought = Annotated[str, Field(min_length=1, max_length=LONGEST_VALUE, pattern=r"^[^\x00]+$"), AfterValidator(_is_text)]
"""What is looked for in the database: not all of them can be asked for a NUL."""

Domain = Annotated[str, Field(min_length=1, max_length=LONGEST_VALUE), AfterValidator(_is_text)]
Descriptors = Annotated[list[DescriptorBody], Field(min_length=1, max_length=MOST_DESCRIPTORS)]


class Asked(Model):
    """What Envoy would ask: a domain, and descriptors of entries."""

    domain: Domain
    descriptors: Descriptors


class CheckBody(Asked):
    hits_addend: int = Field(1, ge=0, le=MAX_HITS, description="0 looks without counting.")


class ResetBody(Asked):
    penalty_only: bool = Field(False, description="Forget violations and cooldowns, and leave the limits as they are.")


class SimulatedRequest(CheckBody):
    at: Moment


def _unread(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    """To be looked at when its turn comes, since all at once would take too long."""
    return value


class SimulateBody(Model):
    requests: Annotated[
        list[Annotated[SimulatedRequest, WrapValidator(_unread)]], Field(min_length=1, max_length=MOST_SIMULATED)
    ]
    documents: Annotated[list[Document], Field(max_length=64), BeforeValidator(_of_few_parts)] | None = Field(
        None, description="Rules to try, in place of those in force."
    )
