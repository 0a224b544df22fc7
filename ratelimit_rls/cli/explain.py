"""`explain`: show which rule a descriptor matches, why others do not match, and which counters it charges."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ratelimit_rls.cli.canonical_yaml import (
    deny_fields,
    lease_fields,
    location_fields,
    penalty_fields,
    response_policy_fields,
)
from ratelimit_rls.cli.credential_options import format_timestamp
from ratelimit_rls.cli.database_options import all_accounts, with_repository
from ratelimit_rls.cli.descriptor_options import descriptor_options, format_descriptor, parse_descriptors
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.formatting import (
    escape_unprintable,
    format_deny,
    format_location,
    format_response_policy,
    format_rule,
)
from ratelimit_rls.cli.redis_options import (
    OptionValue,
    redis_connection_options,
    settings_from_options,
    with_redis,
)
from ratelimit_rls.cli.rules_arguments import compile_sources, sources_arguments
from ratelimit_rls.core.duration import format_duration_us
from ratelimit_rls.core.entitlements import Entitlement
from ratelimit_rls.core.explain import Attempt, AttemptOutcome, Explanation
from ratelimit_rls.core.explain import explain as walk
from ratelimit_rls.core.model import DescriptorPlan, Limit, Penalty, Plan, Request, Subject, Watcher
from ratelimit_rls.core.plan import Planner, Policy
from ratelimit_rls.core.storage_keys import Location, key_slot

if TYPE_CHECKING:
    from ratelimit_rls.database.configuration import Configuration
    from ratelimit_rls.store.redis.factory import AnyRedisStore

_EXAMPLES = """\b
Examples:
  # why is alice limited, or why not?
  $ ratelimit-rls explain descriptors/ --domain edge --descriptor plan=free,user=alice
  # a value that contains a comma
  $ ratelimit-rls explain descriptors/ --domain edge --entry path=/a,b --entry user=alice"""

_OUTCOME_WIDTH = max(len(outcome.value) for outcome in AttemptOutcome)


@click.command(epilog=_EXAMPLES, short_help="Show which rule a descriptor matches, and why.")
@sources_arguments
@descriptor_options
@redis_connection_options
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output format."
)
def explain(
    paths: tuple[Path, ...],
    merge_domains: bool,
    database: str,
    domain: str,
    descriptors: tuple[str, ...],
    entries: tuple[str, ...],
    form: str,
    **where: OptionValue,
) -> ExitCode:
    """Show which rule a descriptor matches, and why the others do not match.

    PATHS are rules files, or directories of rules files. With --database, the stored rules take precedence over them,
    and users, tiers, overrides and blocks are taken into account. Several descriptors form one request, in which one
    may replace the limit of another. Each counter is shown with its hash slot on a Redis Cluster and, if --redis-url is
    given, with the node that has it.
    """
    accounts = with_repository(database, all_accounts) if database else None
    tree = compile_sources(paths, merge_domains, accounts.rules if accounts else None).tree
    entitlements = _RecordingEntitlements(accounts) if accounts else None
    request = Request(domain, parse_descriptors(descriptors, entries))
    plan = Planner(tree, Policy(key_prefix=str(where["cache_key_prefix"] or "")), entitlements).plan(request)
    locations = _locations(plan, where)
    planned = _planned_descriptors(plan, locations, entitlements.looked_up if entitlements else [])
    explained = [walk(tree, domain, descriptor) for descriptor in request.descriptors]
    pairs = zip(explained, planned, strict=True)
    if form == "json":
        is_mapped = domain in tree.mappings
        answer = [_json(explanation, descriptor) for explanation, descriptor in pairs]
        click.echo(json.dumps({"domain": domain, "ext_authz": is_mapped, "descriptors": answer}, indent=2))
    else:
        click.echo("\n\n".join("\n".join(_text(explanation, descriptor)) for explanation, descriptor in pairs))
    return ExitCode.DONE


def _locations(plan: Plan, where: dict[str, OptionValue]) -> list[Location]:
    """Return the slot of each counter, with its node if the options name a Redis."""
    if where["redis_url"] is None:
        return [Location(key_slot(key)) for key in plan.keys]

    async def locate(store: AnyRedisStore) -> list[Location]:
        return store.locations(plan)

    return with_redis(settings_from_options(where), locate)


class _RecordingEntitlements:
    """The entitlements of all accounts; records which ones the planner looked up."""

    def __init__(self, accounts: Configuration) -> None:
        from ratelimit_rls.identity.directory import Directory

        self._directory = Directory()
        self._directory.load(accounts)
        self.looked_up: list[Entitlement] = []

    def of(self, kind: Subject, subject: str, tier: str) -> Entitlement:
        self.looked_up.append(self._directory.of(kind, subject, tier))
        return self.looked_up[-1]


class _PlannedDescriptor(NamedTuple):
    """One descriptor of the plan, with its counters in the store."""

    descriptor_plan: DescriptorPlan
    entitlement: Entitlement | None  # of the descriptor's subject; None without limits_of or a database
    is_rejected: bool  # the whole request is rejected, whatever the limits are, and nothing is counted
    counters: list[_Counter]
    watchers: list[tuple[Watcher, _Counter]]


class _Counter(NamedTuple):
    key: str
    location: Location

    def __str__(self) -> str:
        return "  ".join(filter(None, (escape_unprintable(self.key), format_location(self.location))))


def _planned_descriptors(
    plan: Plan, locations: Sequence[Location], entitlements: Sequence[Entitlement]
) -> list[_PlannedDescriptor]:
    """Pair each descriptor with its counters.

    The entitlements are in the order of the descriptors; none without a database.
    """
    counters = (_Counter(key.decode(), location) for key, location in zip(plan.keys, locations, strict=True))
    looked_up = iter(entitlements)
    return [
        _PlannedDescriptor(
            descriptor_plan,
            next(looked_up, None) if descriptor_plan.rule and descriptor_plan.rule.limits_of else None,
            plan.template.rejection is not None,
            [next(counters) for _ in descriptor_plan.steps],
            [(watcher, next(counters)) for watcher in descriptor_plan.watchers],
        )
        for descriptor_plan in plan.template.descriptor_plans
    ]


def _replaced(planned: _PlannedDescriptor) -> list[str]:
    """Return the names of matched limits that another descriptor of the request replaces."""
    descriptor_plan = planned.descriptor_plan
    if descriptor_plan.rule is None or planned.is_rejected:
        return []
    counted = {id(step.limit) for step in descriptor_plan.steps}
    return [limit.name for limit in descriptor_plan.rule.limits if id(limit) not in counted]


def _text(explanation: Explanation, planned: _PlannedDescriptor) -> Iterator[str]:
    domain = escape_unprintable(explanation.domain)
    yield click.style(f"domain {domain} · descriptor ({format_descriptor(explanation.descriptor)})", bold=True)
    rows = [
        (escape_unprintable(f"{'  ' * (depth + 1)}{level.entry.key}={level.entry.value}") if first else "", attempt)
        for depth, level in enumerate(explanation.levels)
        for first, attempt in ((attempt is level.attempts[0], attempt) for attempt in level.attempts)
    ]
    width = max((len(name) for name, _ in rows), default=0)
    attempt_width = max((len(_format_attempt(attempt)) for _, attempt in rows), default=0)
    for name, attempt in rows:
        yield f"{name:<{width}}  {_format_attempt(attempt):<{attempt_width}}  {_outcome(attempt)}"
    for level in explanation.levels:
        if level.matched is not None:
            yield from (escape_unprintable(f"in place of {place}") for place in level.matched.overrode)
    yield escape_unprintable(explanation.conclusion)
    rule = planned.descriptor_plan.rule
    if planned.entitlement is not None:
        yield escape_unprintable(_format_entitlement(planned.entitlement))
    if planned.is_rejected:
        is_own_block = planned.entitlement is not None and planned.entitlement.block is not None
        cause = "" if is_own_block else " by another descriptor of this request"
        yield click.style(f"blocked{cause}: nothing passes, and nothing is counted", fg="red")
        return
    if rule is not None and rule.limits:
        yield f"limit {format_rule(rule)}"
        response = ", ".join(filter(None, (format_response_policy(rule.response_policy), format_deny(rule.deny))))
        if response:
            yield f"answer {response}"
    for name in _replaced(planned):
        yield escape_unprintable(f"not counted: another descriptor of this request replaces '{name}'")
    for counter in planned.counters:
        yield f"counter {counter}"
    for watcher, counter in planned.watchers:
        yield f"{'penalty' if isinstance(watcher, Penalty) else 'warning'} {counter}"


def _format_entitlement(entitlement: Entitlement) -> str:
    """Format e.g. `entitlement tier gold`, `entitlement override until 2026-08-06 08:46Z` or `entitlement block`."""
    block = entitlement.block
    if block is not None:
        until = f" until {format_timestamp(block.until_s)}" if block.until_s is not None else ""
        return f"entitlement block{until}" + (f": {block.reason}" if block.reason else "")
    until = f" until {format_timestamp(entitlement.until_s)}" if entitlement.until_s < inf else ""
    return f"entitlement {entitlement.source or 'rule'}{until}"


def _format_attempt(attempt: Attempt) -> str:
    return escape_unprintable(f"{attempt.kind.value} '{attempt.pattern}'" if attempt.pattern else attempt.kind.value)


def _outcome(attempt: Attempt) -> str:
    color = {AttemptOutcome.MATCHED: "green", AttemptOutcome.NOT_TRIED: "yellow"}.get(attempt.outcome)
    label = click.style(attempt.outcome.value, fg=color)
    padding = " " * (_OUTCOME_WIDTH - len(attempt.outcome.value))
    return f"{label}{padding}  {escape_unprintable(str(attempt.position))}" if attempt.position else label


def _json(explanation: Explanation, planned: _PlannedDescriptor) -> dict[str, Any]:
    rule = planned.descriptor_plan.rule
    return {
        "descriptor": [list(entry) for entry in explanation.descriptor.entries],
        "conclusion": explanation.conclusion,
        "rule": rule.path if rule else None,
        "entitlement": _entitlement_fields(planned.entitlement) if planned.entitlement else None,
        "rejected": planned.is_rejected,
        "limits": [_limit(limit) for limit in rule.limits] if rule else [],
        "max_delay": format_duration_us(rule.max_delay_us) if rule and rule.max_delay_us else None,
        "penalty": penalty_fields(rule.penalty) if rule and rule.penalty else None,
        "warn_at": rule.warn_at.permille / 1000 if rule and rule.warn_at else None,
        "hot": lease_fields(rule.hot) if rule and rule.hot else None,
        "on_store_failure": rule.on_store_failure.value if rule and rule.on_store_failure else None,
        "answer": response_policy_fields(rule.response_policy) if rule else None,
        "deny": deny_fields(rule.deny) if rule and rule.deny else None,
        "replaced": _replaced(planned),
        "storage_keys": [counter.key for counter in planned.counters],
        "watcher_keys": [counter.key for _, counter in planned.watchers],
        "locations": {
            counter.key: location_fields(counter.location)
            for counter in (*planned.counters, *(counter for _, counter in planned.watchers))
        },
        "levels": [
            {"entry": list(level.entry), "attempts": [_attempt(attempt) for attempt in level.attempts]}
            for level in explanation.levels
        ],
    }


def _entitlement_fields(entitlement: Entitlement) -> dict[str, Any]:
    """Return the entitlement as JSON. For a blocked subject the limits are those that apply once the block ends."""
    block = entitlement.block
    return {
        "source": entitlement.source or "rule",
        "until_s": entitlement.until_s if entitlement.until_s < inf else None,
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
        "kind": attempt.kind.value,
        "pattern": attempt.pattern,
        "outcome": attempt.outcome.value,
        "position": str(attempt.position) if attempt.position else None,
        "overrode": [str(place) for place in attempt.overrode],
    }
