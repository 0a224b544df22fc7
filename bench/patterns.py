"""`python -m bench.patterns`: what a lookup costs among 10 patterns of a level, and among 10,000.

It looks values up in compiled rules, in this process and without a server: those that a pattern matches, and those that
none does. The figures are CPU time in the least disturbed of many rounds, in which few and many take turns. Exact
values are measured for comparison: 10,000 do not fit into the caches of a core, either. Kinds that are tried one after
the other come last, in smaller numbers and without a target.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from ratelimit_rls.core.model import Entry
from ratelimit_rls.core.tree import Node, find_child
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.rules.diagnostics import MAX_EXPRESSIONS

SEED = 1
VALUES = 500
"""Values that are looked up in turn."""

FEW = 10
MAX_RATIO = 1.2
"""Target: many patterns ÷ few."""

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SECTIONS = ("api", "v1", "v2", "static", "internal")


@dataclass(frozen=True, slots=True)
class PatternSet:
    """A kind of pattern with generators: of one pattern, as in the rules, and of a value that it matches."""

    name: str
    pattern: Callable[[random.Random], str]
    value: Callable[[str, random.Random], str]
    miss: Callable[[random.Random], str]
    form: str  # how a descriptor has it
    one_by_one: int | None = None  # a smaller number than `--many`, for kinds that are tried one after the other


def _word(source: random.Random) -> str:
    return "".join(source.choices(_LETTERS, k=source.randint(4, 20)))


def _path(source: random.Random) -> str:
    return f"/{source.choice(_SECTIONS)}/{_word(source)}/"


def _host(source: random.Random) -> str:
    return f".{_word(source)}.example.com"


def _ipv4(source: random.Random) -> str:
    length = source.randint(12, 32)
    return str(IPv4Network((source.getrandbits(length) << (32 - length), length)))


def _ipv6(source: random.Random) -> str:
    length = source.randint(24, 64)
    return str(IPv6Network((source.getrandbits(length) << (128 - length), length)))


def _filled(pattern: str, source: random.Random) -> str:
    return pattern.replace("*", _word(source))


def _digits(source: random.Random) -> str:
    return str(source.getrandbits(32))


SETS = (
    PatternSet("exact values", _path, lambda text, _: text, _digits, "value: '{}'"),
    PatternSet("wildcards head*", lambda s: f"{_path(s)}*", _filled, _path, "value: '{}'"),
    PatternSet("wildcards *tail", lambda s: f"*{_host(s)}", _filled, _host, "value: '{}'"),
    PatternSet("wildcards head*tail", lambda s: f"{_path(s)}*{_host(s)}", _filled, _path, "value: '{}'"),
    PatternSet("prefixes", _path, lambda text, s: text + _word(s), _path, "match: {{prefix: '{}'}}"),
    PatternSet(
        "IPv4 networks",
        _ipv4,
        lambda text, _: str(IPv4Network(text).network_address),
        lambda s: str(IPv4Address(s.getrandbits(32))),
        "match: {{cidr: '{}'}}",
    ),
    PatternSet(
        "IPv6 networks",
        _ipv6,
        lambda text, _: str(IPv6Network(text).network_address),
        lambda s: str(IPv6Address(s.getrandbits(128))),
        "match: {{cidr: '{}'}}",
    ),
    PatternSet("wildcards *middle*", lambda s: f"*{_host(s)}*", _filled, _host, "value: '{}'", one_by_one=1000),
    PatternSet(
        "expressions",
        lambda s: f"{_path(s)}[0-9]+",
        lambda text, _: text.replace("[0-9]+", "17"),
        lambda s: f"{_path(s)}17",
        "match: {{regex: '{}'}}",
        one_by_one=MAX_EXPRESSIONS,
    ),
)


@dataclass(frozen=True, slots=True)
class Lookups:
    """A level and the entries that are looked up in it."""

    root: Node
    entries: Sequence[Entry]

    def time_ns(self) -> float:
        """Return the time of one lookup."""
        root = self.root
        began_ns = time.thread_time_ns()
        for entry in self.entries:
            find_child(root, entry)
        return (time.thread_time_ns() - began_ns) / len(self.entries)


def lookups(patterns: PatternSet, number: int, *, matching: bool) -> Lookups:
    """Return lookups among `number` patterns. With `matching`, each value is of one of them."""
    source = random.Random(SEED)
    texts: dict[str, None] = {}
    while len(texts) < number:
        texts[patterns.pattern(source)] = None
    lines = [
        f"  - {{key: k, {patterns.form.format(text)}, rate_limit: {{unit: hour, requests_per_unit: 1}}}}\n"
        for text in texts
    ]
    rules = f"domain: bench\ndescriptors:\n{''.join(lines)}"
    root = compile_documents({"rules": rules.encode()}).tree.domains["bench"]
    known = list(texts)
    values = [
        patterns.value(source.choice(known), source) if matching else patterns.miss(source) for _ in range(VALUES)
    ]
    entries = [Entry("k", value) for value in values]
    return Lookups(root, [entry for entry in entries if (find_child(root, entry)[0] is not None) is matching])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.patterns", description=__doc__)
    parser.add_argument("--many", type=int, default=10_000, help="number of patterns (default: 10000)")
    parser.add_argument("--rounds", type=int, default=101, help="number of measurements of each (default: 101)")
    chosen = parser.parse_args(arguments)
    print(f"{'ns a lookup, best':24}{'value':>9}{'number':>9}{f'among {FEW}':>11}{'among all':>11}{'ratio':>8}")
    for patterns in SETS:
        number = min(chosen.many, patterns.one_by_one or chosen.many)
        for matching in (True, False):
            few, many = (lookups(patterns, one, matching=matching) for one in (FEW, number))
            rounds = [(few.time_ns(), many.time_ns()) for _ in range(chosen.rounds)]
            before_ns, after_ns = map(min, zip(*rounds, strict=True))
            ratio = after_ns / before_ns
            verdict = f"  above {MAX_RATIO}" if ratio > MAX_RATIO and patterns.one_by_one is None else ""
            kind = "matches" if matching else "does not"
            print(
                f"{patterns.name:24}{kind:>9}{number:9,}{before_ns:11,.0f}{after_ns:11,.0f}{ratio:8.2f}{verdict}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
