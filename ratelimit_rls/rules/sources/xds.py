"""Rules over xDS as documents: each RateLimitConfig is written as the text that a rules file would have.

So one compiler gives rules from anywhere the same meaning and the same errors. A configuration comes in here in the
form protobuf has for JSON, with the fields' own names: plain values, and what has its default is left out. Every text
is quoted and escaped, so that nothing a control plane sends can be read as anything but that text; and each descriptor
begins a line, so that a line says which descriptor it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from ratelimit_rls.errors import Problem, RulesError, one_line
from ratelimit_rls.rules.load import Source

Config = Mapping[str, Any]

LONGEST_NAME = 200
"""Of a resource or a descriptor, where it is told as the place of a problem."""

_ESCAPED = re.compile(r'[^ -~]|["\\]')
_SWITCHES = ("shadow_mode", "detailed_metric", "quota_mode")


def documents(configs: Iterable[Config]) -> list[Source]:
    """One for each configuration, sorted by name.

    The order on the wire is that of some hash table as a rule: rules that are equal must not look changed by it.
    """
    sources = [Source(name_of(config, at), _text(config).encode()) for at, config in enumerate(configs)]
    return sorted(sources, key=lambda source: (source.name, source.content))


def name_of(config: Config, at: int) -> str:
    """What errors call the configuration: its name, without one its domain, without either its place in the list."""
    return one_line(config.get("name") or config.get("domain") or f"resources[{at}]")[:LONGEST_NAME]


def with_paths(error: RulesError, configs: Sequence[Config]) -> RulesError:
    """The same problems, each with the descriptor that it is in: nobody has seen the text whose line it names."""
    named = {name_of(config, at): config for at, config in enumerate(configs)}
    return RulesError(_with_path(problem, named.get(problem.file, {})) for problem in error.problems)


def _with_path(problem: Problem, config: Config) -> Problem:
    before = problem.line - 2  # the first line is the domain's
    path = next(islice(_paths(config), before, None), "") if before >= 0 else ""
    if not path or path in problem.message:
        return problem
    return replace(problem, message=f"{problem.message} (in {path[-LONGEST_NAME:]})")


def _paths(config: Config) -> Iterator[str]:
    """Of every descriptor, in the order of the lines."""
    waiting = [(str(config.get("domain", "")), iter(config.get("descriptors", ())))]
    while waiting:
        above, level = waiting[-1]
        descriptor = next(level, None)
        if descriptor is None:
            waiting.pop()
            continue
        key, value = descriptor.get("key", ""), descriptor.get("value", "")
        path = f"{above}.{key}_{value}" if value else f"{above}.{key}"
        yield path
        waiting.append((path, iter(descriptor.get("descriptors", ()))))


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
