"""Upstream of Envoy in the sandboxes, on port 8000: responds with 200, and reports `x-tokens` as usage."""

from __future__ import annotations

import signal

from tests.support.sandboxes import exit_on_sigterm
from tests.support.servers import Upstream

exit_on_sigterm()
with Upstream(8000) as upstream:
    print(f"answering on 127.0.0.1:{upstream.port}, Ctrl-C ends it", flush=True)
    try:
        signal.pause()
    except KeyboardInterrupt:
        print(f"{upstream.requests} requests")
