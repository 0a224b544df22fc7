"""The pages of this folder, made from the code they describe; `make docs` writes them, a test says when to."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import click

from docs.reference import schema
from docs.reference.admin_api import admin_api
from ratelimit_rls.cli import commands
from ratelimit_rls.settings.catalogue import VARIABLES
from ratelimit_rls.telemetry.collect import MOST_UNKNOWN_DOMAINS
from ratelimit_rls.telemetry.instruments import DURATIONS_S, INSTRUMENTS, KEPT_BY_OTHERS, Instrument
from ratelimit_rls.telemetry.metrics import LONGEST_PATH, MOST_PATHS, MOST_RULES, OTHER
from ratelimit_rls.telemetry.rule_names import OVERRIDE

HERE = Path(__file__).parent
NOTICE = "<!-- Written by `make docs`; changes belong in the code it describes. -->"
WIDTH = 100


def settings() -> str:
    """Every variable, by group, with its flag, default and meaning."""
    lines = ["# Settings", "", NOTICE, ""]
    lines += ["Each setting is an environment variable and a flag of `ratelimit-rls serve`; a flag wins.", ""]
    for group, variables in groupby(VARIABLES, key=lambda variable: variable.group):
        lines += [f"## {group.strip().rstrip('.')}", "", "| variable | flag | kind | default | meaning |"]
        lines += ["|---|---|---|---|---|"]
        for one in variables:
            default = f"`{one.default}`" if one.default else ""
            cells = (f"`{one.name}`", f"`{one.flag}`", one.kind, default, one.description)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def command_line() -> str:
    """The help of every command except serve's flags, which are the settings."""
    lines = ["# Commands", "", NOTICE, "", *_help(commands, "ratelimit-rls")]
    for name, verb in commands.commands.items():
        if name == "serve":
            lines += ["## serve", "", "Runs the server. Its flags are the [settings](settings.md).", ""]
        else:
            lines += [f"## {name}", "", *_help(verb, f"ratelimit-rls {name}")]
        if isinstance(verb, click.Group):
            for part, command in sorted(verb.commands.items()):
                lines += [f"### {name} {part}", "", *_help(command, f"ratelimit-rls {name} {part}")]
    return "\n".join(lines)


def metrics() -> str:
    """Every instrument, under each of its names."""
    lines = ["# Metrics", "", NOTICE, "", *_METRICS_HEAD, "", "## Ours", ""]
    lines += ["| OpenTelemetry | Prometheus | kind | unit | attributes | meaning |", "|---|---|---|---|---|---|"]
    lines += [_instrument(one) for one in INSTRUMENTS if not one.reference]
    lines += ["", "## The reference's", "", *_REFERENCE_HEAD, ""]
    lines += ["| Prometheus | kind | labels | meaning |", "|---|---|---|---|"]
    lines += [_reference_instrument(one) for one in INSTRUMENTS if one.reference]
    lines += ["", "## statsd, DogStatsD and /stats", "", *_STATSD_HEAD, ""]
    lines += ["| name | kind | the same as |", "|---|---|---|"]
    lines += [f"| `{name}` | {one.kind.value} | `{one.name}` |" for name, one in KEPT_BY_OTHERS.items()]
    lines += ["", "## How many series there can be", "", *_BOUNDS, ""]
    return "\n".join(lines)


