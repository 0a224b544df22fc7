"""What `make envoy` runs: a real Envoy before the service of `make run`, which it asks by ext_authz who is calling.

The set-up is that of api-keys, with an upstream that says hello in this process. Ctrl-C ends it.
"""

from __future__ import annotations

import sys
import time

from tests.sandboxes import PortTaken, check_free, end_as_by_ctrl_c
from tests.servers import SANDBOXES, EnvoyServer, Upstream, http_status

CONFIG = SANDBOXES / "api-keys" / "envoy.yaml"
PORTS = (10000, 9901)
"""Envoy's own, where its configuration has them."""

SERVICE = "http://127.0.0.1:8080/healthcheck"

WORDS = """\
Envoy answers on http://localhost:10000 and asks the service on port 8081 about every request. Try:
  curl -i localhost:10000                              # nobody in particular: limited by the address
  curl -i localhost:10000 -H 'x-api-key: nobody-s'     # 401
Keys are made over the admin API of the service; README.md has the commands. Ctrl-C ends this."""


def main() -> int:
    end_as_by_ctrl_c()
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
            print(WORDS, flush=True)
            while envoy.running:
                time.sleep(0.2)
            print(f"Envoy has ended:\n{envoy.log()[-2000:]}", file=sys.stderr)
            return 1
    except PortTaken as fault:
        print(fault, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print()
        return 0


if __name__ == "__main__":
    sys.exit(main())
