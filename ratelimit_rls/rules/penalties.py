"""Compile `penalty` and `warn_at`, which monitor the limits of a descriptor."""

from __future__ import annotations

from ratelimit_rls.core.duration import duration_parser
from ratelimit_rls.core.model import Penalty, WarnAt
from ratelimit_rls.rules import diagnostics
from ratelimit_rls.rules.positioned_fields import Positioned
from ratelimit_rls.yaml.findings import Findings
from ratelimit_rls.yaml.nodes import YamlList, YamlNode, YamlScalar, excerpt
from ratelimit_rls.yaml.scalars import ScalarKind
from ratelimit_rls.yaml.strict_mapping import StrictMapping, read_integer

PENALTY_KEYS = ("within", "after", "multipliers")

_SECOND_US = 1_000_000
_DAY_US = 86_400 * _SECOND_US
_WITHIN = duration_parser(_SECOND_US, 30 * _DAY_US)
_DEFAULT = Penalty(within_us=3600 * _SECOND_US, after=3, multipliers=(1, 2, 4, 8))


def compile_penalty(written: Positioned[YamlNode] | None, found: Findings) -> Penalty | None:
    """Return the compiled penalty; None if `penalty` is absent or invalid."""
    if written is None:
        return None
    errors_before = len(found.errors)
    fields = StrictMapping(written.value, PENALTY_KEYS, found)
    within_us = fields.read("within", _WITHIN)
    after = fields.integer("after", 1)
    if after is not None and after > diagnostics.MAX_VIOLATIONS:
        found.error(fields.value("after") or written.position, diagnostics.too_many_violations(after))
    multipliers = _multipliers(fields, found)
    if len(found.errors) > errors_before:
        return None
    penalty = Penalty(within_us or _DEFAULT.within_us, after or _DEFAULT.after, multipliers or _DEFAULT.multipliers)
    if penalty.after + len(penalty.multipliers) > diagnostics.MAX_VIOLATIONS:
        found.error(written.position, diagnostics.penalty_too_long(penalty))
        return None
    return penalty


def _multipliers(fields: StrictMapping, found: Findings) -> tuple[int, ...]:
    node = fields.value("multipliers")
    if node is None:
        return ()
    items = fields.items("multipliers")
    multipliers = [
        multiplier for item in items if (multiplier := read_integer(item, "multipliers", 1, found)) is not None
    ]
    if isinstance(node, YamlList) and not 1 <= len(items) <= diagnostics.MAX_MULTIPLIERS:
        found.error(node, diagnostics.bad_multiplier_count(len(items)))
    elif max(multipliers, default=1) > diagnostics.MAX_PENALTY_MULTIPLIER:
        found.error(node, diagnostics.multiplier_too_large(max(multipliers)))
    elif multipliers != sorted(multipliers):
        found.error(node, diagnostics.decreasing_multipliers())
    return tuple(multipliers)


def compile_warn_at(written: Positioned[YamlNode] | None, found: Findings) -> WarnAt | None:
    """Return the compiled threshold; None if `warn_at` is absent or invalid. The only float in rules."""
    if written is None:
        return None
    node = written.value
    if isinstance(node, YamlScalar) and node.kind is ScalarKind.FLOAT and isinstance(node.value, float):
        permille = round(node.value * 1000) if 0 < node.value < 1 else 0
        if 100 < permille < 1000 and abs(node.value * 1000 - permille) < 1e-9:
            return WarnAt(permille)
    found.error(node, diagnostics.bad_warn_at(excerpt(node)))
    return None
