"""`python -m docs.dashboards` writes the dashboards that the chart ships; a test says when to."""

from __future__ import annotations

import json
from pathlib import Path

from docs.dashboards.overview import OVERVIEW
from docs.dashboards.rules import RULES
from docs.dashboards.store import STORE

SHIPPED = Path(__file__).parents[2] / "charts" / "ratelimit-rls" / "dashboards"


def files() -> dict[Path, str]:
    """Each file and what should be in it."""
    named = {"overview": OVERVIEW, "rules": RULES, "store": STORE}
    return {
        SHIPPED / f"{name}.json": json.dumps(dashboard.to_json(), indent=2, ensure_ascii=False) + "\n"
        for name, dashboard in named.items()
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
