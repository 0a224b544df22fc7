"""/docs: every operation on one page that needs nothing but itself."""

from __future__ import annotations

import html
import json
import re
from typing import Any

_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>ratelimit-rls admin API</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
summary { cursor: pointer; padding: .2rem 0 } code, pre { font: 13px/1.4 ui-monospace, monospace }
pre { background: #f6f6f6; padding: .6rem; overflow: auto; max-height: 24rem }
.m { display: inline-block; width: 4.5rem; font-weight: 600 }
.r { color: #777 } h2 { margin: 2rem 0 .3rem; text-transform: capitalize }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd } pre { background: #222 } }
</style></head><body><h1>ratelimit-rls admin API</h1>
<p>The whole document, for programs: <a href="/openapi.json">/openapi.json</a>.</p>
"""

_BULLET = "* "
_BOLD = re.compile(r"\*\*([^*]+)\*\*")
_CODE = re.compile("`([^`]+)`")


def docs_page(document: dict[str, Any]) -> str:
    by_tag: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            (tag,) = operation["tags"]
            by_tag.setdefault(tag, []).append(_operation(method, path, operation))
    about = "".join(_paragraph(part) for part in document["info"]["description"].strip().split("\n\n"))
    sections = "".join(f"<h2>{_text(tag)}</h2>{''.join(operations)}" for tag, operations in by_tag.items())
    schemas = _text(json.dumps(document["components"]["schemas"], indent=2))
    return (
        f"{_HEAD}{about}{sections}<h2>Schemas</h2><details><summary>All</summary><pre>{schemas}</pre></details></body>"
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    role = operation["security"][0]["token"][0] if operation.get("security") else "no token"
    head = f'<span class="m">{method.upper()}</span><code>{_text(path)}</code> {_words(operation["summary"])}'
    shown = {name: operation[name] for name in ("parameters", "requestBody", "responses") if name in operation}
    body = f"<p>{_words(operation.get('description', ''))}</p><pre>{_text(json.dumps(shown, indent=2))}</pre>"
    return f'<details><summary>{head} <span class="r">({_text(role)})</span></summary>{body}</details>'


def _paragraph(text: str) -> str:
    if not text.startswith(_BULLET):
        return f"<p>{_words(text)}</p>"
    items = text.removeprefix(_BULLET).split(f"\n{_BULLET}")
    return f"<ul>{''.join(f'<li>{_words(item)}</li>' for item in items)}</ul>"


def _words(text: str) -> str:
    """As much of Markdown as our own descriptions use."""
    return _BOLD.sub(r"<b>\1</b>", _CODE.sub(r"<code>\1</code>", _text(text)))


def _text(text: str) -> str:
    return html.escape(text)
