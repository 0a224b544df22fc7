"""`explain`: which rule a descriptor meets and why it met no other, with the counter that would be charged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ratelimit_rls.cli.credentials import moment_words
from ratelimit_rls.cli.descriptor import descriptor_options, format_descriptor, parse_descriptors
from ratelimit_rls.cli.desk import at_desk, every_account
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.normal_form import deny_form, hot_form, penalty_form, style_form
from ratelimit_rls.cli.rules import compiled, sources_arguments
from ratelimit_rls.cli.words import deny_words, printable, rule_words, style_words
from ratelimit_rls.core.explain import Attempt, Explanation, Outcome
from ratelimit_rls.core.explain import explain as walk
from ratelimit_rls.core.model import Limit, Penalty, Plan, Request, Slot, Subject, Watcher
from ratelimit_rls.core.plan import Planner, Policy
from ratelimit_rls.core.span import format_span
from ratelimit_rls.core.standing import Standing

if TYPE_CHECKING:
    from ratelimit_rls.core.accounts import Accounts

_EXAMPLES = """\b
Examples:
  # why is alice limited, or why is she not?
  $ ratelimit-rls explain descriptors/ --domain edge --descriptor plan=free,user=alice
  # a value with a comma in it
  $ ratelimit-rls explain descriptors/ --domain edge --entry path=/a,b --entry user=alice"""

_LONGEST_OUTCOME = max(len(outcome.value) for outcome in Outcome)


@click.command(epilog=_EXAMPLES)
@sources_arguments
@descriptor_options
@click.option("--cache-key-prefix", default="", metavar="TEXT", help="As CACHE_KEY_PREFIX of the server.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text")
def explain(
    paths: tuple[Path, ...],
    merge_domains: bool,
    database: str,
    domain: str,
    descriptors: tuple[str, ...],
    entries: tuple[str, ...],
    cache_key_prefix: str,
    form: str,
) -> ExitCode:
    """Tell which rule a descriptor meets, and why no other.

    PATHS are rules files, or directories of them. If there is a database, its rules come before them, and whoever has
    limits of their own stands as it says. Several descriptors are taken as those of one request, where one may replace
    another's limit.
    """
    accounts = at_desk(database, every_account) if database else None
    tree = compiled(paths, merge_domains, accounts.rules if accounts else None).tree
    standings = _Standings(accounts) if accounts else None
    request = Request(domain, parse_descriptors(descriptors, entries))
    plan = Planner(tree, Policy(key_prefix=cache_key_prefix), standings).plan(request)
    planned = _planned(plan, standings.asked if standings else [])
    explained = [walk(tree, domain, descriptor) for descriptor in request.descriptors]
    pairs = zip(explained, planned, strict=True)
    if form == "json":
        is_mapped = domain in tree.mappings
        answer = [_json(told, descriptor) for told, descriptor in pairs]
        click.echo(json.dumps({"domain": domain, "ext_authz": is_mapped, "descriptors": answer}, indent=2))
    else:
        click.echo("\n\n".join("\n".join(_text(told, descriptor)) for told, descriptor in pairs))
    return ExitCode.DONE


class _Standings:
    """Everybody's, and those that were asked for."""

    def __init__(self, accounts: Accounts) -> None:
        from ratelimit_rls.identity.directory import Directory

        self._directory = Directory()
        self._directory.load(accounts)
        self.asked: list[Standing] = []

    def of(self, kind: Subject, subject: str, tier: str) -> Standing:
        self.asked.append(self._directory.of(kind, subject, tier))
        return self.asked[-1]


class _Planned(NamedTuple):
    """How one descriptor is answered, and from which states in the store."""

    slot: Slot
    standing: Standing | None  # of whoever the descriptor names, where the rule takes their limits and somebody knows
    is_refused: bool  # the whole request is, whatever the limits say, and nothing is counted
    counters: list[str]
    watchers: list[tuple[Watcher, str]]


def _planned(plan: Plan, standings: Sequence[Standing]) -> list[_Planned]:
    """`standings` are those that the plan was made from, in the order of its descriptors; none, without a database."""
    keys, asked = iter(plan.keys), iter(standings)
    return [
        _Planned(
            slot,
            next(asked, None) if slot.rule and slot.rule.limits_of else None,
            plan.outline.refusal is not None,
            [next(keys).decode() for _ in slot.steps],
            [(watcher, next(keys).decode()) for watcher in slot.watchers],
        )
        for slot in plan.outline.slots
    ]


def _replaced(planned: _Planned) -> list[str]:
    """The names of limits the descriptor met that another descriptor of the request sets aside."""
    slot = planned.slot
    if slot.rule is None or planned.is_refused:
        return []
    counted = {id(step.limit) for step in slot.steps}
    return [limit.name for limit in slot.rule.limits if id(limit) not in counted]


