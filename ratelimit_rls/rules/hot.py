"""`hot` to how long hits taken in advance may be held."""

from __future__ import annotations

from collections.abc import Iterable

from ratelimit_rls.core.model import Hot, Limit
from ratelimit_rls.core.span import span_within
from ratelimit_rls.rules import offences
from ratelimit_rls.rules.fields import Fields
from ratelimit_rls.rules.grammar import Findings
from ratelimit_rls.rules.node import YamlNode
from ratelimit_rls.rules.written import Written

HOT_KEYS = ("lease",)

_LEASE = span_within(1_000, 10_000_000)


def compile_hot(written: Written[YamlNode] | None, limits: Iterable[Limit], found: Findings) -> Hot | None:
    """None without one, and after an error."""
    if written is None:
        return None
    errors_before = len(found.errors)
    fields = Fields(written.value, HOT_KEYS, found, refused={"split": offences.no_split()})
    lease_us = fields.read("lease", _LEASE)
    if len(found.errors) > errors_before:  # a key that is not `lease` may have been meant for it
        return None
    node = fields.required("lease", "lease: 100ms")
    if node is None or lease_us is None:
        return None
    shortest_us = min((limit.window_us for limit in limits), default=2 * lease_us)
    if shortest_us < 2 * lease_us:
        found.error(node, offences.lease_too_long(lease_us, shortest_us))
    return Hot(lease_us)
