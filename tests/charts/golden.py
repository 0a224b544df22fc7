"""Golden files: the exact rendering of each case, in golden/<case>.yaml.

`python -m tests.charts.golden` rewrites the files; review the changes before committing them.
"""

from __future__ import annotations

from pathlib import Path

from tests.charts import helm

FOLDER = Path(__file__).parent / "golden"

_FILES_OF_THE_CHART = {
    "templates/dashboards.yaml": "\ndata:",
    "templates/configmap-alerts.yaml": "\ndata:",
    "templates/prometheusrule.yaml": "\nspec:",
}
"""Templates that include whole files: the part after the mark is compared with these files instead."""


def text(case: str) -> str:
    documents = []
    for source, found in helm.sources(helm.rendered(case)).items():
        mark = _FILES_OF_THE_CHART.get(source)
        documents += [f"{document.partition(mark)[0]}\n" if mark else document for document in found]
    return "---\n" + "---\n".join(documents)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.yaml"):
        path.unlink()
    for case in helm.cases():
        (FOLDER / f"{case}.yaml").write_text(text(case))
