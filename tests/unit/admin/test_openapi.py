"""The /docs page."""

from __future__ import annotations

from ratelimit_rls.admin.http.openapi import docs_page


def test_docs_page_escapes_descriptions() -> None:
    about = "One `<a>` **&** two.\n\n* **A <b>.** First\n  line.\n* `**`\n"
    page = docs_page({"info": {"description": about}, "paths": {}, "components": {"schemas": {}}})
    assert "<p>One <code>&lt;a&gt;</code> <b>&amp;</b> two.</p>" in page
    assert "<ul><li><b>A &lt;b&gt;.</b> First\n  line.</li><li><code>**</code></li></ul>" in page
