"""Rules reload under load: valid rules are applied, invalid ones are not, and no call fails."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.grpc_client import Http
from tests.support.servers import SANDBOXES, EnvoyServer, Service, Upstream

pytestmark = pytest.mark.e2e

RULES = """\
domain: edge
descriptors:
  - key: path
    value: /limited
    rate_limit: {{unit: year, requests_per_unit: {limit}}}
"""


class Load:
    """Clients that send calls continuously; `latest` is the last result, `seen` all results."""

    def __init__(self, url: str, clients: int) -> None:
        self.seen: Counter[int] = Counter()
        self.latest = 0
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(url,)) for _ in range(clients)]

    def _ask(self, url: str) -> None:
        with Http(url) as client:
            while not self._stopped.is_set():
                status = client.get("/limited").status
                self.seen[status] += 1
                self.latest = status

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            for thread in self._threads:
                thread.join()


@pytest.fixture(params=["file written in place", "file replaced", "ConfigMap swapped"])
def edited(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, object]:
    """A rules directory, and a function that replaces the text of its file."""
    directory = tmp_path / "rules"
    directory.mkdir()

    def in_place(text: str) -> None:
        (directory / "edge.yaml").write_text(text)

    def replaced(text: str) -> None:
        (tmp_path / "new.yaml").write_text(text)
        (tmp_path / "new.yaml").rename(directory / "edge.yaml")

    def swapped(text: str) -> None:
        # Like the kubelet: a new dated directory, then one rename of the ..data link.
        generation = directory / f"..2026_{len(list(directory.iterdir()))}_{abs(hash(text))}"
        generation.mkdir()
        (generation / "edge.yaml").write_text(text)
        (directory / "..data_tmp").symlink_to(generation.name)
        (directory / "..data_tmp").rename(directory / "..data")
        if not (directory / "edge.yaml").is_symlink():
            (directory / "edge.yaml").symlink_to("..data/edge.yaml")

    edits = {"file written in place": in_place, "file replaced": replaced, "ConfigMap swapped": swapped}
    return directory, edits[request.param]


def test_valid_edit_is_applied_and_invalid_edit_is_not_under_load(
    upstream: Upstream, edited: tuple[Path, object]
) -> None:
    directory, write = edited
    assert callable(write)
    write(RULES.format(limit=1_000_000))
    service = Service({"RLS_RULES": directory})
    where = {8000: upstream.port, 8081: service.grpc_port}
    config = SANDBOXES / "rls-http" / "envoy.yaml"
    # failure_mode_deny turns a failed or late call into a 500, which the load detects.
    values = {"failure_mode_deny": True, "timeout": "2s"}
    with service, EnvoyServer(config, where, values) as proxy:
        load = Load(proxy.url, clients=4)
        with load.running():
            proxy.wait_until(lambda: load.seen[200] > 50, "passes")
            write(RULES.format(limit=10))
            proxy.wait_until(lambda: load.latest == 429, "denies after the edit")

            write("domain: edge\ndescriptors: [{key: path, rate_limit: {unit: fortnight}}]\n")
            service.wait_until(lambda: "fortnight" in service.log(), "says what is wrong with the bad edit")
            denied = load.seen[429]
            proxy.wait_until(lambda: load.seen[429] > denied + 20, "still denies after the bad edit")

            write(RULES.format(limit=2_000_000))
            proxy.wait_until(lambda: load.latest == 200, "passes again")

        assert set(load.seen) == {200, 429}
        assert proxy.stat(r"cluster\.upstream\.ratelimit\.error") == 0
