"""Strict reader of one step of a test case.

{at: 1s, descriptor: {user: alice}, times: 3, every: 1s, hits: 2, expect: ok, remaining: 4, rule: demo.user}
{descriptors: [{user: alice}, {path: /}], hits: [1, 0], expect: over_limit, statuses: [{expect: ok}, {…}]}
{descriptor: {user: alice}, expect: {ok: 5, over_limit: 2}, delay: 10ms, state: warning, violations: 1}
{request: {path: /users/7, peer: 192.0.2.1}, expect: ok, statuses: [{…}, {…}]}
"""

from __future__ import annotations

from typing import NamedTuple

from ratelimit_rls.core.duration import parse_duration_us
from ratelimit_rls.core.model import MAX_HITS, Code, Descriptor, Entry, WarningState
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.simulation.case import NEVER_US, CaseStep, Expected
from ratelimit_rls.simulation.clock import parse_timestamp
from ratelimit_rls.simulation.request_step import read_descriptors
from ratelimit_rls.yaml.findings import Findings
from ratelimit_rls.yaml.nodes import YamlList, YamlMap, YamlNode, YamlScalar, excerpt
from ratelimit_rls.yaml.strict_mapping import StrictMapping, read_integer

_EXPECTATION_KEYS = ("remaining", "retry_after", "rule", "state", "violations")
_STATUS_KEYS = ("expect", *_EXPECTATION_KEYS)
_STEP_KEYS = (
    "at",
    "descriptor",
    "descriptors",
    "request",
    "times",
    "every",
    "hits",
    "refund",
    "expect",
    "delay",
    *_EXPECTATION_KEYS,
    "statuses",
)
MAX_TIMES = 100_000
"""Calls per step: about two seconds."""

_CODES = {"ok": Code.OK, "over_limit": Code.OVER_LIMIT}
_STATES = {state.name.lower(): state for state in WarningState}


class CaseContext(NamedTuple):
    """Values that a step takes from its test case."""

    start_us: int
    domain: str
    tree: Tree | None  # None: no rules or no domain, which was reported


def read_step(node: YamlNode, setting: CaseContext, before_us: int, found: Findings) -> CaseStep | None:
    """Read one step; None after an error. `before_us` is the time of the step above."""
    fields = StrictMapping(node, _STEP_KEYS, found)
    if not isinstance(node, YamlMap):
        return None
    at_us = fields.read("at", lambda text: _at(text, setting.start_us))
    passes, times = _expect(fields, found)
    descriptors = _descriptors(fields, setting, found)
    statuses = _statuses(fields, descriptors, found)
    if descriptors is None:
        return None
    return CaseStep(
        position=found.position(node),
        at_us=before_us if at_us is None else at_us,
        descriptors=descriptors,
        times=times,
        every_us=fields.read("every", parse_duration_us) or 0,
        passes=passes,
        statuses=statuses,
        delay_us=fields.read("delay", parse_duration_us),
    )


def _at(text: str, start_us: int) -> int:
    """Parse a timestamp, or a duration since the start."""
    try:
        return start_us + parse_duration_us(text)
    except ValueError:
        if "T" not in text:
            raise
    at_us = parse_timestamp(text)
    if at_us < start_us:
        raise ValueError("is before the start of the test")
    return at_us


def _expect(fields: StrictMapping, found: Findings) -> tuple[int, int]:
    """Return how many calls pass, and how many there are."""
    passes, times = _passes_of(fields, fields.integer("times", 1), found)
    if times > MAX_TIMES:
        found.error(fields.node, f"{times:,} times; at most {MAX_TIMES:,}, and 'hits' counts as many at once")
    return passes, times


def _passes_of(fields: StrictMapping, times: int | None, found: Findings) -> tuple[int, int]:
    node = fields.required("expect", "expect: ok")
    if isinstance(node, YamlMap):
        counts = StrictMapping(node, tuple(_CODES), found)
        passes, denied = counts.integer("ok", 0) or 0, counts.integer("over_limit", 0) or 0
        if times is not None and times != passes + denied:
            found.error(node, f"expect: {passes} ok and {denied} over_limit are {passes + denied}, not times: {times}")
        elif passes + denied == 0:
            found.error(node, "expect: there are no calls; write how many pass, e.g. {ok: 5, over_limit: 1}")
        return passes, passes + denied
    code = fields.choice("expect", _CODES)
    return (0 if code is Code.OVER_LIMIT else times or 1), times or 1


