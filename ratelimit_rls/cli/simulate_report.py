"""Text report of `simulate`: totals, a table of rules, and the differences to other rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import click

from ratelimit_rls.cli.formatting import plural

Row = Sequence[str]


def format_report(report: dict[str, Any]) -> Iterator[str]:
    """Format the values that --format json prints."""
    rate = report["calls"] / max(report["took_s"], 0.001)
    span = f", {report['first']} to {report['last']}" if report["calls"] else ""
    requests = f"{report['calls']:,} {plural(report['calls'], 'request')}"
    yield f"{requests}{span}; replayed in {report['took_s']:.1f} s, {rate:,.0f} a second"
    yield from _skipped_lines(report)
    for rule_set in report["rule_sets"]:
        yield ""
        yield from _rule_set(rule_set, report["calls"])
    if "difference" in report:
        yield ""
        yield from _difference(report["difference"], *(one["rules"] for one in report["rule_sets"]))


def _skipped_lines(report: dict[str, Any]) -> Iterator[str]:
    if report["lines_invalid"]:
        verbs = "is invalid and was" if report["lines_invalid"] == 1 else "are invalid and were"
        share = f"{report['lines_invalid']:,} of {report['lines']:,} {plural(report['lines'], 'line')}"
        yield click.style(f"{share} {verbs} skipped:", fg="yellow")
        yield from (f"  line {invalid['line']}: {invalid['error']}" for invalid in report["first_invalid_lines"])
    if report["lines_without_descriptor"]:
        number = report["lines_without_descriptor"]
        yield f"{number:,} {plural(number, 'line')} without a descriptor: a field of each is missing"
    if report["lines_late"]:
        number = report["lines_late"]
        yield f"{number:,} {plural(number, 'line')} far below later ones, replayed at the time of those"


def _rule_set(report: dict[str, Any], calls: int) -> Iterator[str]:
    share = report["denied"] / max(calls, 1)
    verdict = f"{report['admitted']:,} admitted, {report['denied']:,} denied ({share:.1%})"
    none = f", {report['unmatched']:,} matched no rule" if report["unmatched"] else ""
    yield f"{click.style(report['rules'], bold=True)}: {verdict}{none}"
    if report["counters_evicted"]:
        number = report["counters_evicted"]
        yield f"{number:,} {plural(number, 'counter')} dropped for lack of memory: some denials may be missing"
    columns = [
        _COUNT_COLUMNS,
        *(one for one in _OPTIONAL_COLUMNS if any(rule[one.displayed_if] for rule in report["per_rule"])),
        _TIME_COLUMNS,
    ]
    rows = [(rule["rule"], *(cell for column in columns for cell in column.cells(rule))) for rule in report["per_rule"]]
    if rows:
        yield from _table(("rule", *(name for column in columns for name in column.names)), rows)


class _Columns(NamedTuple):
    names: Row
    cells: Callable[[dict[str, Any]], Row]
    displayed_if: str = ""  # show the columns only if this value is set for some rule


_COUNT_COLUMNS = _Columns(
    ("calls", "hits", "denied"), lambda rule: [f"{rule[name]:,}" for name in ("calls", "hits", "denied")]
)
_OPTIONAL_COLUMNS = (
    _Columns(("over, passed",), lambda rule: [f"{rule['passed_over_limit']:,}"], "passed_over_limit"),
    _Columns(("delayed", "longest"), lambda rule: [f"{rule['delayed']:,}", f"{rule['max_delay_s']:.3g} s"], "delayed"),
)
_TIME_COLUMNS = _Columns(
    ("first over", "last over", "peak"),
    lambda rule: [rule["first_over"] or "–", rule["last_over"] or "–", f"{rule['peak_per_s']:,}/s"],
)


def _difference(report: dict[str, Any], new: str, old: str) -> Iterator[str]:
    number = report["newly_denied"]
    yield (
        f"{new} compared with {old}: {number:,} {plural(number, 'request')} newly denied, "
        f"{report['newly_admitted']:,} newly admitted"
    )
    rows = []
    for row in report["per_rule"]:
        change = (row["denied"] or 0) - (row["denied_before"] or 0)
        rows.append((row["rule"], _count(row["denied_before"]), _count(row["denied"]), f"{change:+,}"))
    if rows:
        yield from _table(("rule", "denied before", "now", "change"), rows)


def _count(number: int | None) -> str:
    return "not met" if number is None else f"{number:,}"


def _table(head: Row, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a table: the first column is left-aligned, the others right-aligned."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        first, *others = zip(row, widths, strict=True)
        cells = [f"{first[0]:<{first[1]}}", *(f"{cell:>{width}}" for cell, width in others)]
        line = "  ".join(cells)
        yield click.style(line, dim=True) if row is head else line
