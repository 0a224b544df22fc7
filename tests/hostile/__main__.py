"""`python -m tests.hostile`: run each attack against its own server, and print the results as a table.

Run it on a quiet machine: waits of well-behaved clients are not corrected for missing CPU time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.hostile.attacks import ATTACKS
from tests.hostile.harness import MIB, UnderAttack, attacked, well_behaved_client

MAX_GROWTH_BYTES = 64 * MIB
MAX_WAIT_MS = 250.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of attacks (default: all)")
    chosen = parser.parse_args(arguments)
    bad = 0
    for attack in ATTACKS:
        if chosen.names and not any(name in attack.name for name in chosen.names):
            continue
        with tempfile.TemporaryDirectory() as directory, UnderAttack(Path(directory)) as service:
            with well_behaved_client(service) as calls:
                outcome = attacked(service, calls, attack)
            faults = [
                *["memory"] * (outcome.grown_bytes > MAX_GROWTH_BYTES),
                *["wait"] * (outcome.waits.longest_ms > MAX_WAIT_MS or outcome.waits.failed > 0),
                *["not ended"] * bool(outcome.not_ended),
                *["not named"] * bool(outcome.not_named),
                *["dead"] * (not service.running),
            ]
        bad += bool(faults)
        print(f"{outcome.line()}  {'NOT OK: ' + ', '.join(faults) if faults else 'ok'}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
