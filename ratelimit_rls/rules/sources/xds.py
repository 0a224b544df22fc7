"""Rules over xDS as documents: each RateLimitConfig is written as the text that a rules file would have.

So one compiler gives rules from anywhere the same meaning and the same errors. A configuration comes in here in the
form protobuf has for JSON, with the fields' own names: plain values, and what has its default is left out. Every text
is quoted and escaped, so that nothing a control plane sends can be read as anything but that text; and each descriptor
begins a line, so that a line says which descriptor it is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Any

from ratelimit_rls.errors import Problem, RulesError, one_line
from ratelimit_rls.rules import offences
from ratelimit_rls.rules.load import DEEPEST, MOST_BYTES, MOST_NODES, Source

Config = Mapping[str, Any]

LONGEST_NAME = 200
"""Of a resource or a descriptor, where it is told as the place of a problem."""

MOST_EXPLAINED = 100
"""Of the problems of one update: more than the log shows and a server is told."""

NODES_OF_A_RULE = 11
"""In the text: a descriptor with key, value and a limit of unit and number."""

NODES_AROUND = 5
"""Them all: the mapping of the resource, its two keys, the domain and the list."""

DEEPEST_RULE = DEEPEST // 2 - 2
"""Levels of descriptors, the last with a limit: each is a list and a mapping, the limit a mapping and its values."""

# The bounds of a file, which would speak of aliases and of files.
_OF_RESOURCES = {
    offences.too_many_nodes(MOST_NODES): (
        f"there are too many descriptors: as text the resource has more than {MOST_NODES:,} nodes, {NODES_OF_A_RULE} "
        f"for a descriptor with key, value and limit, so that {(MOST_NODES - NODES_AROUND) // NODES_OF_A_RULE:,} fit; "
        "send fewer, or several resources"
    ),
    offences.too_large(MOST_BYTES): (
        f"the resource is larger than {MOST_BYTES // 2**20} MiB as text; send less, or several resources"
    ),
    offences.too_deep(DEEPEST): (
        f"descriptors (or metadata) are nested too deep: {DEEPEST_RULE} levels of descriptors may have limits"
    ),
}

_ESCAPED = re.compile(r'[^ -~]|["\\]')
_SWITCHES = ("shadow_mode", "detailed_metric", "quota_mode")


def documents(configs: Iterable[Config]) -> list[Source]:
    """One for each configuration, sorted by name.

    The order on the wire is that of some hash table as a rule: rules that are equal must not look changed by it.
    """
    return [source for source, _ in _written(configs)]


def name_of(config: Config, at: int) -> str:
    """What errors call the configuration: its name, without one its domain, without either its place in the list."""
    return one_line(config.get("name") or config.get("domain") or f"resources[{at}]")[:LONGEST_NAME]


def explained(error: RulesError, configs: Iterable[Config]) -> RulesError:
    """The same problems in words of resources: nobody has seen the text whose line they name.

    Each of the first MOST_EXPLAINED gets the descriptor that it is in.
    """
    problems = [
        replace(problem, message=_OF_RESOURCES.get(problem.message, problem.message)) for problem in error.problems
    ]
    lines: dict[str, set[int]] = {}
    for problem in problems[:MOST_EXPLAINED]:
        lines.setdefault(problem.file, set()).add(problem.line)
    paths = {
        source.name: _paths(config, lines[source.name]) for source, config in _written(configs) if source.name in lines
    }
    return RulesError(
        _with_path(problem, paths.get(problem.file, {}).get(problem.line, "")) if at < MOST_EXPLAINED else problem
        for at, problem in enumerate(problems)
    )


def _with_path(problem: Problem, path: str) -> Problem:
    if not path or path in problem.message:
        return problem
    return replace(problem, message=f"{problem.message} (in {path[-LONGEST_NAME:]})")


def _paths(config: Config, lines: Collection[int]) -> dict[int, str]:
    """Of the descriptors that begin those lines, by line. The others cost a step each, whatever they are called."""
    found: dict[int, str] = {}
    names = [str(config.get("domain", ""))]
    waiting = [iter(config.get("descriptors", ()))]
    line, last = 1, max(lines)  # the first line is the domain's
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


def _written(configs: Iterable[Config]) -> list[tuple[Source, Config]]:
    """Each configuration with its text, under a name that no other has.

    Names should differ, but nothing on the wire makes them: equal ones are told apart by a number, which goes by what
    they say and not by the order that they came in.
    """
    written = sorted(
        ((name_of(config, at), _text(config).encode(), config) for at, config in enumerate(configs)),
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
        sources.append((Source(own, content), config))
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
        written["metadata"] = _plain(descriptor["metadata"])
    if descriptor.get("descriptors"):
        written["descriptors"] = _list(_descriptor, descriptor["descriptors"])
    return "\n" + _mapping(written)


def _rate_limit(policy: Config) -> str:
    written: dict[str, str] = {}
    unlimited = policy.get("unlimited", False)
    if not unlimited or "unit" in policy:
        # A unit that this version does not know comes as its number, and is refused as what it is.
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


def _plain(value: Any) -> str:
    """Metadata. Its keys are sorted, since the order of a protobuf map is nobody's; `?` lets a key be of any length."""
    match value:
        case Mapping():
            return "{" + ", ".join(f"? {_quoted(key)} : {_plain(value[key])}" for key in sorted(value)) + "}"
        case list():
            return _list(_plain, value)
        case str():
            return _quoted(value)
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case _:
            # In protobuf every number is a float; those that stand for whole numbers are written as such.
            return repr(int(value) if abs(value) < 2**53 and value == int(value) else float(value))


def _mapping(written: Mapping[str, str]) -> str:
    return "{" + ", ".join(f'"{name}": {value}' for name, value in written.items()) + "}"


def _list(write: Callable[[Any], str], items: Iterable[Any]) -> str:
    return f"[{', '.join(map(write, items))}]"


def _quoted(text: str) -> str:
    return '"' + _ESCAPED.sub(lambda found: rf"\U{ord(found[0]):08x}", text) + '"'
