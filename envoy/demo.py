"""What `make demo` shows: a real Envoy, this service beside it, and 200s that turn into 429s."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.client import Http, Reply
from tests.servers import SANDBOXES, EnvoyServer, Service, Upstream

SANDBOX = SANDBOXES / "rls-http"
SHOWN = ("x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset", "x-envoy-ratelimited")
GREEN, RED, PLAIN = ("\033[32m", "\033[31m", "\033[0m") if sys.stdout.isatty() else ("", "", "")


def line(user: str, path: str, reply: Reply) -> str:
    colour = RED if reply.status == 429 else GREEN
    told = "  ".join(f"{name}: {reply.headers[name]}" for name in SHOWN if name in reply.headers)
    return f"  {user:4} GET {path:9} {colour}{reply.status}{PLAIN}  {told}"


def main() -> int:
    rules = SANDBOX / "rules.yaml"
    print("The rules:\n" + "\n".join(f"  {row}" for row in rules.read_text().splitlines()))
    service = Service({"RLS_RULES": rules})
    with Upstream() as upstream, service:
        where = {8000: upstream.port, 8081: service.grpc_port}
        with EnvoyServer(SANDBOX / "envoy.yaml", where) as envoy, Http(envoy.url) as client:
            print(f"\nEnvoy {envoy.url} ─► upstream 127.0.0.1:{upstream.port}, asking {service.grpc_address} first:\n")
            wait_out_a_minute_that_is_nearly_over()
            refused = 0
            for user, path, times in (("ann", "/limited", 7), ("bob", "/limited", 1), ("bob", "/free", 2)):
                for _ in range(times):
                    reply = client.get(path, x_user=user)
                    refused += reply.status == 429
                    print(line(user, path, reply))
            print(f"\n{refused} refused, {upstream.requests} reached the upstream. The set-up: {relative(SANDBOX)}/")
            return 0 if refused == 3 and upstream.requests == 7 else 1


def wait_out_a_minute_that_is_nearly_over() -> None:
    """The rules count by the minute; begun two seconds before its end, the demo would meet two of them."""
    left_s = 60 - time.time() % 60
    if left_s < 2:
        time.sleep(left_s)


def relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


if __name__ == "__main__":
    sys.exit(main())
