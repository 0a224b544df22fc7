"""What stands behind Envoy in the sandboxes, on port 8000: 200 for everything, and `x-tokens` as usage it reports."""

from __future__ import annotations

import signal

from tests.sandboxes import end_as_by_ctrl_c
from tests.servers import Upstream

end_as_by_ctrl_c()
with Upstream(8000) as upstream:
    print(f"answering on 127.0.0.1:{upstream.port}, Ctrl-C ends it", flush=True)
    try:
        signal.pause()
    except KeyboardInterrupt:
        print(f"{upstream.requests} requests")
