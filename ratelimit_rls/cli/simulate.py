"""`simulate`: replay traffic against rules before deploying them."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ratelimit_rls.cli.duration_option import DurationType
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.rules_arguments import load_rules, rules_arguments
from ratelimit_rls.cli.simulate_report import format_report
from ratelimit_rls.errors import SettingsError

if TYPE_CHECKING:
    from ratelimit_rls.core.tree import Tree
    from ratelimit_rls.simulation.field_mapping import FieldMapping
    from ratelimit_rls.simulation.replay import Replay
    from ratelimit_rls.simulation.traffic import Traffic, TrafficPhase

_EXAMPLES = """\b
Examples:
  # yesterday's traffic: which requests would the new rules deny that the old ones admitted?
  $ ratelimit-rls simulate new/ --against old/ --traffic access.log --domain edge --descriptor user=%x_user%
  # ten callers, together 50 requests per second for five minutes, drawn as SVG
  $ ratelimit-rls simulate new/ --rate 50/s --for 5m --callers 10 --domain edge --descriptor user=%caller% \\
      --picture out.svg"""

PROGRESS_INTERVAL_S = 0.2

_RATE = re.compile(r"(\d+)/(s|second|m|minute|h|hour|d|day)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class _SvgPath(click.Path):
    """Path of an SVG file. The name must end in .svg, since programs go by the extension."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        if not str(path).lower().endswith(".svg"):
            self.fail(f"{value!r} must end in .svg, the only supported format", param, ctx)
        return path


@click.command(epilog=_EXAMPLES)
@rules_arguments
@click.option(
    "--against",
    type=click.Path(exists=True, path_type=Path),
    help="Rules file or directory to compare the result with.",
)
@click.option(
    "--traffic",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Traffic to replay: JSON lines or CSV (.csv), optionally compressed (.gz).",
)
@click.option(
    "--rate",
    "rates",
    multiple=True,
    metavar="N/s",
    help="Generate N requests per s, m, h or d instead of --traffic. Repeat with --for for further phases.",
)
@click.option(
    "--for",
    "lengths",
    multiple=True,
    type=DurationType(),
    help="Duration of the phase of the corresponding --rate, e.g. 90s or 1h30m.",
)
@click.option(
    "--callers",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="With --rate: number of callers; %caller% goes from 0 to N-1.",
)
@click.option(
    "--start", metavar="TIME", help="With --rate: time of the first request.  [default: 2024-01-01T00:00:00Z]"
)
@click.option(
    "--domain", metavar="TEXT", help="Domain of each request; %field% is a field of the traffic.  [default: %domain%]"
)
@click.option(
    "--descriptor",
    "descriptors",
    multiple=True,
    metavar="KEY=TEXT,…",
    help="Descriptor of each request, with %field%s. May be repeated.",
)
@click.option("--hits", metavar="TEXT", help="Hits of each request, a number or %field%.  [default: %hits%, or 1]")
@click.option(
    "--time",
    "time_field",
    metavar="FIELD",
    help="Field with the time of the request.  [default: start_time; CSV: time]",
)
@click.option("--strict", is_flag=True, help="Fail at the first invalid line of the traffic.")
@click.option(
    "--bucket",
    "bucket_us",
    type=DurationType(),
    help="Minimum width of the buckets of the counts over time.  "
    "[default: 100ms; wider if there would be more than 240]",
)
@click.option(
    "--picture", type=_SvgPath(dir_okay=False, path_type=Path), help="Draw the counts over time to this SVG file."
)
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output format."
)
def simulate(paths: tuple[Path, ...], merge_domains: bool, against: Path | None, form: str, **options: Any) -> ExitCode:
    """Replay traffic against rules, on a virtual clock.

    PATHS are rules files, or directories of rules files. docs/testing.md describes how fields of the traffic become
    descriptors.
    """
    trees = [(" ".join(map(str, paths)), load_rules(paths, merge_domains).tree)]
    if against is not None:
        trees.append((str(against), load_rules((against,), merge_domains).tree))
    from ratelimit_rls.simulation.field_mapping import DEFAULT_DOMAIN, DEFAULT_HITS, FieldMapping

    mapping = FieldMapping(options["domain"] or DEFAULT_DOMAIN, options["descriptors"], options["hits"] or DEFAULT_HITS)
    traffic = _traffic(mapping, **options)
    report_fields, replay, reason = _run(trees, traffic, mapping, options["bucket_us"])
    if options["picture"] is not None:
        _draw(options["picture"], replay)
    click.echo(json.dumps(report_fields, indent=2) if form == "json" else "\n".join(format_report(report_fields)))
    if reason is None:
        return ExitCode.DONE
    click.echo(f"Error: nothing was replayed: {reason}", err=True)
    return ExitCode.BAD


