"""`usage`: who calls most, by the record in the database."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ratelimit_rls.cli.desk import database_option, with_records
from ratelimit_rls.cli.exit_codes import ExitCode
from ratelimit_rls.cli.words import printable
from ratelimit_rls.core.span import format_span, parse_span
from ratelimit_rls.errors import SettingsError

if TYPE_CHECKING:
    from ratelimit_rls.records.database import Database
    from ratelimit_rls.records.usage import By, Point, Use

_EXAMPLES = """\b
Examples:
  # who called most in the last day, and how many of their calls were refused
  $ ratelimit-rls usage
  # the rules of one domain in the last 30 days, as a picture, too
  $ ratelimit-rls usage --by rule --domain edge --since 30d --picture rules.svg"""

_WAYS = ("user", "rule", "endpoint", "domain", "region")
_DAYS = re.compile(r"(\d{1,4})d")
_DAY_US = 86_400_000_000
_EACH_US = (("minute", 60_000_000), ("hour", 3_600_000_000), ("day", _DAY_US))
_MOST_BARS = 240
_FIGURES = "{:>14}  {:>14}  {:>7}  {:>10}"
_WIDEST_NAME = 60


class _Since(click.ParamType[int]):
    name = "DURATION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        days = _DAYS.fullmatch(str(value))
        try:
            span_us = int(days[1]) * _DAY_US if days else parse_span(str(value))
        except ValueError as fault:
            self.fail(f"{value!r} {fault}, or 30d", param, ctx)
        return span_us if span_us else self.fail(f"{value!r} is nothing", param, ctx)


@click.command(epilog=_EXAMPLES)
@database_option
@click.option("--by", type=click.Choice(_WAYS), default="user", show_default=True)
@click.option("--since", "since_us", type=_Since(), default="24h", show_default=True, help="Of how long.")
@click.option("--domain", metavar="TEXT", help="Calls of this domain only.")
@click.option("--top", type=click.IntRange(1, 1000), default=10, show_default=True, metavar="N", help="So many.")
@click.option(
    "--picture", type=click.Path(dir_okay=False, path_type=Path), help="Draw them, and all over time, as SVG."
)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text")
def usage(
    database: str, by: By, since_us: int, domain: str | None, top: int, picture: Path | None, form: str
) -> ExitCode:
    """Tell who called most, how often they were refused, and how long a decision took.

    A server records usage every ten seconds, when it has many callers every minute. p95 is what 95 of 100 decisions
    took no longer than, within a tenth.
    """
    if picture is not None and picture.suffix.lower() != ".svg":
        raise click.UsageError(f"--picture {str(picture)!r} does not end in .svg, and nothing else can be drawn")
    until_s = time.time()
    since_s = until_s - since_us / 1e6

    granularity = _granularity(since_us)

    async def work(records: Database) -> tuple[list[Use], list[Point]]:
        from ratelimit_rls.records.usage import heaviest, series

        found = await heaviest(records, by, since_s, until_s, domain=domain, limit=top)
        points = await series(records, granularity, since_s, until_s, domain=domain) if picture is not None else []
        return found, points

    found, points = with_records(database, work)
    if picture is not None:
        _draw(picture, f"calls by {by}, last {_span(since_us)}", points, granularity, found)
    if form == "json":
        click.echo(json.dumps([_json(use) for use in found], indent=2))
    else:
        click.echo("\n".join(_table(by, found, since_us)))
    return ExitCode.DONE


def _granularity(span_us: int) -> str:
    """So many bars that each can be seen."""
    return next((name for name, each_us in _EACH_US if span_us <= _MOST_BARS * each_us), _EACH_US[-1][0])


def _draw(path: Path, title: str, points: Sequence[Point], granularity: str, found: Sequence[Use]) -> None:
    from ratelimit_rls.cli.usage_picture import draw

    try:
        path.write_text(draw(title, points, granularity, found), encoding="utf-8")
    except OSError as fault:
        raise SettingsError(f"--picture {path} cannot be written: {fault.strerror}") from fault


def _table(by: str, found: Sequence[Use], since_us: int) -> Iterator[str]:
    if not found:
        article = "an" if by == "endpoint" else "a"
        yield f"no calls with {article} {by} are recorded in the last {_span(since_us)}"
        return
    names = [_cut(printable(use.name)) for use in found]
    width = max(len(by), *map(len, names))
    yield click.style(by.upper().ljust(width) + _FIGURES.format("CALLS", "REFUSED", "", "P95"), bold=True)
    for name, use in zip(names, found, strict=True):
        share = f"{100 * use.refused / use.total:.1f} %"
        yield name.ljust(width) + _FIGURES.format(f"{use.total:,}", f"{use.refused:,}", share, _time(use.p95_us))


def _cut(name: str) -> str:
    return name if len(name) <= _WIDEST_NAME else f"{name[: _WIDEST_NAME - 1]}…"


def _span(us: int) -> str:
    days, rest = divmod(us, _DAY_US)
    return f"{days}d" if days > 1 and not rest else format_span(us)


def _time(us: float | None) -> str:
    if us is None:
        return "-"
    return f"{us / 1000:.1f} ms" if us >= 1000 else f"{us:.0f} µs"


def _json(use: Use) -> dict[str, Any]:
    return {**use._asdict(), "refused": use.refused}
