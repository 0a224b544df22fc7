"""`python -m tools.dashboards` writes the dashboards of the chart; a test fails if they are outdated."""

from __future__ import annotations

import json
from pathlib import Path

from tools.dashboards.overview import OVERVIEW
from tools.dashboards.rules import RULES
from tools.dashboards.store import STORE

SHIPPED = Path(__file__).parents[2] / "charts" / "ratelimit-rls" / "dashboards"


def files() -> dict[Path, str]:
    """Return the path and the content of each file."""
    named = {"overview": OVERVIEW, "rules": RULES, "store": STORE}
    return {
        SHIPPED / f"{name}.json": json.dumps(dashboard.to_json(), indent=2, ensure_ascii=False) + "\n"
        for name, dashboard in named.items()
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
