"""`penalty` and `warn_at` to what watches how a descriptor's limits fare."""

from __future__ import annotations

from ratelimit_rls.core.model import Penalty, WarnAt
from ratelimit_rls.core.span import span_within
from ratelimit_rls.rules import offences
from ratelimit_rls.rules.fields import Fields, whole
from ratelimit_rls.rules.grammar import Findings
from ratelimit_rls.rules.node import YamlList, YamlNode, YamlScalar, excerpt
from ratelimit_rls.rules.scalars import Kind
from ratelimit_rls.rules.written import Written

PENALTY_KEYS = ("within", "after", "multipliers")

_SECOND_US = 1_000_000
_DAY_US = 86_400 * _SECOND_US
_WITHIN = span_within(_SECOND_US, 30 * _DAY_US)
_DEFAULT = Penalty(within_us=3600 * _SECOND_US, after=3, multipliers=(1, 2, 4, 8))


def compile_penalty(written: Written[YamlNode] | None, found: Findings) -> Penalty | None:
    """None without one, and after an error."""
    if written is None:
        return None
    errors_before = len(found.errors)
    fields = Fields(written.value, PENALTY_KEYS, found)
    within_us = fields.read("within", _WITHIN)
    after = fields.whole("after", 1)
    if after is not None and after > offences.MOST_VIOLATIONS:
        found.error(fields.value("after") or written.position, offences.too_many_violations(after))
    multipliers = _multipliers(fields, found)
    if len(found.errors) > errors_before:
        return None
    penalty = Penalty(within_us or _DEFAULT.within_us, after or _DEFAULT.after, multipliers or _DEFAULT.multipliers)
    if penalty.after + len(penalty.multipliers) > offences.MOST_VIOLATIONS:
        found.error(written.position, offences.penalty_too_long(penalty))
        return None
    return penalty


def _multipliers(fields: Fields, found: Findings) -> tuple[int, ...]:
    node = fields.value("multipliers")
    if node is None:
        return ()
    items = fields.items("multipliers")
    multipliers = [multiplier for item in items if (multiplier := whole(item, "multipliers", 1, found)) is not None]
    if isinstance(node, YamlList) and not 1 <= len(items) <= offences.MOST_MULTIPLIERS:
        found.error(node, offences.not_so_many_multipliers(len(items)))
    elif max(multipliers, default=1) > offences.LARGEST_PENALTY:
        found.error(node, offences.multiplier_too_large(max(multipliers)))
    elif multipliers != sorted(multipliers):
        found.error(node, offences.multipliers_fall())
    return tuple(multipliers)


def compile_warn_at(written: Written[YamlNode] | None, found: Findings) -> WarnAt | None:
    """None without one, and after an error. The one place in rules that takes a float."""
    if written is None:
        return None
    node = written.value
    if isinstance(node, YamlScalar) and node.kind is Kind.FLOAT and isinstance(node.value, float):
        permille = round(node.value * 1000) if 0 < node.value < 1 else 0
        if 100 < permille < 1000 and abs(node.value * 1000 - permille) < 1e-9:
            return WarnAt(permille)
    found.error(node, offences.bad_warn_at(excerpt(node)))
    return None
