"""Whose limits hold: rules with `limits_of`, under the standing of those whom requests name.

    [user=alice]  ─►  rule {limits_of: user, 5 a minute}  ─►  alice, of tier gold: 100 a minute  ─►  100 a minute

The counter is alice's, whatever her limits are: they may change without forgetting what was counted. So a `tier` in
the same descriptor chooses limits for those whom nobody knows, and is no part of the counter's name.
"""

from __future__ import annotations

from typing import NamedTuple

from ratelimit_rls.core.model import Descriptor, Limit, Match, Refusal, Request, Rule, Subject
from ratelimit_rls.core.standing import Standing, Standings, can_be_refused, refusal_of

TIER = "tier"
"""The key of entries that name a tier."""

MOST_VARIANTS = 10_000
"""Rules with other people's limits that are remembered, so that those with the same limits share an outline."""


class Stood(NamedTuple):
    matches: tuple[Match, ...]
    standings: tuple[Standing, ...]  # those it was made from; none: no rule asked for any
    refusal: Refusal | None = None
    is_own: bool = False  # some limits are one caller's, and few requests share them


class Callers:
    """Under one tree."""

    def __init__(self, standings: Standings) -> None:
        self._standings = standings
        self._variants: dict[tuple[int, tuple[Limit, ...]], Rule] = {}

    def stand(self, request: Request, matches: tuple[Match, ...], blocked_status: int) -> Stood:
        if not any(found.rule is not None and found.rule.limits_of is not None for found in matches):
            return Stood(matches, ())
        stood: list[Match] = []
        standings: list[Standing] = []
        refusal: Refusal | None = None
        is_own = False
        for number, (descriptor, found) in enumerate(zip(request.descriptors, matches, strict=True)):
            rule = found.rule
            if rule is None or rule.limits_of is None:
                stood.append(found)
                continue
            standing = self._standing(rule.limits_of, descriptor)
            standings.append(standing)
            if standing.block is not None and refusal is None and can_be_refused(request, descriptor):
                refusal = refusal_of(standing.block, blocked_status, number)
            is_own = is_own or (standing.limits is not None and not standing.source.startswith(TIER))
            stood.append(self._with_limits(found, rule, standing.limits))
        return Stood(tuple(stood), tuple(standings), refusal, is_own)

    def _standing(self, kind: Subject, descriptor: Descriptor) -> Standing:
        tier = next((entry.value for entry in descriptor.entries if entry.key == TIER), "")
        return self._standings.of(kind, descriptor.entries[-1].value, tier)

    def _with_limits(self, found: Match, rule: Rule, limits: tuple[Limit, ...] | None) -> Match:
        entries = tuple([entry for entry in found.entries if entry.key != TIER]) or found.entries
        if limits is not None:
            rule = self._variant(rule, limits)
        return Match(rule, entries, found.metric_path)

    def _variant(self, rule: Rule, limits: tuple[Limit, ...]) -> Rule:
        # A rule is known by its identity, which lasts as long as the tree.
        key = id(rule), limits
        variant = self._variants.get(key)
        if variant is None:
            if len(self._variants) >= MOST_VARIANTS:
                self._variants.clear()
            variant = self._variants[key] = rule._replace(limits=limits)
        return variant
