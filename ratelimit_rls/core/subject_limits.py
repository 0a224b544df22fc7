"""Rules with `limits_of`: replace the limits of a rule by those of the subject that the request names.

    [user=alice]  ─►  rule {limits_of: user, 5/minute}  ─►  alice has tier gold: 100/minute  ─►  100/minute

The counter belongs to alice whatever her limits are, so limits may change without losing what was counted. A `tier`
in the same descriptor selects limits for unknown subjects and is not part of the counter's key.
"""

from __future__ import annotations

from typing import NamedTuple

from ratelimit_rls.common.bounded_cache import BoundedCache
from ratelimit_rls.core.entitlements import Entitlement, Entitlements, block_rejection, can_be_rejected
from ratelimit_rls.core.model import Descriptor, Limit, Match, Rejection, Request, Rule, Subject

TIER = "tier"
"""Key of the descriptor entry that names a tier."""

MAX_VARIANTS = 10_000
"""Maximum cached variants of rules with limits of subjects. Equal limits share a variant, and so a plan template."""


class AppliedLimits(NamedTuple):
    matches: tuple[Match, ...]
    entitlements: tuple[Entitlement, ...]  # the entitlements used; empty: no rule has `limits_of`
    rejection: Rejection | None = None
    is_own: bool = False  # some limits belong to one subject, so few requests share them


class SubjectLimits:
    """Applies entitlements to the matches of one rules tree."""

    def __init__(self, entitlements: Entitlements) -> None:
        self._entitlements = entitlements
        self._variants = BoundedCache[tuple[int, tuple[Limit, ...]], Rule](MAX_VARIANTS)

    def apply(self, request: Request, matches: tuple[Match, ...], blocked_status: int) -> AppliedLimits:
        if not any(found.rule is not None and found.rule.limits_of is not None for found in matches):
            return AppliedLimits(matches, ())
        applied: list[Match] = []
        entitlements: list[Entitlement] = []
        rejection: Rejection | None = None
        is_own = False
        for number, (descriptor, found) in enumerate(zip(request.descriptors, matches, strict=True)):
            rule = found.rule
            if rule is None or rule.limits_of is None:
                applied.append(found)
                continue
            entitlement = self._entitlement(rule.limits_of, descriptor)
            entitlements.append(entitlement)
            if entitlement.block is not None and rejection is None and can_be_rejected(request, descriptor):
                rejection = block_rejection(entitlement.block, blocked_status, number)
            is_own = is_own or (entitlement.limits is not None and not entitlement.source.startswith(TIER))
            applied.append(self._with_limits(found, rule, entitlement.limits))
        return AppliedLimits(tuple(applied), tuple(entitlements), rejection, is_own)

    def _entitlement(self, kind: Subject, descriptor: Descriptor) -> Entitlement:
        tier = next((entry.value for entry in descriptor.entries if entry.key == TIER), "")
        return self._entitlements.of(kind, descriptor.entries[-1].value, tier)

    def _with_limits(self, found: Match, rule: Rule, limits: tuple[Limit, ...] | None) -> Match:
        entries = tuple([entry for entry in found.entries if entry.key != TIER]) or found.entries
        if limits is not None:
            rule = self._variant(rule, limits)
        return Match(rule, entries, found.metric_path)

    def _variant(self, rule: Rule, limits: tuple[Limit, ...]) -> Rule:
        # Rules are compared by identity, which is stable as long as the tree.
        key = id(rule), limits
        variant = self._variants.get(key)
        if variant is None:
            variant = rule._replace(limits=limits)
            self._variants.put(key, variant)
        return variant
