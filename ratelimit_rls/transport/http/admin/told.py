"""Decisions, walks and simulations as the API shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field

from ratelimit_rls.core.accounts import limit_fields
from ratelimit_rls.core.model import Code, Decision, Descriptor, Reading, Refusal, Slot, Status, Step, Subject
from ratelimit_rls.transport.http.admin.moments import optional_moment
from ratelimit_rls.transport.http.admin.shown import Fields, MomentText, Shown, ShownBlock, fields

if TYPE_CHECKING:
    from ratelimit_rls.core.explain import Attempt, Explanation, LevelWalked
    from ratelimit_rls.core.standing import Standing

_US = 1_000_000


class ShownEntry(Shown):
    key: str
    value: str


class ToldLimit(Shown):
    """A limit and how it stands."""

    limit: dict[str, Any]
    remaining: int = Field(description="How many more pass now; negative is debt.")
    retry_after_s: float | None = Field(description="When the next one passes; null: never. 0: now.")
    reset_after_s: float = Field(description="When it is as if never used.")

    @classmethod
    def of(cls, step: Step, reading: Reading) -> Self:
        retry_us = reading.retry_us
        return cls(
            limit=limit_fields(step.limit),
            remaining=reading.left,
            retry_after_s=None if retry_us == -1 else max(0, retry_us) / _US,
            reset_after_s=reading.reset_us / _US,
        )


class ToldDescriptor(Shown):
    entries: list[ShownEntry]
    code: str = Field(description="ok or over_limit.")
    rule: str | None = Field(description="null: no limit applies.")
    unlimited: bool
    limits: list[ToldLimit]
    violations: int = Field(description="Of late, where the rule has a penalty.")
    cooldown_s: float
    state: str | None = Field(description="normal, warning or throttled, where the rule has warn_at.")

    @classmethod
    def of(cls, descriptor: Descriptor, status: Status) -> Self:
        slot = status.slot
        readings = status.readings or ((status.reading,) if status.reading else ())
        return cls(
            entries=entries(descriptor),
            code=code_word(status.code),
            rule=slot.rule.path if slot.rule else None,
            unlimited=slot.unlimited,
            limits=[ToldLimit.of(*pair) for pair in zip(slot.steps, readings, strict=False)],
            violations=status.violations,
            cooldown_s=status.cooldown.retry_us / _US if status.cooldown else 0,
            state=status.state.name.lower() if status.state is not None else None,
        )


class ToldBlock(Shown):
    reason: str = Field(description="blocked, or unauthorized: a credential is not valid.")
    until: MomentText | None

    @classmethod
    def of(cls, refusal: Refusal | None) -> Self | None:
        return cls(reason=refusal.reason, until=optional_moment(refusal.until_s)) if refusal else None


class ToldDecision(Shown):
    code: str = Field(description="ok or over_limit.")
    descriptors: list[ToldDescriptor]
    wait_s: float = Field(description="How long the answer would be held (`action: throttle`).")
    refused: ToldBlock | None = Field(description="Whatever the limits say, the caller is refused.")
    without_store: str | None = Field(description="What was done instead, if the store did not answer.")

    @classmethod
    def of(cls, descriptors: Sequence[Descriptor], decision: Decision) -> Self:
        return cls(
            code=code_word(decision.code),
            descriptors=[ToldDescriptor.of(*pair) for pair in zip(descriptors, decision.statuses, strict=True)],
            wait_s=decision.wait_us / _US,
            refused=ToldBlock.of(decision.outline.refusal),
            without_store=decision.without_store.value if decision.without_store else None,
        )


class ToldAttempt(Shown):
    way: str
    pattern: str
    outcome: str
    position: str | None
    overrode: list[str] = Field(description="What weaker sources say of it, and is left out.")

    @classmethod
    def of(cls, attempt: Attempt) -> Self:
        return cls(
            way=attempt.way.value,
            pattern=attempt.pattern,
            outcome=attempt.outcome.value,
            position=str(attempt.position) if attempt.position else None,
            overrode=[str(position) for position in attempt.overrode],
        )


class ToldLevel(Shown):
    entry: ShownEntry
    attempts: list[ToldAttempt]

    @classmethod
    def of(cls, level: LevelWalked) -> Self:
        return cls(
            entry=ShownEntry(key=level.entry.key, value=level.entry.value),
            attempts=[ToldAttempt.of(attempt) for attempt in level.attempts],
        )


class ToldStanding(Shown):
    """Of the user or key whose limits the rule takes."""

    limits_of: str
    source: str = Field(description="Whose limits they are: override, custom, tier <name>, or rule.")
    blocked: bool = Field(description="Nothing passes, whatever the limits are.")
    block: ShownBlock | None

    @classmethod
    def of(cls, limits_of: Subject, standing: Standing, unblocked: Standing) -> Self:
        return cls(
            limits_of=limits_of.value,
            source=unblocked.source or "rule",
            blocked=standing.block is not None,
            block=ShownBlock.of(standing.block) if standing.block else None,
        )


class ToldWalk(Shown):
    entries: list[ShownEntry]
    conclusion: str
    rule: str | None
    position: str | None
    limits: Fields = Field(description="Of whoever is named, or the rule's. Of a blocked caller: once it is not.")
    standing: ToldStanding | None
    counters: list[str] = Field(description="The keys of its states in the store.")
    levels: list[ToldLevel]

    @classmethod
    def of(cls, walk: Explanation, slot: Slot, keys: Sequence[bytes], standing: ToldStanding | None) -> Self:
        rule = slot.rule
        is_blocked = standing is not None and standing.blocked
        return cls(
            entries=entries(walk.descriptor),
            conclusion=f"{walk.conclusion}; blocked: nothing passes" if is_blocked else walk.conclusion,
            rule=rule.path if rule else None,
            position=str(rule.position) if rule and rule.position else None,
            limits=fields(rule.limits) if rule else [],
            standing=standing,
            counters=[key.decode() for key in keys],
            levels=[ToldLevel.of(level) for level in walk.levels],
        )


class ToldExplanation(Shown):
    domain: str
    refused: ToldBlock | None = Field(description="Whatever the limits say, the caller is refused.")
    descriptors: list[ToldWalk]


class Forgotten(Shown):
    counters: list[str] = Field(description="The keys of the states that were forgotten, or in a dry run would be.")
    looked_for: int


class SimulatedRule(Shown):
    rule: str
    calls: int
    refused: int


class Simulated(Shown):
    calls: int
    admitted: int
    refused: int
    results: list[str] = Field(description="ok or over_limit, for each request as they were given.")
    per_rule: list[SimulatedRule]


def code_word(code: Code) -> str:
    return code.name.lower()


def entries(descriptor: Descriptor) -> list[ShownEntry]:
    return [ShownEntry(key=entry.key, value=entry.value) for entry in descriptor.entries]