_METRICS_HEAD = [
    "Off until asked for: `USE_PROMETHEUS=true` serves them on `PROMETHEUS_ADDR`, `RLS_OTLP_METRICS=http` (or `grpc`)",
    "sends them by OTLP as `OTEL_EXPORTER_OTLP_*` say, `USE_STATSD=true` or `USE_DOG_STATSD=true` send them to statsd.",
    "OTLP may be used beside one of the others. Names are OpenTelemetry's; in Prometheus an attribute is a label with",
    "`_` for dots, and one that is empty is left out. One scrape shows all workers of a server; by OTLP each worker is",
    "an instance of the service, and to statsd each sends what it counted.",
    "",
    "Histograms have the bounds " + ", ".join(f"{1000 * bound:g}" for bound in DURATIONS_S) + " ms. They begin below",
    "those that OpenTelemetry advises, since an answer is wanted within a few milliseconds.",
    "",
    "Counters are there at 0 from the start of a process, those of a rule from its first call on. They never go back",
    "while the server runs, though a worker may end and be replaced.",
]
_REFERENCE_HEAD = [
    "For dashboards made for envoyproxy/ratelimit, in Prometheus alone, with the labels it has by default. There is no",
    "`key2` where a limit has one level; what is below the second is summed in it. With `PROMETHEUS_MAPPER_YAML`, a",
    "mapping file of statsd_exporter, the names of that file take their place: it is given what statsd would be sent,",
    "and names that it does not mention keep theirs with `_` for dots. Times are histograms in the buckets above,",
    "whatever it says of summaries and buckets, and a file with a mistake stops the start.",
    "`PROMETHEUS_RESPONSE_TIME_AS_MILLISECONDS=true` makes the values of the times a thousand times larger and leaves",
    "their name, as the reference does. `EXTRA_TAGS` are labels of every series.",
]
_STATSD_HEAD = [
    "The names are the reference's:",
    "",
    "- `ratelimit.service.rate_limit.<domain>.<key>….` and then `total_hits`, `over_limit`, `near_limit`,",
    "  `over_limit_with_local_cache`, `within_limit`, `shadow_mode`, `total_negative_hits`, `state_warning`,",
    "  `state_throttled`; `ratelimit.service.rate_limit.<domain>.domain_not_found`",
    "- `ratelimit.service.config_load_success`, `.config_load_error`, `.global_shadow_mode`,",
    "  `ratelimit.service.call.should_rate_limit.redis_error`, `.service_error`, `.overloaded`, `.late`",
    "- `ratelimit.store_failure.allow`, `.deny`, `.local`, `.error`",
    "- `ratelimit_server.<method>.total_requests`, and in statsd `ratelimit_server.<method>.response_time`",
    "- those of the table below",
    "",
    "Every `STATS_FLUSH_INTERVAL` a counter is sent by how much it grew, if it did, and a gauge as it is. Times are",
    "sent by the bucket, with the middle of it as the value and a sample rate that says how many there were",
    "(`…response_time:3.75|ms|@0.2` are five calls of 2.5 to 5 ms): their number is right, and their distribution as",
    "fine as the buckets are. While a server on TCP is away nothing is lost: it is told when it is back. `EXTRA_TAGS`",
    "are tags of DogStatsD, and `.__key=value` at the end of names in statsd.",
    "`DOG_STATSD_MOGRIFIER_<NAME>_PATTERN`, `_NAME` and `_TAGS` rename and tag what a pattern (RE2) is found in; `$1`",
    "is what its first group met.",
]
_BOUNDS = [
    "Of our attributes, none is a value that a client sends, but for the domain in `ratelimit.unknown_domains`. The",
    f"rule is one of the rules file, or `{OVERRIDE}` for a limit that came with the request, and the domain is one",
    f"that has rules, or `{OTHER}`. The names of the reference may hold values of requests, where a rule asks for it",
    "(`detailed_metric`, `value_to_metric`) or a request brings a limit. In a process there are at most",
    "",
    f"- {MOST_RULES:,} rules, over all reloads; the rest is counted as `{OTHER}`",
    f"- {MOST_PATHS:,} paths in the reference's names, of {LONGEST_PATH} characters at most; the rest is counted as"
    f" `{OTHER}`",
    f"- {MOST_UNKNOWN_DOMAINS} domains without rules in `ratelimit.unknown_domains`; the rest is counted as `{OTHER}`",
]


def _instrument(one: Instrument) -> str:
    attributes = ", ".join(f"`{attribute}`" for attribute in one.attributes)
    return f"| `{one.name}` | `{one.prometheus}` | {one.kind.value} | `{one.unit}` | {attributes} | {one.about} |"


def _reference_instrument(one: Instrument) -> str:
    labels = ", ".join(f"`{attribute}`" for attribute in one.attributes)
    return f"| `{one.prometheus}` | {one.kind.value} | {labels} | {one.about} |"


def _help(command: click.Command, path: str) -> list[str]:
    context = click.Context(command, info_name=path, terminal_width=WIDTH, max_content_width=WIDTH)
    text = "\n".join(line.rstrip() for line in click.unstyle(command.get_help(context)).splitlines())
    return ["```text", text, "```", ""]


def pages() -> dict[Path, str]:
    """Each page's path and what should be in it."""
    return {
        HERE / "settings.md": settings(),
        HERE / "commands.md": command_line(),
        HERE / "metrics.md": metrics(),
        HERE.parent / "admin-api.md": admin_api(NOTICE),
        schema.PAGE: schema.records_page(),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
