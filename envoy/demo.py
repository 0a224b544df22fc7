"""`make demo`: a real Envoy with this service, and 200s that turn into 429s."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.grpc_client import Http, Reply
from tests.support.servers import SANDBOXES, EnvoyServer, Service, Upstream
from tests.support.windows import MINUTE_S, wait_for_time_left

SANDBOX = SANDBOXES / "rls-http"
SHOWN = ("x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset", "x-envoy-ratelimited")
GREEN, RED, PLAIN = ("\033[32m", "\033[31m", "\033[0m") if sys.stdout.isatty() else ("", "", "")


def line(user: str, path: str, reply: Reply) -> str:
    colour = RED if reply.status == 429 else GREEN
    result = "  ".join(f"{name}: {reply.headers[name]}" for name in SHOWN if name in reply.headers)
    return f"  {user:4} GET {path:9} {colour}{reply.status}{PLAIN}  {result}"


def main() -> int:
    rules = SANDBOX / "rules.yaml"
    print("The rules:\n" + "\n".join(f"  {row}" for row in rules.read_text().splitlines()))
    service = Service({"RLS_RULES": rules})
    with Upstream() as upstream, service:
        where = {8000: upstream.port, 8081: service.grpc_port}
        with EnvoyServer(SANDBOX / "envoy.yaml", where) as envoy, Http(envoy.url) as client:
            print(f"\nEnvoy {envoy.url} ─► upstream 127.0.0.1:{upstream.port}, asking {service.grpc_address} first:\n")
            wait_for_time_left(MINUTE_S, min_left_s=5)  # the limits are per minute, and the demo must not span two
            denied = 0
            for user, path, times in (("ann", "/limited", 7), ("bob", "/limited", 1), ("bob", "/free", 2)):
                for _ in range(times):
                    reply = client.get(path, x_user=user)
                    denied += reply.status == 429
                    print(line(user, path, reply))
            print(f"\n{denied} denied, {upstream.requests} reached the upstream. The set-up: {relative(SANDBOX)}/")
            return 0 if denied == 3 and upstream.requests == 7 else 1


def relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


if __name__ == "__main__":
    sys.exit(main())
