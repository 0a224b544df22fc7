"""`answer` to the style in which a domain or a rule is told of."""

from __future__ import annotations

from ratelimit_rls.core.span import span_within
from ratelimit_rls.core.style import AnswerStyle, Family
from ratelimit_rls.rules import offences
from ratelimit_rls.rules.fields import Fields
from ratelimit_rls.rules.grammar import Findings
from ratelimit_rls.rules.node import YamlNode, YamlScalar, excerpt
from ratelimit_rls.rules.written import Written

ANSWER_KEYS = ("headers", "retry_jitter")

_JITTER = span_within(0, 3_600_000_000)
_FAMILIES = {family.value: family for family in Family}


def compile_style(written: Written[YamlNode] | None, found: Findings) -> AnswerStyle | None:
    """None without one."""
    if written is None:
        return None
    fields = Fields(written.value, ANSWER_KEYS, found)
    headers = _families(fields, found) if fields.has("headers") else None
    return AnswerStyle(headers, fields.read("retry_jitter", _JITTER) or 0)


def _families(fields: Fields, found: Findings) -> tuple[Family, ...]:
    families: list[Family] = []
    # Of one more than there are, one is wrong: no need to tell the same of a hundred thousand others.
    for item in fields.items("headers")[: len(_FAMILIES) + 1]:
        family = _FAMILIES.get(item.text) if isinstance(item, YamlScalar) else None
        if family is None:
            found.error(item, offences.unknown_family(excerpt(item), _FAMILIES))
        elif family in families:
            found.error(item, offences.family_twice(family))
        else:
            if {family, *families} >= {Family.LEGACY, Family.LEGACY_EPOCH}:
                found.error(item, offences.two_resets())
            families.append(family)
    return tuple(families)