def _text(told: Explanation, planned: _Planned) -> Iterator[str]:
    domain = printable(told.domain)
    yield click.style(f"domain {domain} · descriptor ({format_descriptor(told.descriptor)})", bold=True)
    rows = [
        (printable(f"{'  ' * (depth + 1)}{level.entry.key}={level.entry.value}") if first else "", attempt)
        for depth, level in enumerate(told.levels)
        for first, attempt in ((attempt is level.attempts[0], attempt) for attempt in level.attempts)
    ]
    width = max((len(name) for name, _ in rows), default=0)
    tried_width = max((len(_tried(attempt)) for _, attempt in rows), default=0)
    for name, attempt in rows:
        yield f"{name:<{width}}  {_tried(attempt):<{tried_width}}  {_outcome(attempt)}"
    for level in told.levels:
        if level.met is not None:
            yield from (printable(f"in place of {place}") for place in level.met.overrode)
    yield printable(told.conclusion)
    rule = planned.slot.rule
    if planned.standing is not None:
        yield printable(_standing_words(planned.standing))
    if planned.is_refused:
        is_theirs = planned.standing is not None and planned.standing.block is not None
        whose = "" if is_theirs else " by another descriptor of this request"
        yield click.style(f"blocked{whose}: nothing passes, and nothing is counted", fg="red")
        return
    if rule is not None and rule.limits:
        yield f"limit {rule_words(rule)}"
        answered = ", ".join(filter(None, (style_words(rule.style), deny_words(rule.deny))))
        if answered:
            yield f"answer {answered}"
    for name in _replaced(planned):
        yield printable(f"not counted: another descriptor of this request replaces '{name}'")
    for key in planned.counters:
        yield printable(f"counter {key}")
    for watcher, key in planned.watchers:
        yield printable(f"{'penalty' if isinstance(watcher, Penalty) else 'warning'} {key}")


def _standing_words(standing: Standing) -> str:
    """e.g. `standing tier gold`, `standing override until 2026-08-06 08:46Z` or `standing block: spam`."""
    block = standing.block
    if block is not None:
        until = f" until {moment_words(block.until_s)}" if block.until_s is not None else ""
        return f"standing block{until}" + (f": {block.reason}" if block.reason else "")
    until = f" until {moment_words(standing.until_s)}" if standing.until_s < inf else ""
    return f"standing {standing.source or 'rule'}{until}"


def _tried(attempt: Attempt) -> str:
    return printable(f"{attempt.way.value} '{attempt.pattern}'" if attempt.pattern else attempt.way.value)


def _outcome(attempt: Attempt) -> str:
    color = {Outcome.MET: "green", Outcome.NOT_TRIED: "yellow"}.get(attempt.outcome)
    told = click.style(attempt.outcome.value, fg=color)
    padding = " " * (_LONGEST_OUTCOME - len(attempt.outcome.value))
    return f"{told}{padding}  {printable(str(attempt.position))}" if attempt.position else told


def _json(told: Explanation, planned: _Planned) -> dict[str, Any]:
    rule = planned.slot.rule
    return {
        "descriptor": [list(entry) for entry in told.descriptor.entries],
        "conclusion": told.conclusion,
        "rule": rule.path if rule else None,
        "standing": _standing(planned.standing) if planned.standing else None,
        "refused": planned.is_refused,
        "limits": [_limit(limit) for limit in rule.limits] if rule else [],
        "max_delay": format_span(rule.max_delay_us) if rule and rule.max_delay_us else None,
        "penalty": penalty_form(rule.penalty) if rule and rule.penalty else None,
        "warn_at": rule.warn_at.permille / 1000 if rule and rule.warn_at else None,
        "hot": hot_form(rule.hot) if rule and rule.hot else None,
        "on_store_failure": rule.on_store_failure.value if rule and rule.on_store_failure else None,
        "answer": style_form(rule.style) if rule else None,
        "deny": deny_form(rule.deny) if rule and rule.deny else None,
        "replaced": _replaced(planned),
        "storage_keys": planned.counters,
        "watcher_keys": [key for _, key in planned.watchers],
        "levels": [
            {"entry": list(level.entry), "attempts": [_attempt(attempt) for attempt in level.attempts]}
            for level in told.levels
        ],
    }


def _standing(standing: Standing) -> dict[str, Any]:
    """Of whoever is blocked, the limits are those that wait."""
    block = standing.block
    return {
        "source": standing.source or "rule",
        "until_s": standing.until_s if standing.until_s < inf else None,
        "blocked": block is not None,
        "block": {"reason": block.reason, "until_s": block.until_s} if block else None,
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
        "overrode": [str(place) for place in attempt.overrode],
    }
