"""Conversion of RateLimitConfig resources to the text of rules files.

So one compiler gives rules of all sources the same meaning and the same errors. A resource is passed in protobuf's JSON
form with the original field names: plain values, defaults omitted. Every text is quoted and escaped, so that nothing a
control plane sends can be parsed as anything but that text. Each descriptor starts a line, so that a line number
identifies the descriptor.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Any

from ratelimit_rls.errors import Problem, RulesError, one_line
from ratelimit_rls.rules import diagnostics
from ratelimit_rls.rules.source_document import MAX_BYTES, SourceDocument
from ratelimit_rls.yaml.parser import MAX_DEPTH, MAX_NODES

Config = Mapping[str, Any]

MAX_NAME_LENGTH = 200
"""Characters of a resource's or descriptor's name in a problem."""

MAX_EXPLAINED = 100
"""Problems of one update that get a descriptor: more than the log and a NACK show."""

NODES_PER_RULE = 11
"""YAML nodes of a descriptor with key, value and a limit of unit and number."""

NODES_PER_RESOURCE = 5
"""YAML nodes of a resource besides its descriptors: the mapping, its two keys, the domain and the list."""

MAX_DESCRIPTOR_DEPTH = MAX_DEPTH // 2 - 2
"""Levels of descriptors, the last with a limit: each is a list and a mapping, the limit a mapping and its values."""

# The errors for a file's bounds mention aliases and files; these mention resources.
_RESOURCE_MESSAGES = {
    diagnostics.too_many_nodes(MAX_NODES): (
        f"there are too many descriptors: as text the resource has more than {MAX_NODES:,} nodes, {NODES_PER_RULE} "
        "for a descriptor with key, value and limit, "
        f"so that {(MAX_NODES - NODES_PER_RESOURCE) // NODES_PER_RULE:,} fit; send fewer, or several resources"
    ),
    diagnostics.too_large(MAX_BYTES): (
        f"the resource is larger than {MAX_BYTES // 2**20} MiB as text; send less, or several resources"
    ),
    diagnostics.too_deep(MAX_DEPTH): (
        f"descriptors (or metadata) are nested too deep: {MAX_DESCRIPTOR_DEPTH} levels of descriptors may have limits"
    ),
}

_ESCAPED = re.compile(r'[^ -~]|["\\]')
_SWITCHES = ("shadow_mode", "detailed_metric", "quota_mode")


def to_documents(configs: Iterable[Config]) -> list[SourceDocument]:
    """Return one document per resource, sorted by name.

    The order on the wire is usually that of a hash table: equal rules must not look changed because of it.
    """
    return [source for source, _ in _with_text(configs)]


def resource_name(config: Config, at: int) -> str:
    """Return the name of a resource in errors: its name, otherwise its domain, otherwise its index."""
    return one_line(config.get("name") or config.get("domain") or f"resources[{at}]")[:MAX_NAME_LENGTH]


def explain_problems(error: RulesError, configs: Iterable[Config]) -> RulesError:
    """Return the problems rephrased for resources: the text whose lines they name was never visible to the user.

    Each of the first MAX_EXPLAINED gets the path of its descriptor.
    """
    problems = [
        replace(problem, message=_RESOURCE_MESSAGES.get(problem.message, problem.message)) for problem in error.problems
    ]
    lines: dict[str, set[int]] = {}
    for problem in problems[:MAX_EXPLAINED]:
        lines.setdefault(problem.file, set()).add(problem.line)
    paths = {
        source.name: _paths(config, lines[source.name])
        for source, config in _with_text(configs)
        if source.name in lines
    }
    return RulesError(
        _with_path(problem, paths.get(problem.file, {}).get(problem.line, "")) if at < MAX_EXPLAINED else problem
        for at, problem in enumerate(problems)
    )


def _with_path(problem: Problem, path: str) -> Problem:
    if not path or path in problem.message:
        return problem
    return replace(problem, message=f"{problem.message} (in {path[-MAX_NAME_LENGTH:]})")


def _paths(config: Config, lines: Collection[int]) -> dict[int, str]:
    """Return the paths of the descriptors at the given lines, by line.

    Other descriptors cost one step each, whatever their names.
    """
    found: dict[int, str] = {}
    names = [str(config.get("domain", ""))]
    waiting = [iter(config.get("descriptors", ()))]
    line, last = 1, max(lines)  # line 1 is the domain's
    while waiting and line < last:
        descriptor = next(waiting[-1], None)
        if descriptor is None:
            waiting.pop()
            names.pop()
            continue
        line += 1
        key, value = descriptor.get("key", ""), descriptor.get("value", "")
        names.append(f"{key}_{value}" if value else key)
        waiting.append(iter(descriptor.get("descriptors", ())))
        if line in lines:
            found[line] = ".".join(names)
    return found


def _with_text(configs: Iterable[Config]) -> list[tuple[SourceDocument, Config]]:
    """Return each resource with its text, under a unique name.

    Names should be unique, but the protocol does not enforce it. Equal ones get a number, by content and not by the
    order of arrival.
    """
    written = sorted(
        ((resource_name(config, at), _text(config).encode(), config) for at, config in enumerate(configs)),
        key=itemgetter(0, 1),
    )
    taken: set[str] = set()
    numbers: Counter[str] = Counter()
    sources = []
    for name, content, config in written:
        own = name
        while own in taken:
            numbers[name] += 1
            own = f"{name} ({numbers[name] + 1})"
        taken.add(own)
        sources.append((SourceDocument(own, content), config))
    return sources


def _text(config: Config) -> str:
    domain, descriptors = _quoted(config.get("domain", "")), _list(_descriptor, config.get("descriptors", ()))
    return _mapping({"domain": domain, "descriptors": descriptors}) + "\n"


def _descriptor(descriptor: Config) -> str:
    written = {"key": _quoted(descriptor.get("key", ""))}
    if descriptor.get("value"):
        written["value"] = _quoted(descriptor["value"])
    if "rate_limit" in descriptor:
        written["rate_limit"] = _rate_limit(descriptor["rate_limit"])
    written |= {switch: "true" for switch in _SWITCHES if descriptor.get(switch)}
    if descriptor.get("metadata"):
        written["metadata"] = _metadata_value(descriptor["metadata"])
    if descriptor.get("descriptors"):
        written["descriptors"] = _list(_descriptor, descriptor["descriptors"])
    return "\n" + _mapping(written)


def _rate_limit(policy: Config) -> str:
    written: dict[str, str] = {}
    unlimited = policy.get("unlimited", False)
    if not unlimited or "unit" in policy:
        # An unknown unit arrives as its number, and is rejected as such.
        written["unit"] = _quoted(str(policy.get("unit", "UNKNOWN")))
    if not unlimited or "requests_per_unit" in policy:
        written["requests_per_unit"] = str(policy.get("requests_per_unit", 0))
    if unlimited:
        written["unlimited"] = "true"
    if policy.get("name"):
        written["name"] = _quoted(policy["name"])
    if policy.get("replaces"):
        written["replaces"] = _list(lambda one: _mapping({"name": _quoted(one.get("name", ""))}), policy["replaces"])
    return _mapping(written)


def _metadata_value(value: Any) -> str:
    """Return metadata as YAML. Keys are sorted, since a protobuf map has no order; `?` allows keys of any length."""
    match value:
        case Mapping():
            return "{" + ", ".join(f"? {_quoted(key)} : {_metadata_value(value[key])}" for key in sorted(value)) + "}"
        case list():
            return _list(_metadata_value, value)
        case str():
            return _quoted(value)
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case _:
            # In protobuf every number is a float; integral ones are written as integers.
            return repr(int(value) if abs(value) < 2**53 and value == int(value) else float(value))


def _mapping(written: Mapping[str, str]) -> str:
    return "{" + ", ".join(f'"{name}": {value}' for name, value in written.items()) + "}"


def _list(write: Callable[[Any], str], items: Iterable[Any]) -> str:
    return f"[{', '.join(map(write, items))}]"


def _quoted(text: str) -> str:
    return '"' + _ESCAPED.sub(lambda found: rf"\U{ord(found[0]):08x}", text) + '"'
