"""`peek`: show the current state of a descriptor's counters in Redis, without spending hits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ratelimit_rls.cli.canonical_yaml import location_fields
from ratelimit_rls.cli.descriptor_options import descriptor_options, format_descriptor, parse_descriptors
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.formatting import escape_unprintable, format_limit, format_location, format_wait
from ratelimit_rls.cli.redis_options import (
    OptionValue,
    Paths,
    redis_connection_options,
    settings_from_options,
    with_redis,
)
from ratelimit_rls.cli.rules_arguments import load_rules, rules_arguments
from ratelimit_rls.core.call_split import key_ranges
from ratelimit_rls.core.decision import decision_of
from ratelimit_rls.core.model import Descriptor, Plan, Purpose, Reading, Request, Status, StoreResult
from ratelimit_rls.core.plan import Planner, Policy
from ratelimit_rls.core.storage_keys import Location
from ratelimit_rls.errors import StoreError

if TYPE_CHECKING:
    from ratelimit_rls.store.redis.factory import AnyRedisStore

_EXAMPLES = """\b
Examples:
  # how many hits has alice left, and is she in a cooldown?
  $ ratelimit-rls peek descriptors/ --redis-url localhost:6379 --domain edge --descriptor user=alice"""


@click.command(epilog=_EXAMPLES, short_help="Show the current state of a descriptor in Redis.")
@rules_arguments
@descriptor_options
@redis_connection_options
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output format."
)
def peek(
    paths: Paths,
    merge_domains: bool,
    domain: str,
    descriptors: tuple[str, ...],
    entries: tuple[str, ...],
    form: str,
    **where: OptionValue,
) -> ExitCode:
    """Show the current state of a descriptor: hits left of each limit, cooldowns, warnings.

    PATHS are the rules of the server. The counters are read from Redis, and no hits are spent. The connection to Redis
    can also be configured with the server's environment variables, shown in brackets.
    """
    settings = settings_from_options(where)
    tree = load_rules(paths, merge_domains).tree
    request = Request(domain, parse_descriptors(descriptors, entries), purpose=Purpose.LOOK)

    plan = Planner(tree, Policy(key_prefix=settings.cache_key_prefix)).plan(request)
    result, locations = with_redis(settings, partial(_read_counters, plan)) if plan.keys else (None, [])
    decision = decision_of(plan.template, result)
    # All counters of a descriptor are in one place.
    places = [locations[numbers.start] if numbers else None for numbers in key_ranges(plan.template.descriptor_plans)]
    results = list(zip(request.descriptors, decision.statuses, places, strict=True))
    if form == "json":
        click.echo(json.dumps([_json(*result) for result in results], indent=2))
    else:
        click.echo("\n".join(line for result in results for line in _text(*result)))
    return ExitCode.DONE


async def _read_counters(plan: Plan, store: AnyRedisStore) -> tuple[StoreResult, list[Location]]:
    """Read the counters and their places.

    They are read from the store directly: the service would fall back to other decisions if the store fails.
    """
    (result,) = await store.spend([store.prepare(plan)])
    if isinstance(result, StoreError):
        raise result
    return result, store.locations(plan)


def _text(descriptor: Descriptor, status: Status, place: Location | None) -> Iterator[str]:
    yield click.style(format_descriptor(descriptor), bold=True)
    if status.step is None:
        yield "  unlimited" if status.descriptor_plan.unlimited else "  no limit applies"
        return
    assert status.descriptor_plan.rule is not None
    yield f"  rule {escape_unprintable(status.descriptor_plan.rule.path)}"
    if place is not None and place.slot is not None:
        yield f"  {format_location(place)}"
    for step, reading in zip(status.descriptor_plan.steps, status.readings, strict=True):
        yield f"  {format_limit(step.limit)}: {_format_limit_state(reading)}"
    if status.violations:
        until = f", in a cooldown for {format_wait(status.cooldown.retry_us)}" if status.cooldown else ""
        yield f"  penalty: {status.violations} recent violation{'s' * (status.violations != 1)}{until}"
    if status.state is not None:
        yield f"  state: {status.state.name.lower()}"


def _format_limit_state(reading: Reading) -> str:
    text = f"{reading.left} left"
    if reading.retry_us > 0:
        text += f", the next one passes in {format_wait(reading.retry_us)}"
    return f"{text}, unused again in {format_wait(reading.reset_us)}" if reading.reset_us else text


def _json(descriptor: Descriptor, status: Status, place: Location | None) -> dict[str, Any]:
    rule = status.descriptor_plan.rule
    return {
        "descriptor": [list(entry) for entry in descriptor.entries],
        "rule": rule.path if rule else None,
        "unlimited": status.descriptor_plan.unlimited,
        **location_fields(place or Location(None)),
        "limits": [
            {"limit": format_limit(step.limit), **reading._asdict()}
            for step, reading in zip(status.descriptor_plan.steps, status.readings, strict=True)
        ],
        "violations": status.violations,
        "cooldown_us": status.cooldown.retry_us if status.cooldown else 0,
        "state": status.state.name.lower() if status.state is not None else None,
    }