def _traffic(
    mapping: FieldMapping,
    *,
    traffic: Path | None,
    rates: tuple[str, ...],
    lengths: tuple[int, ...],
    callers: int,
    start: str | None,
    time_field: str | None,
    strict: bool,
    **_: Any,
) -> Traffic:
    from ratelimit_rls.simulation.clock import DEFAULT_START_US, parse_timestamp
    from ratelimit_rls.simulation.traffic import LogTraffic, ProfileTraffic

    if (traffic is None) == (not rates):
        raise click.UsageError("give either --traffic FILE, or --rate 50/s --for 5m")
    if traffic is not None:
        return LogTraffic(traffic, mapping, time_field=time_field, strict=strict)
    if len(rates) != len(lengths):
        raise click.UsageError("--rate and --for must be given equally often")
    try:
        start_us = DEFAULT_START_US if start is None else parse_timestamp(start)
    except ValueError as error:
        raise click.UsageError(f"--start {start!r} {error}") from error
    phases = [_phase(rate, length_us) for rate, length_us in zip(rates, lengths, strict=True)]
    return ProfileTraffic(phases, mapping, callers=callers, start_us=start_us)


def _phase(rate: str, length_us: int) -> TrafficPhase:
    from fractions import Fraction

    from ratelimit_rls.simulation.traffic import TrafficPhase

    found = _RATE.fullmatch(rate)
    if found is None or not int(found[1]):
        raise click.UsageError(f"--rate {rate!r} must be N/s, N/m, N/h or N/d with N ≥ 1, e.g. 50/s or 3000/m")
    return TrafficPhase(Fraction(int(found[1]), _SECONDS[found[2][0]]), length_us)


def _run(
    trees: list[tuple[str, Tree]], traffic: Traffic, mapping: FieldMapping, bucket_us: int | None
) -> tuple[dict[str, Any], Replay, str | None]:
    """Replay and return the report, the replay, and the reason if nothing was replayed, else None."""
    from ratelimit_rls.simulation.missing_fields import MissingFields
    from ratelimit_rls.simulation.reorder import ReorderBuffer
    from ratelimit_rls.simulation.replay import Replay
    from ratelimit_rls.simulation.report import report

    replay = Replay(trees, mapping, traffic.invalid, bucket_us)
    in_order = ReorderBuffer(traffic)
    absent = MissingFields(in_order, mapping)
    began = time.monotonic()
    progress, clear = _progress(traffic, began)
    try:
        replay.run(absent, progress)
    finally:
        clear()
    report_fields = {**report(replay, traffic, in_order), "took_s": round(time.monotonic() - began, 3)}
    return report_fields, replay, None if replay.calls else absent.explain_no_requests(traffic.invalid)


def _progress(traffic: Traffic, began: float) -> tuple[Callable[[int], None], Callable[[], None]]:
    """Return functions to show and to clear the progress line on stderr; both do nothing unless it is a terminal."""
    if not sys.stderr.isatty():
        return lambda calls: None, lambda: None
    displayed_at = began

    def show(calls: int) -> None:
        nonlocal displayed_at
        now = time.monotonic()
        if now - displayed_at < PROGRESS_INTERVAL_S:
            return
        displayed_at = now
        rate, part = calls / (now - began), traffic.part_read
        left = f", {part:.0%}, {(now - began) * (1 - part) / part:.0f} s left" if part else ""
        click.echo(f"\r{calls:,} requests, {rate:,.0f} a second{left}\x1b[K", nl=False, err=True)

    return show, lambda: click.echo("\r\x1b[K", nl=False, err=True)


def _draw(path: Path, replay: Replay) -> None:
    from ratelimit_rls.simulation.svg import Panel, draw

    try:
        path.write_text(draw([Panel(one.name, one.tally) for one in replay.outcomes]), encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--picture {path} cannot be written: {error.strerror}") from error
