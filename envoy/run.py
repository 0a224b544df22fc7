"""Runs the sandboxes of this folder: `python envoy/run.py shadow`, or several names, or none for all of them.

Each sandbox is started with its prerequisites on free ports, verified with its verify.sh, and stopped. With `--stay`
one of them keeps running until Ctrl-C, with Envoy on the ports in its files. However it ends (also by SIGTERM and
SIGHUP), no process is left running.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.support.sandboxes import NAMES, PortTaken, Sandbox, exit_on_sigterm
from tests.support.servers import Upstream

GREEN, RED, PLAIN = ("\033[32m", "\033[31m", "\033[0m") if sys.stdout.isatty() else ("", "", "")


def verified(name: str, upstream: Upstream) -> bool:
    print(f"{name}: envoy/{name}/verify.sh", flush=True)
    begun_s = time.monotonic()
    with Sandbox(name, upstream=upstream) as sandbox:
        step = sandbox.verify()
    print(step.stdout, end="")
    passed = step.returncode == 0
    output = f"{GREEN}passed{PLAIN}" if passed else f"{RED}failed{PLAIN}"
    print(f"{name}: {output} in {time.monotonic() - begun_s:.1f} s\n", flush=True)
    return passed


def stay(name: str, upstream: Upstream) -> int:
    with Sandbox(name, upstream=upstream, where={10000: 10000, 9901: 9901}) as sandbox:
        settings = " ".join(f"{variable}={url}" for variable, url in sandbox.addresses.items())
        print(f"{name} is running: Envoy {sandbox.envoy.url}. To verify it, in another terminal:\n")
        print(f"  {settings} envoy/{name}/verify.sh\n\nCtrl-C ends it.", flush=True)
        try:
            while sandbox.envoy.running:
                time.sleep(0.2)
        except KeyboardInterrupt:
            print()
            return 0
        print(f"Envoy has ended:\n{sandbox.envoy.log()[-2000:]}", file=sys.stderr)
        return 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the Envoy set-ups of this folder and verifies them.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(NAMES)}; without any, all of them")
    parser.add_argument("--stay", action="store_true", help="do not verify: keep one running until Ctrl-C")
    result = parser.parse_args()
    names: list[str] = result.names or NAMES
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"there is no sandbox {unknown[0]!r}; there are {', '.join(NAMES)}")
    if result.stay and len(names) != 1:
        parser.error("--stay needs the name of one sandbox")
    exit_on_sigterm()
    try:
        with Upstream() as upstream:
            if result.stay:
                return stay(names[0], upstream)
            failed = [name for name in names if not verified(name, upstream)]
    except PortTaken as fault:
        print(f"{names[0]} cannot run: {fault}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if len(names) > 1:
        print(f"{len(names) - len(failed)} of {len(names)} passed" + "".join(f", {name} failed" for name in failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
