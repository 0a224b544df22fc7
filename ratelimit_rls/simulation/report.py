"""Report of a replay as plain values, the same for every output format."""

from __future__ import annotations

from typing import Any

from ratelimit_rls.simulation.clock import format_timestamp
from ratelimit_rls.simulation.reorder import ReorderBuffer
from ratelimit_rls.simulation.replay import Replay
from ratelimit_rls.simulation.rule_set import RuleSetResult
from ratelimit_rls.simulation.tally import RuleTally
from ratelimit_rls.simulation.traffic import Traffic


def report(replay: Replay, traffic: Traffic, in_order: ReorderBuffer) -> dict[str, Any]:
    invalid = traffic.invalid
    result: dict[str, Any] = {
        "calls": replay.calls,
        "first": _moment(replay.outcomes[0].tally.first_us),
        "last": _moment(replay.outcomes[0].tally.last_us),
        "lines": traffic.line_number,
        "lines_invalid": invalid.count,
        "first_invalid_lines": [{"line": line, "error": error} for line, error in invalid.first],
        "lines_without_descriptor": replay.without_descriptor,
        "lines_late": in_order.late,
        "rule_sets": [_rule_set(one) for one in replay.outcomes],
    }
    if len(replay.outcomes) == 2:
        result["difference"] = _difference(replay)
    return result


def _rule_set(one: RuleSetResult) -> dict[str, Any]:
    tally, series = one.tally, one.tally.series
    return {
        "rules": one.name,
        "admitted": tally.calls - tally.denied,
        "denied": tally.denied,
        "unmatched": tally.without_rule,
        "counters_evicted": one.evicted,
        "per_rule": [_rule(rule) for rule in tally.rules()],
        "over_time": {
            "start": _moment(series.start_us),
            "bucket_s": series.width_us / 1_000_000,
            "admitted": [admitted for admitted, _ in series.buckets],
            "denied": [denied for _, denied in series.buckets],
        },
    }


def _rule(one: RuleTally) -> dict[str, Any]:
    return {
        "rule": one.path,
        "position": one.position,
        "calls": one.calls,
        "hits": one.hits,
        "denied": one.denied,
        "passed_over_limit": one.passed_over_limit,
        "delayed": one.delayed,
        "max_delay_s": one.max_wait_us / 1_000_000,
        "first_over": _moment(one.first_us),
        "last_over": _moment(one.last_us),
        "peak_per_s": one.peak,
        "peak_at": _moment(one.peak_us),
    }


def _difference(replay: Replay) -> dict[str, Any]:
    """Compare the first rule set with the second, which is the baseline."""
    new, old = ({one.path: one for one in outcome.tally.rules()} for outcome in replay.outcomes)
    paths = sorted({*new, *old})
    rows = [{"rule": path, "denied": _denied(new.get(path)), "denied_before": _denied(old.get(path))} for path in paths]
    return {
        "newly_denied": replay.changes.denied_only_by_first,
        "newly_admitted": replay.changes.denied_only_by_second,
        "per_rule": [row for row in rows if row["denied"] != row["denied_before"]],
    }


def _denied(one: RuleTally | None) -> int | None:
    """Return the denials of a rule; None if the rule set has no such rule, or it was never matched."""
    return None if one is None else one.denied


def _moment(us: int | None) -> str | None:
    return None if us is None else format_timestamp(us)
