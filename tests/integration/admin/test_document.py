"""The OpenAPI document is complete, and responses conform to it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import get_args

import pytest

from ratelimit_rls.admin.http.app import documented_app
from ratelimit_rls.admin.http.schemas import requests
from ratelimit_rls.core.model import Algorithm, Unit
from ratelimit_rls.rules.limits_json import LIMIT_KEYS
from ratelimit_rls.transport.http.server import HttpServer
from tests.integration.admin.admin_client import BOOTSTRAP_TOKEN, Clock, open_admin_api
from tools.reference.admin_api import admin_api
from tools.reference.generate import NOTICE

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)
CONFIG = """\
[checks.negative_data_rejection]
expected-statuses = ["400", "401", "403", "404", "405", "409", "412", "413", "422", "431"]
"""
SEED_004 = """\
GET /api/v1/rules
GET /api/v1/rules/{rule_id}
POST /api/v1/rules
PUT /api/v1/rules/{rule_id}
DELETE /api/v1/rules/{rule_id}
GET /api/v1/users/{user_id}/limits
PUT /api/v1/users/{user_id}/tier
POST /api/v1/users/{user_id}/override
"""


def test_required_endpoints_exist() -> None:
    paths = documented_app().openapi()["paths"]
    there = {f"{method.upper()} {path}" for path, operations in paths.items() for method in operations}
    assert there >= set(SEED_004.splitlines())


def test_every_operation_has_a_one_line_summary() -> None:
    operations = [one for path in documented_app().openapi()["paths"].values() for one in path.values()]
    summaries = [operation["summary"] for operation in operations]
    assert all(summary and "\n" not in summary for summary in summaries)
    assert len(set(summaries)) == len(summaries)


def test_every_schema_field_and_parameter_has_a_description() -> None:
    document = documented_app().openapi()
    schemas = document["components"]["schemas"]
    fields = {
        f"{name}.{field}": one
        for name, schema in schemas.items()
        for field, one in schema.get("properties", {}).items()
    }
    operations = [one for path in document["paths"].values() for one in path.values()]
    parameters = {
        f"{one['operationId']}.{each['name']}": each for one in operations for each in one.get("parameters", ())
    }
    assert len(fields) > 100 < len(parameters)
    assert [name for name, one in (schemas | fields | parameters).items() if not one.get("description")] == []


def test_admin_api_page_is_current() -> None:
    path = Path(__file__).parents[3] / "docs" / "admin-api.md"
    assert path.read_text() == admin_api(NOTICE), "the code has changed; `make docs` writes the page anew"


def test_limit_schema_matches_rules() -> None:
    assert set(requests.Limit.model_fields) == set(LIMIT_KEYS)
    assert set(get_args(requests.Limit.model_fields["unit"].annotation)) == {
        unit.name.lower() for unit in Unit if unit is not Unit.UNKNOWN
    }
    algorithms, _ = get_args(requests.Limit.model_fields["algorithm"].annotation)
    assert set(get_args(algorithms)) == {algorithm.value for algorithm in Algorithm}


class FastClock(Clock):
    """Advances so far with each call that no rate limit is reached."""

    def __call__(self) -> float:
        self.now_s += 10
        return self.now_s


@pytest.mark.slow
@pytest.mark.parametrize("upgraded_url", ["postgresql"], indirect=True)  # faster than SQLite
async def test_responses_conform_to_the_openapi_document(upgraded_url: str, tmp_path: Path) -> None:
    """Sends random valid and invalid requests to every operation."""
    config = tmp_path / "schemathesis.toml"
    config.write_text(CONFIG)
    async with open_admin_api(upgraded_url, FastClock()) as api:
        server = HttpServer(api.app)
        await server.start("127.0.0.1", 0)
        command = ["--config-file", str(config), "run", f"http://127.0.0.1:{server.port}/openapi.json"]
        command += ["--header", f"Authorization: Bearer {BOOTSTRAP_TOKEN}", "--checks", ",".join(CHECKS)]
        command += ["--phases", "examples,fuzzing", "--max-examples", "4", "--no-color"]
        run = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("schemathesis")),
            *command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=tmp_path,
        )
        output, _ = await run.communicate()
        await server.stop()
    result = "\n".join(line[:500] for line in output.decode().splitlines())
    assert run.returncode == 0, result
    assert "40 passed" in result