def _descriptors(fields: StrictMapping, setting: CaseContext, found: Findings) -> tuple[Descriptor, ...] | None:
    """Read the descriptors; None after an error. Only a request can result in none (an empty tuple)."""
    written = [key for key in ("descriptor", "descriptors", "request") if fields.has(key)]
    if len(written) != 1:
        found.error(
            fields.node,
            "a step has either 'descriptor: {user: alice}' or 'descriptors: [{…}, {…}]' "
            "or, for ext_authz, 'request: {path: /}'",
        )
        return None
    request = fields.value("request")
    if request is not None:
        for key in ("hits", "refund"):
            beside = fields.value(key)
            if beside is not None:
                found.error(
                    beside, f"'{key}' beside 'request'; the mapping, 'ext_authz' in the rules, defines the hits"
                )
        return read_descriptors(request, setting.domain, setting.tree, found)
    if fields.has("descriptors"):
        fields.required_list("descriptors", "descriptors: [{user: alice}, {path: /}]")
    one = fields.value("descriptor")
    nodes = (one,) if one is not None else fields.items("descriptors")
    hits = _hits(fields, len(nodes), found)
    refund = fields.boolean("refund")
    descriptors = tuple(
        Descriptor(_entries(node, found), hits=own, is_refund=refund) for node, own in zip(nodes, hits, strict=True)
    )
    return descriptors or None


def _entries(node: YamlNode, found: Findings) -> tuple[Entry, ...]:
    """Read the entries in the order written. A descriptor may have a key twice, so that is not an error here."""
    if not isinstance(node, YamlMap) or not node.pairs:
        found.error(node, f"{excerpt(node)} is not a descriptor; write its entries in order, e.g. {{user: alice}}")
        return ()
    entries: list[Entry] = []
    for key, value in node.fields():
        if isinstance(key, YamlScalar) and isinstance(value, YamlScalar):
            entries.append(Entry(key.text, value.text))
        else:
            found.error(value, f"{excerpt(value)} is not the value of an entry; must be text")
    return tuple(entries)


def _hits(fields: StrictMapping, descriptors: int, found: Findings) -> tuple[int | None, ...]:
    """Read the hits: one number for all descriptors, or one for each.

    They are set on the descriptor, where 0 is a peek; on the request 0 means 1.
    """
    node = fields.value("hits")
    if node is None:
        return (None,) * descriptors
    nodes = node.items if isinstance(node, YamlList) else (node,) * descriptors
    if len(nodes) != descriptors:
        found.error(
            node, f"hits: {len(nodes)} numbers for {descriptors} descriptors; write one for each, or one for all"
        )
        return (None,) * descriptors
    hits = tuple(read_integer(item, "hits", 0, found) for item in nodes)
    if any(number is not None and number > MAX_HITS for number in hits):
        found.error(node, f"hits: at most {MAX_HITS}")
    return hits


def _statuses(
    fields: StrictMapping, descriptors: tuple[Descriptor, ...] | None, found: Findings
) -> tuple[Expected, ...]:
    node = fields.value("statuses")
    here = [key for key in _EXPECTATION_KEYS if fields.has(key)]
    came = f" ({_describe(descriptors)})" if descriptors is not None and fields.has("request") else ""
    if node is None:
        if here and descriptors is not None and len(descriptors) != 1:
            found.error(
                fields.node, f"'{here[0]}' for which descriptor{came}? Write 'statuses: [{{…}}, {{…}}]', one for each"
            )
        return (_expected(fields),) if here else ()
    nodes = fields.items("statuses")
    if here:
        found.error(fields.node, f"'{here[0]}' beside 'statuses'; write it there")
    elif descriptors is not None and len(nodes) != len(descriptors):
        found.error(
            node, f"statuses: {len(nodes)} for {len(descriptors)} descriptors{came}; write one for each, or {{}}"
        )
    return tuple(_status(item, found) for item in nodes)


def _describe(descriptors: tuple[Descriptor, ...]) -> str:
    """Describe the descriptors that a request results in, which the test does not show."""
    descriptions = (", ".join(f"{key}={value}" for key, value in descriptor.entries) for descriptor in descriptors)
    return "; ".join(descriptions) or "this request has none"


def _status(node: YamlNode, found: Findings) -> Expected:
    fields = StrictMapping(node, _STATUS_KEYS, found)
    return _expected(fields, fields.choice("expect", _CODES))


def _expected(fields: StrictMapping, code: Code | None = None) -> Expected:
    rule = fields.text("rule")
    return Expected(
        code=code,
        remaining=fields.integer("remaining", 0),
        retry_us=fields.read("retry_after", lambda text: NEVER_US if text == "never" else parse_duration_us(text)),
        rule="" if rule == "none" else rule,
        state=fields.choice("state", _STATES),
        violations=fields.integer("violations", 0),
    )
