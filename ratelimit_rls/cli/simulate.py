"""`simulate`: what rules would have done to traffic, told before they do it."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.rules import load, rules_arguments
from ratelimit_rls.cli.simulated import text_of
from ratelimit_rls.errors import SettingsError

if TYPE_CHECKING:
    from ratelimit_rls.core.tree import Tree
    from ratelimit_rls.trial.mapping import Mapping
    from ratelimit_rls.trial.replay import Replay
    from ratelimit_rls.trial.traffic import Phase, Traffic

_EXAMPLES = """\b
Examples:
  # yesterday's traffic: what would the new rules refuse that the old ones let pass?
  $ ratelimit-rls simulate new/ --against old/ --traffic access.log --domain edge --descriptor user=%x_user%
  # ten callers with 50 requests a second for five minutes, as a picture
  $ ratelimit-rls simulate new/ --rate 50/s --for 5m --callers 10 --domain edge --descriptor user=%caller% \\
      --picture out.svg"""

PROGRESS_PAUSE_S = 0.2

_RATE = re.compile(r"(\d+)/(s|second|m|minute|h|hour|d|day)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class _Span(click.ParamType[int]):
    name = "DURATION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from ratelimit_rls.core.span import parse_span

        try:
            span_us = parse_span(value)
        except ValueError as fault:
            self.fail(f"{value!r} {fault}", param, ctx)
        return span_us if span_us else self.fail(f"{value!r} is nothing", param, ctx)


class _Picture(click.Path):
    """What it holds is SVG, so that is what its name says: programs go by it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        if not str(path).lower().endswith(".svg"):
            self.fail(f"{value!r} does not end in .svg, and nothing else can be drawn", param, ctx)
        return path


@click.command(epilog=_EXAMPLES)
@rules_arguments
@click.option("--against", type=click.Path(exists=True, path_type=Path), help="Other rules, to compare with.")
@click.option(
    "--traffic", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="JSON lines or .csv; .gz."
)
@click.option("--rate", "rates", multiple=True, metavar="N/s", help="In place of it, so many requests (/s, /m, /h);")
@click.option("--for", "lengths", multiple=True, type=_Span(), help="for so long. Repeat both for the next phase.")
@click.option(
    "--callers", type=click.IntRange(1), default=1, metavar="N", help="With --rate: %caller% goes from 0 to N-1."
)
@click.option("--start", metavar="MOMENT", help="With --rate: when it begins.  [default: 2024-01-01T00:00:00Z]")
@click.option("--domain", metavar="TEXT", help="With %field% of the traffic in it.  [default: %domain%]")
@click.option("--descriptor", "descriptors", multiple=True, metavar="KEY=TEXT,…", help="Likewise; repeat for several.")
@click.option("--hits", metavar="TEXT", help="Likewise.  [default: %hits%, or 1]")
@click.option("--time", "time_field", metavar="FIELD", help="Field with the moment.  [default: start_time; CSV: time]")
@click.option("--strict", is_flag=True, help="Stop at the first bad line.")
@click.option("--bucket", "bucket_us", type=_Span(), help="Of counts over time, at least.")
@click.option("--picture", type=_Picture(dir_okay=False, path_type=Path), help="Draw them as SVG.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text")
def simulate(paths: tuple[Path, ...], merge_domains: bool, against: Path | None, form: str, **options: Any) -> ExitCode:
    """Replay traffic against rules, on a clock of its own.

    PATHS are rules files, or directories of them. docs/testing.md tells how fields of the traffic become descriptors.
    """
    trees = [(" ".join(map(str, paths)), load(paths, merge_domains).tree)]
    if against is not None:
        trees.append((str(against), load((against,), merge_domains).tree))
    from ratelimit_rls.trial.mapping import DEFAULT_DOMAIN, DEFAULT_HITS, Mapping

    mapping = Mapping(options["domain"] or DEFAULT_DOMAIN, options["descriptors"], options["hits"] or DEFAULT_HITS)
    traffic = _traffic(mapping, **options)
    told, replay, why_none = _run(trees, traffic, mapping, options["bucket_us"])
    if options["picture"] is not None:
        _draw(options["picture"], replay)
    click.echo(json.dumps(told, indent=2) if form == "json" else "\n".join(text_of(told)))
    if why_none is None:
        return ExitCode.DONE
    click.echo(f"Error: nothing was replayed: {why_none}", err=True)
    return ExitCode.BAD


