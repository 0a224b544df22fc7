"""The OpenAPI document and the /docs page."""

from __future__ import annotations

from ratelimit_rls.admin.http.app import documented_app
from ratelimit_rls.admin.http.openapi import docs_page


def test_docs_page_escapes_descriptions() -> None:
    about = "One `<a>` **&** two.\n\n* **A <b>.** First\n  line.\n* `**`\n"
    page = docs_page({"info": {"description": about}, "paths": {}, "components": {"schemas": {}}})
    assert "<p>One <code>&lt;a&gt;</code> <b>&amp;</b> two.</p>" in page
    assert "<ul><li><b>A &lt;b&gt;.</b> First\n  line.</li><li><code>**</code></li></ul>" in page


def test_only_puts_that_can_create_document_201() -> None:
    paths = documented_app().openapi()["paths"]
    documented = {
        path: [status for status in operations["put"]["responses"] if status.startswith("2")]
        for path, operations in paths.items()
        if "put" in operations
    }
    assert documented == {
        "/api/v1/rules/{rule_id}": ["200"],
        "/api/v1/tiers/{name}": ["200", "201"],
        "/api/v1/users/{user_id}": ["200", "201"],
        "/api/v1/users/{user_id}/tier": ["200"],
        "/api/v1/users/{user_id}/block": ["200"],
    }
    created = paths["/api/v1/users/{user_id}"]["put"]["responses"]["201"]
    assert created["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/User"}
    assert {*created["headers"]} == {"ETag", "Location", "Dry-Run", "Idempotency-Replayed"}
