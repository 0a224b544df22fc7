"""`explain`: which rule a descriptor meets and why it met no other, with the counter that would be charged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from ratelimit_rls.cli.descriptor import descriptor_options, format_descriptor, parse_descriptors
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.rules import load, rules_arguments
from ratelimit_rls.cli.words import rule_words
from ratelimit_rls.core.explain import Attempt, Explanation, Outcome
from ratelimit_rls.core.explain import explain as walk
from ratelimit_rls.core.model import Limit, Plan, Request, Slot
from ratelimit_rls.core.plan import Planner, Policy

_EXAMPLES = """\b
Examples:
  # why is alice limited, or why is she not?
  $ ratelimit-rls explain descriptors/ --domain edge --descriptor plan=free,user=alice
  # a value with a comma in it
  $ ratelimit-rls explain descriptors/ --domain edge --entry path=/a,b --entry user=alice"""

_LONGEST_OUTCOME = max(len(outcome.value) for outcome in Outcome)


@click.command(epilog=_EXAMPLES)
@rules_arguments
@descriptor_options
@click.option("--cache-key-prefix", default="", metavar="TEXT", help="As CACHE_KEY_PREFIX of the server.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text")
def explain(
    paths: tuple[Path, ...],
    merge_domains: bool,
    domain: str,
    descriptors: tuple[str, ...],
    entries: tuple[str, ...],
    cache_key_prefix: str,
    form: str,
) -> ExitCode:
    """Tell which rule a descriptor meets, and why no other.

    PATHS are rules files, or directories of them. Several descriptors are taken as those of one request, where one may
    replace another's limit.
    """
    tree = load(paths, merge_domains).tree
    request = Request(domain, parse_descriptors(descriptors, entries))
    planned = _slots_and_keys(Planner(tree, Policy(key_prefix=cache_key_prefix)).plan(request))
    explained = [walk(tree, domain, descriptor) for descriptor in request.descriptors]
    if form == "json":
        answer = [_json(told, slot, keys) for told, (slot, keys) in zip(explained, planned, strict=True)]
        click.echo(json.dumps({"domain": domain, "descriptors": answer}, indent=2))
    else:
        pairs = zip(explained, planned, strict=True)
        click.echo("\n\n".join("\n".join(_text(told, slot, keys)) for told, (slot, keys) in pairs))
    return ExitCode.DONE


def _slots_and_keys(planned: Plan) -> list[tuple[Slot, list[str]]]:
    """How each descriptor is answered, and from which counters."""
    keys = iter(planned.keys)
    return [(slot, [next(keys).decode() for _ in slot.steps]) for slot in planned.outline.slots]


def _replaced(slot: Slot) -> list[str]:
    """The names of limits the descriptor met that another descriptor of the request sets aside."""
    counted = {id(step.limit) for step in slot.steps}
    return [limit.name for limit in slot.rule.limits if id(limit) not in counted] if slot.rule else []


def _text(told: Explanation, slot: Slot, keys: list[str]) -> Iterator[str]:
    yield click.style(f"domain {told.domain} · descriptor ({format_descriptor(told.descriptor)})", bold=True)
    rows = [
        (f"{'  ' * (depth + 1)}{level.entry.key}={level.entry.value}" if first else "", attempt)
        for depth, level in enumerate(told.levels)
        for first, attempt in ((attempt is level.attempts[0], attempt) for attempt in level.attempts)
    ]
    width = max((len(name) for name, _ in rows), default=0)
    tried_width = max((len(_tried(attempt)) for _, attempt in rows), default=0)
    for name, attempt in rows:
        yield f"{name:<{width}}  {_tried(attempt):<{tried_width}}  {_outcome(attempt)}"
    yield told.conclusion
    rule = slot.rule
    if rule is not None and rule.limits:
        yield f"limit {rule_words(rule)}"
    for name in _replaced(slot):
        yield f"not counted: another descriptor of this request replaces '{name}'"
    for key in keys:
        yield f"counter {key}"


def _tried(attempt: Attempt) -> str:
    return f"{attempt.way.value} '{attempt.pattern}'" if attempt.pattern else attempt.way.value


def _outcome(attempt: Attempt) -> str:
    color = {Outcome.MET: "green", Outcome.NOT_TRIED: "yellow"}.get(attempt.outcome)
    told = click.style(attempt.outcome.value, fg=color)
    padding = " " * (_LONGEST_OUTCOME - len(attempt.outcome.value))
    return f"{told}{padding}  {attempt.position}" if attempt.position else told


def _json(told: Explanation, slot: Slot, keys: list[str]) -> dict[str, Any]:
    rule = slot.rule
    return {
        "descriptor": [list(entry) for entry in told.descriptor.entries],
        "conclusion": told.conclusion,
        "rule": rule.path if rule else None,
        "limits": [_limit(limit) for limit in rule.limits] if rule else [],
        "replaced": _replaced(slot),
        "storage_keys": keys,
        "levels": [
            {"entry": list(level.entry), "attempts": [_attempt(attempt) for attempt in level.attempts]}
            for level in told.levels
        ],
    }


def _limit(limit: Limit) -> dict[str, Any]:
    return {
        "requests_per_unit": limit.requests_per_unit,
        "unit": limit.unit.name.lower(),
        "unit_multiplier": limit.unit_multiplier,
        "timezone": limit.timezone or None,
        "algorithm": limit.algorithm.value,
        "burst": limit.burst,
        "name": limit.name,
    }


def _attempt(attempt: Attempt) -> dict[str, Any]:
    return {
        "way": attempt.way.value,
        "pattern": attempt.pattern,
        "outcome": attempt.outcome.value,
        "position": str(attempt.position) if attempt.position else None,
    }
