"""The admin API of a whole process: what it says of a caller is what the service does."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.client import ask, rate_limit_request
from tests.launched import Watched
from tests.process import free_port

pytestmark = pytest.mark.slow

TOKEN = "the-first-token-of-all"
RULES = """\
domain: edge
identity:
  entries: [{key: x-api-key, kind: api_key, becomes: [user]}]
  on_invalid: refuse
descriptors: [{key: user, limits_of: user, rate_limit: {unit: day, requests_per_unit: 5}}]
"""


def test_credentials_count_at_both_for_one_caller(tmp_path: Path) -> None:
    rules, port = tmp_path / "edge.yaml", free_port()
    rules.write_text(RULES)
    settings = {
        "RLS_RULES": rules,
        "RLS_DATABASE_URL": f"sqlite:///{tmp_path}/records.db",
        "RLS_ADMIN_PORT": port,
        "RLS_ADMIN_TOKEN": TOKEN,
    }
    url, headers = f"http://127.0.0.1:{port}/api/v1", {"Authorization": f"Bearer {TOKEN}"}
    with Watched(settings) as service, httpx.Client(base_url=url, headers=headers) as admin:
        admin.put("/users/alice", json={}).raise_for_status()
        key = admin.post("/keys", json={"user_id": "alice"}).raise_for_status().json()["key"]
        asked = {"domain": "edge", "descriptors": [{"entries": [{"key": "x-api-key", "value": key}]}]}
        service.wait_until(lambda: admin.post("/counters/peek", json=asked).is_success, "knows the key")
        for left in (4, 2):
            told = admin.post("/decisions/check", json=asked).json()["descriptors"][0]
            assert (told["rule"], told["limits"][0]["remaining"]) == ("edge.user", left)
            answer = ask(service.grpc_address, rate_limit_request("edge", {"x-api-key": key}))
            assert answer.statuses[0].limit_remaining == left - 1
        assert admin.post("/counters/reset", json=asked).json()["looked_for"] == 1
        assert (
            ask(service.grpc_address, rate_limit_request("edge", {"x-api-key": key})).statuses[0].limit_remaining == 4
        )
        assert key not in service.log() + admin.get("/audit").text
