"""The previous release from the history of this repository: its service as a process, and its store."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import pytest

from ratelimit_rls.core.model import DescriptorPlan, Penalty, Plan, Reading, Step, StoreResult, Watcher
from tests.support.service_process import ServiceProcess

COMMIT = "ce305a7"
ROOT = Path(__file__).parents[2]


def unpack(directory: Path) -> Path:
    """Return a folder with the package and the scripts of the previous release. Skips without it in the history."""
    inside = ["git", "-C", str(ROOT)]
    if subprocess.run([*inside, "cat-file", "-e", f"{COMMIT}^{{commit}}"], capture_output=True, check=False).returncode:
        pytest.skip(f"the previous release, {COMMIT}, is not in this clone: git fetch --unshallow")
    archive = subprocess.run([*inside, "archive", COMMIT, "ratelimit_rls", "lua"], capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(directory, filter="data")
    where = [sys.executable, "-c", "import ratelimit_rls; print(ratelimit_rls.__file__)"]
    used = subprocess.run(where, env=variables(directory), capture_output=True, text=True, check=True).stdout
    assert Path(used).is_relative_to(directory), used
    return directory


def variables(package: Path) -> dict[str, str]:
    """Return variables with which Python imports that package, and not that of this checkout."""
    return {"PYTHONPATH": str(package), "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}


class PreviousService(ServiceProcess):
    def __init__(self, package: Path, environment: Mapping[str, object]) -> None:
        untraced = {name: None for name in os.environ if name.startswith("COVERAGE_")}
        super().__init__({**environment, **variables(package), **untraced})


class PreviousStore:
    """The store of the previous release with a manual clock, `now_us`, on a single server."""

    def __init__(self, package: Path, port: int) -> None:
        self.now_us = 0
        script = Path(__file__).with_name("previous_store.py")
        self._process = subprocess.Popen(
            [sys.executable, script, str(port)],
            env={"PATH": os.environ.get("PATH", ""), **variables(package)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def spend(
        self,
        plan: Plan,
        *,
        max_wait_us: int | None = None,
        request_id: str = "",
        take: int = 0,
        refund: tuple[int, int] | None = None,
    ) -> list[StoreResult]:
        call = {
            "now_us": self.now_us,
            "keys": [key.decode() for key in plan.keys],
            "descriptors": [_descriptor(one) for one in plan.template.descriptor_plans],
            "max_wait_us": max_wait_us,
            "request_id": request_id,
            "take": take,
            "refund": refund,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the store of {COMMIT} has ended, see stderr"
        denied, at_us, readings, granted, replayed = json.loads(line)
        result = StoreResult.of(denied, at_us, [Reading(*one) for one in readings], replayed=replayed)
        return [result._replace(granted=granted)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def _descriptor(plan: DescriptorPlan) -> object:
    return [_step(one) for one in plan.steps], [_watcher(one) for one in plan.watchers]


def _step(step: Step) -> object:
    limit = step.limit
    return (
        *(limit.requests_per_unit, int(limit.unit), limit.algorithm.value, limit.burst),
        *(step.cost, step.charge.value, step.shadow_mode, step.quota_mode, step.max_delay_us),
    )


def _watcher(watcher: Watcher) -> object:
    if isinstance(watcher, Penalty):
        return watcher.within_us, watcher.after, watcher.multipliers
    return (watcher.permille,)
