"""Names of the limits of one plan template, computed once and only if a header or body uses them."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from ratelimit_rls.api.responses import ratelimit_fields
from ratelimit_rls.api.responses.formatting import limit_names, rule_path, window_labels
from ratelimit_rls.core.model import DescriptorPlan, Limit, PlanTemplate, Step
from ratelimit_rls.core.plan import per_template


class PolicyNames(NamedTuple):
    """Names in RateLimit and RateLimit-Policy of the limits that can deny a call."""

    names: dict[int, str]  # by the id() of the step
    strings: dict[int, str]  # the same as Structured Field strings
    field: str  # value of RateLimit-Policy, which does not depend on time


class LimitLabels:
    """Cached names of the limits of one plan template."""

    def __init__(self, template: PlanTemplate) -> None:
        # No reference to the template itself: this object lives as long as the template, and must not keep it alive.
        self._domain, self._descriptor_plans = template.domain, template.descriptor_plans
        self._labels: dict[int, tuple[str, ...]] = {}

    def labels(self, descriptor_plan: DescriptorPlan) -> tuple[str, ...]:
        """Return the window labels of a descriptor's limits, in the order of its steps."""
        labels = self._labels.get(id(descriptor_plan))
        if labels is None:
            labels = self._labels[id(descriptor_plan)] = window_labels([step.limit for step in descriptor_plan.steps])
        return labels

    @cached_property
    def policies(self) -> PolicyNames:
        steps: list[Step] = []
        limits: list[tuple[str, Limit]] = []
        for descriptor_plan in self._descriptor_plans:
            for step in descriptor_plan.steps:
                if descriptor_plan.rule is not None and not step.shadow_mode:
                    steps.append(step)
                    limits.append((rule_path(self._domain, descriptor_plan.rule), step.limit))
        names = limit_names(limits)
        strings = [ratelimit_fields.string(name) for name in names]
        return PolicyNames(
            names={id(step): name for step, name in zip(steps, names, strict=True)},
            strings={id(step): string for step, string in zip(steps, strings, strict=True)},
            field=ratelimit_fields.policy_field(zip(strings, (step.limit for step in steps), strict=True)),
        )


limit_labels = per_template(LimitLabels)
