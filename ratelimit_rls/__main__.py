"""`python -m ratelimit_rls` is `ratelimit-rls`."""

from __future__ import annotations

import sys

from ratelimit_rls.cli import main

if __name__ == "__main__":
    sys.exit(main())
