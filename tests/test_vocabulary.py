"""The code and the documentation use the terms of docs/glossary.md, and none of the retired ones."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from ratelimit_rls.admin.http.app import documented_app

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ratelimit_rls"
MODULES = sorted(PACKAGE.rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "lua" / "README.md"])

RETIRED = re.compile(r"\b(doors?|whoever|nobody|somebody|everybody|of late|be it)\b", re.IGNORECASE)
RIDDLES = re.compile(r"(What|Of|How|Whether|Whoever|Who|Likewise|In place of)\b")
RETIRED_NAMES = re.compile(r"\b_?(MOST|LONGEST|LARGEST|SHORTEST|SMALLEST|LEAST)_[A-Z0-9_]+\b")
RETIRED_COMPONENTS = re.compile(r"(Shown|Told|Made|Asked|Forgotten|Healthy|Heavy)")

RETIRED_IDENTIFIERS = re.compile(
    r"asked|doors?|everybody|gone|held|lots?|met|mine|nobody|ours|said|shown|somebody|spoken|tells?|theirs|told|unasked"
    r"|whoever|whose"
)
"""Words that are not part of a name: names say what is requested, displayed, reported, buffered, delayed or matched."""

ALLOWED_IDENTIFIERS = {
    "MET": "the member is named like its value, which `explain` prints",
    "rls_max_held_calls": "a public setting",
    "tell": "a method of Python's file objects",
}
"""Names with a retired word, and why they stay."""

IN_CODE = {
    "batch": "Batch",
    "codec": "Codec",
    "denial cache": "DenialCache",
    "descriptor": "Descriptor",
    "descriptor plan": "DescriptorPlan",
    "entitlement": "Entitlement",
    "fallback": "Fallback",
    "lease": "Lease",
    "pipeline": "Pipeline",
    "plan": "Plan",
    "plan template": "PlanTemplate",
    "prepared plan": "PreparedPlan",
    "repository": "Repository",
    "request cache": "RequestCache",
    "response template": "ResponseTemplate",
    "throttle queue": "ThrottleQueue",
    "unit of work": "UnitOfWork",
}
"""Terms of the glossary that are classes."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def docstrings_and_classes() -> tuple[list[tuple[Path, int, str]], dict[str, list[str]]]:
    """Return path, line and text of every docstring, those of constants included, and the modules of every class."""
    docstrings, classes = [], defaultdict(list)
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    docstrings.append((path, node.lineno, text))
                case ast.ClassDef():
                    classes[node.name].append(name_of(path))
    return docstrings, classes


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every comment and string: messages, help, log events and docstrings."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield token.start[0], token.string


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page outside of code blocks."""
    is_code = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, re.sub(r"`[^`]*`|<!--.*?-->", "", line)


def retired(path: Path, lines: Iterable[tuple[int, str]]) -> list[str]:
    return [f"{name_of(path)}:{line}: {found[0]}" for line, text in lines if (found := RETIRED.search(text))]


def test_modules_use_no_retired_word() -> None:
    assert [found for path in MODULES for found in retired(path, texts(path))] == []


def test_pages_use_no_retired_word() -> None:
    pages = [path for path in PAGES if path.name != "glossary.md"]
    assert [found for path in pages for found in retired(path, prose(path))] == []


def test_docstrings_say_what_the_object_is_or_does() -> None:
    docstrings, _ = docstrings_and_classes()
    found = [(name_of(path), line, text) for path, line, text in docstrings if RIDDLES.match(text)]
    assert [f"{name}:{line}: {text[:60]}" for name, line, text in found] == []


def identifiers(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every name of a variable, attribute, argument, function, class or import."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.keyword(arg=str(name)) | ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield node.lineno, name
            case ast.alias(name=name, asname=alias):
                yield node.lineno, alias or name.rpartition(".")[2]


def words(identifier: str) -> set[str]:
    """Return the words of a name in snake_case, CamelCase or capitals."""
    return set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", identifier).lower().split("_"))


def test_identifiers_use_no_retired_word() -> None:
    found = {
        f"{name_of(path)}:{line}: {name}"
        for path in MODULES
        for line, name in identifiers(path)
        if name not in ALLOWED_IDENTIFIERS and any(map(RETIRED_IDENTIFIERS.fullmatch, words(name)))
    }
    assert sorted(found) == []


def test_allowed_identifiers_are_in_use() -> None:
    used = {name for path in MODULES for _, name in identifiers(path)}
    assert [name for name in ALLOWED_IDENTIFIERS if name not in used] == []


def test_words_of_an_identifier() -> None:
    assert words("_held_bytes") == {"", "held", "bytes"}
    assert words("MAX_LINES_SHOWN") == {"max", "lines", "shown"}
    assert words("ToldOnce") == {"told", "once"}


def test_bounds_are_named_max_and_min() -> None:
    files = [path for folder in ("ratelimit_rls", "tests", "bench", "tools") for path in (ROOT / folder).rglob("*.py")]
    assert [name_of(path) for path in files if path != Path(__file__) and RETIRED_NAMES.search(path.read_text())] == []


def test_openapi_components_are_plain_nouns() -> None:
    components = documented_app().openapi()["components"]["schemas"]
    assert [name for name in components if RETIRED_COMPONENTS.search(name)] == []


def test_glossary_and_code_share_their_terms() -> None:
    _, classes = docstrings_and_classes()
    terms = set(re.findall(r"^\| ([a-z][^|]*?) \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE))
    listed = {term.strip() for row in terms for term in row.split(",")}
    assert [term for term in IN_CODE if term not in listed] == []
    assert [name for name in IN_CODE.values() if name not in classes] == []
