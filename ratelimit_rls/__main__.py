"""Entry point of `python -m ratelimit_rls`, the same command as `ratelimit-rls`."""

from __future__ import annotations

import sys

from ratelimit_rls.cli import main

if __name__ == "__main__":
    sys.exit(main())
