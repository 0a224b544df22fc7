"""`peek`: how a descriptor stands now, from the counters in Redis. Nothing is spent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ratelimit_rls.cli.counters import Paths, Where, settings_with, where_options, with_redis
from ratelimit_rls.cli.descriptor import descriptor_options, format_descriptor, parse_descriptors
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.rules import load, rules_arguments
from ratelimit_rls.cli.words import limit_words, printable, wait_words
from ratelimit_rls.core.decide import decide
from ratelimit_rls.core.model import Answer, Descriptor, Plan, Purpose, Reading, Request, Status
from ratelimit_rls.core.plan import Planner, Policy
from ratelimit_rls.errors import StoreError

if TYPE_CHECKING:
    from ratelimit_rls.store.redis.new import InRedis

_EXAMPLES = """\b
Examples:
  # what is left for alice, and is she in a cooldown?
  $ ratelimit-rls peek descriptors/ --redis-url localhost:6379 --domain edge --descriptor user=alice"""


@click.command(epilog=_EXAMPLES)
@rules_arguments
@descriptor_options
@where_options
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text")
def peek(
    paths: Paths,
    merge_domains: bool,
    domain: str,
    descriptors: tuple[str, ...],
    entries: tuple[str, ...],
    form: str,
    **where: Where,
) -> ExitCode:
    """Tell how a descriptor stands now: what is left of each limit, cooldowns, warnings.

    PATHS are the rules of the server. The counters are looked at in Redis, and nothing is spent. Where Redis is, the
    server's own variables say, too: in brackets those that have a flag here.
    """
    settings = settings_with(where)
    tree = load(paths, merge_domains).tree
    request = Request(domain, parse_descriptors(descriptors, entries), purpose=Purpose.LOOK)

    plan = Planner(tree, Policy(key_prefix=settings.cache_key_prefix)).plan(request)
    decision = decide(plan.outline, with_redis(settings, partial(_look, plan)) if plan.keys else None)
    told = list(zip(request.descriptors, decision.statuses, strict=True))
    if form == "json":
        click.echo(json.dumps([_json(descriptor, status) for descriptor, status in told], indent=2))
    else:
        click.echo("\n".join(line for descriptor, status in told for line in _text(descriptor, status)))
    return ExitCode.DONE


async def _look(plan: Plan, store: InRedis) -> Answer:
    """Past the service, which has other answers where the store has none."""
    (answer,) = await store.spend([store.prepare(plan)])
    if isinstance(answer, StoreError):
        raise answer
    return answer


def _text(descriptor: Descriptor, status: Status) -> Iterator[str]:
    yield click.style(format_descriptor(descriptor), bold=True)
    if status.step is None:
        yield "  unlimited" if status.slot.unlimited else "  no limit applies"
        return
    assert status.slot.rule is not None
    yield f"  rule {printable(status.slot.rule.path)}"
    for step, reading in zip(status.slot.steps, status.readings, strict=True):
        yield f"  {limit_words(step.limit)}: {_limit_words(reading)}"
    if status.violations:
        until = f", in a cooldown for {wait_words(status.cooldown.retry_us)}" if status.cooldown else ""
        yield f"  penalty: {status.violations} violation{'s' * (status.violations != 1)} of late{until}"
    if status.state is not None:
        yield f"  state: {status.state.name.lower()}"


def _limit_words(reading: Reading) -> str:
    words = f"{reading.left} left"
    if reading.retry_us > 0:
        words += f", the next one passes in {wait_words(reading.retry_us)}"
    return f"{words}, unused again in {wait_words(reading.reset_us)}" if reading.reset_us else words


def _json(descriptor: Descriptor, status: Status) -> dict[str, Any]:
    rule = status.slot.rule
    return {
        "descriptor": [list(entry) for entry in descriptor.entries],
        "rule": rule.path if rule else None,
        "unlimited": status.slot.unlimited,
        "limits": [
            {"limit": limit_words(step.limit), **reading._asdict()}
            for step, reading in zip(status.slot.steps, status.readings, strict=True)
        ],
        "violations": status.violations,
        "cooldown_us": status.cooldown.retry_us if status.cooldown else 0,
        "state": status.state.name.lower() if status.state is not None else None,
    }
