"""`make envoy`: a real Envoy in front of the service of `make run`, with ext_authz.

The configuration is that of the example api-keys, with an upstream in this process. Stop it with Ctrl-C.
"""

from __future__ import annotations

import sys
import time

from tests.support.sandboxes import PortTaken, check_free, exit_on_sigterm
from tests.support.servers import SANDBOXES, EnvoyServer, Upstream, http_status

CONFIG = SANDBOXES / "api-keys" / "envoy.yaml"
PORTS = (10000, 9901)
"""Ports of Envoy in its configuration."""

SERVICE = "http://127.0.0.1:8080/healthcheck"

INSTRUCTIONS = """\
Envoy answers on http://localhost:10000 and asks the service on port 8081 about every request. Try:
  curl -i localhost:10000                              # no key: limited by address
  curl -i localhost:10000 -H 'x-api-key: unknown'      # 401
Create keys with the admin API of the service; README.md has the commands. Stop with Ctrl-C."""


def main() -> int:
    exit_on_sigterm()
    if http_status(SERVICE) != 200:
        print("The service is not there: start it with `make run`, in another terminal.", file=sys.stderr)
        return 1
    try:
        for port in PORTS:
            check_free(port)
        with (
            Upstream() as upstream,
            EnvoyServer(CONFIG, {8000: upstream.port, **{port: port for port in PORTS}}) as envoy,
        ):
            print(INSTRUCTIONS, flush=True)
            while envoy.running:
                time.sleep(0.2)
            print(f"Envoy has ended:\n{envoy.log()[-2000:]}", file=sys.stderr)
            return 1
    except PortTaken as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print()
        return 0


if __name__ == "__main__":
    sys.exit(main())
