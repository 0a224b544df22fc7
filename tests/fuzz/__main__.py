"""`python -m tests.fuzz --minutes N`: fuzz everything that parses client input, with a new seed."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence

from tests.fuzz.fuzz import Found, fuzz
from tests.fuzz.targets import TARGETS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of an earlier run, to repeat it")
    parser.add_argument("--targets", nargs="+", choices=[target.name for target in TARGETS])
    chosen = parser.parse_args(arguments)
    targets = [target for target in TARGETS if chosen.targets is None or target.name in chosen.targets]
    seed = random.randrange(2**32) if chosen.seed is None else chosen.seed
    failed = 0
    for target in targets:
        try:
            count = fuzz(target, seed, seconds=chosen.minutes * 60 / len(targets))
            print(f"{target.name}: {count:,} inputs, seed {seed}: ok", flush=True)
        except Found as found:
            failed += 1
            print(f"{found}: NOT OK", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
