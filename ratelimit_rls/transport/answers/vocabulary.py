"""What the limits of one kind of call are called: worked out once per outline, and only if a header or a body asks."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from ratelimit_rls.core.model import Limit, Outline, Slot, Step
from ratelimit_rls.transport.answers import structured
from ratelimit_rls.transport.answers.words import limit_names, rule_path, window_labels


class Policies(NamedTuple):
    """The limits of a call that can refuse it, as RateLimit and RateLimit-Policy name them."""

    names: dict[int, str]  # by the identity of the step
    strings: dict[int, str]  # the same as a Structured Field's strings
    field: str  # RateLimit-Policy: it does not depend on the moment


class Vocabulary:
    def __init__(self, outline: Outline) -> None:
        # Not the outline itself: this is kept for as long as the outline is, and must not be what keeps it.
        self._domain, self._slots = outline.domain, outline.slots
        self._labels: dict[int, tuple[str, ...]] = {}

    def labels(self, slot: Slot) -> tuple[str, ...]:
        """Of the windows of a descriptor's limits, in the order of its steps."""
        labels = self._labels.get(id(slot))
        if labels is None:
            labels = self._labels[id(slot)] = window_labels([step.limit for step in slot.steps])
        return labels

    @cached_property
    def policies(self) -> Policies:
        steps: list[Step] = []
        limits: list[tuple[str, Limit]] = []
        for slot in self._slots:
            for step in slot.steps:
                if slot.rule is not None and not step.shadow_mode:
                    steps.append(step)
                    limits.append((rule_path(self._domain, slot.rule), step.limit))
        names = limit_names(limits)
        strings = [structured.string(name) for name in names]
        return Policies(
            names={id(step): name for step, name in zip(steps, names, strict=True)},
            strings={id(step): string for step, string in zip(steps, strings, strict=True)},
            field=structured.policy_field(zip(strings, (step.limit for step in steps), strict=True)),
        )