def _traffic(
    mapping: Mapping,
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
    from ratelimit_rls.trial.moments import START_US, parse_moment
    from ratelimit_rls.trial.traffic import LogTraffic, ProfileTraffic

    if (traffic is None) == (not rates):
        raise click.UsageError("give either --traffic FILE, or --rate 50/s --for 5m")
    if traffic is not None:
        return LogTraffic(traffic, mapping, time_field=time_field, strict=strict)
    if len(rates) != len(lengths):
        raise click.UsageError("each --rate needs its --for")
    try:
        start_us = START_US if start is None else parse_moment(start)
    except ValueError as fault:
        raise click.UsageError(f"--start {start!r} {fault}") from fault
    phases = [_phase(rate, length_us) for rate, length_us in zip(rates, lengths, strict=True)]
    return ProfileTraffic(phases, mapping, callers=callers, start_us=start_us)


def _phase(rate: str, length_us: int) -> Phase:
    from fractions import Fraction

    from ratelimit_rls.trial.traffic import Phase

    found = _RATE.fullmatch(rate)
    if found is None or not int(found[1]):
        raise click.UsageError(f"--rate {rate!r} is no rate; use e.g. 50/s, 3000/m or 10000/h")
    return Phase(Fraction(int(found[1]), _SECONDS[found[2][0]]), length_us)


def _run(
    trees: list[tuple[str, Tree]], traffic: Traffic, mapping: Mapping, bucket_us: int | None
) -> tuple[dict[str, Any], Replay, str | None]:
    """What there is to tell, and if nothing was replayed, why."""
    from ratelimit_rls.trial.absent import Absent
    from ratelimit_rls.trial.order import InOrder
    from ratelimit_rls.trial.replay import Replay
    from ratelimit_rls.trial.report import report

    replay = Replay(trees, mapping, traffic.bad, bucket_us)
    in_order = InOrder(traffic)
    absent = Absent(in_order, mapping)
    began = time.monotonic()
    progress, clear = _progress(traffic, began)
    try:
        replay.run(absent, progress)
    finally:
        clear()
    told = {**report(replay, traffic, in_order), "took_s": round(time.monotonic() - began, 3)}
    return told, replay, None if replay.calls else absent.why_nothing(traffic.bad)


def _progress(traffic: Traffic, began: float) -> tuple[Callable[[int], None], Callable[[], None]]:
    """One line on stderr, if a person is looking, with the rate and how long it will take; and how to remove it."""
    if not sys.stderr.isatty():
        return lambda calls: None, lambda: None
    shown = began

    def show(calls: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown < PROGRESS_PAUSE_S:
            return
        shown = now
        rate, part = calls / (now - began), traffic.part_read
        left = f", {part:.0%}, {(now - began) * (1 - part) / part:.0f} s left" if part else ""
        click.echo(f"\r{calls:,} requests, {rate:,.0f} a second{left}\x1b[K", nl=False, err=True)

    return show, lambda: click.echo("\r\x1b[K", nl=False, err=True)


def _draw(path: Path, replay: Replay) -> None:
    from ratelimit_rls.trial.picture import Panel, draw

    try:
        path.write_text(draw([Panel(one.name, one.tally) for one in replay.outcomes]), encoding="utf-8")
    except OSError as fault:
        raise SettingsError(f"--picture {path} cannot be written: {fault.strerror}") from fault
