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
from ratelimit_rls.telemetry.instruments import INSTRUMENTS, MergeRule
from tests.test_log_events import all_log_calls

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ratelimit_rls"
MODULES = sorted(PACKAGE.rglob("*.py"))
SIDE_FILES = sorted(
    path
    for folder in ("envoy", "descriptors", "lua", "charts", "tools", "bench")
    for pattern in ("*.py", "*.yaml", "*.lua", "*.sh", "*.tpl", "*.txt", "*.md")
    for path in (ROOT / folder).rglob(pattern)
)
"""Files beside the package whose comments, messages and values users and engineers read."""

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "lua" / "README.md"])

RETIRED = re.compile(r"\b(doors?|whoever|nobody|somebody|everybody|of late|be it)\b", re.IGNORECASE)
RETIRED_TEXT = re.compile(rf"{RETIRED.pattern}|\btold\b", re.IGNORECASE)
"""Words that modules and pages do not have, in identifiers of problems and in messages either."""

RIDDLES = re.compile(r"(What|Of|How|Whether|Whoever|Who|Likewise|In place of)\b")
RETIRED_NAMES = re.compile(r"\b_?(MOST|LONGEST|LARGEST|SHORTEST|SMALLEST|LEAST)_[A-Z0-9_]+\b|\b_most_[a-z0-9_]+\b")
REFUSED = re.compile(r"refus(?:e|ed|es|ing|als?)", re.IGNORECASE)
ALLOWED_REFUSED = re.compile(
    r"(on_invalid|on_missing)(: |`: )refuse|or refuse: 401|refused?[-_]streams?|connections? (are )?refused"
    r"|audit[-_]refusals[-_]per[-_]minute|UnauthenticatedPolicy\.REFUSE|REFUSE = \"refuse\"|server may refuse",
    re.IGNORECASE,
)
"""Where "refused" is the term of HTTP/2 or TCP, a YAML value or a public setting."""

RETIRED_PUBLIC_WORDS = re.compile(
    r"\b(refus\w*|remembered|forgotten|asked|told|held|away|room|unasked|hottest|in_hand|left_out|late|lines)\b"
    r"|_(total|room_full|in_hand)\b"
)
"""Words that names and descriptions of metrics, log events and operations of the admin API do not have."""

RETIRED_COMPONENTS = re.compile(r"(Denial$|Shown|Told|Made|Asked|Forgotten|Healthy|Heavy)")

RETIRED_IDENTIFIERS = re.compile(
    r"alike|asked|desk|doors?|everybody|fired|gone|held|lots?|met|mine|nobody|ours|outlines?|said|scribe|shown|siblings?"
    r"|somebody|spoken|standings?|tells?|theirs|told|unasked|visits?|whoever|whose"
)
"""Words that are not part of a name: names say what is requested, displayed, reported, buffered, delayed or matched."""

PREVIOUS_RELEASE = ROOT / "tests" / "compatibility" / "previous_store.py"
"""It uses the names of an earlier version of the package."""

ALLOWED_IDENTIFIERS = {
    "rls_max_held_calls": "a public setting",
    "tell": "a method of Python's file objects",
}
"""Names with a retired word, and why they stay."""

CODE = [
    path for folder in ("ratelimit_rls", "tests", "tools", "bench") for path in sorted((ROOT / folder).rglob("*.py"))
]

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


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every docstring, those of constants included."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


@cache
def classes() -> dict[str, list[str]]:
    """Return the modules of every class of the package."""
    found = defaultdict(list)
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(name_of(path))
    return found


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
    return [f"{name_of(path)}:{line}: {found[0]}" for line, text in lines if (found := RETIRED_TEXT.search(text))]


def test_modules_use_no_retired_word() -> None:
    assert [found for path in MODULES for found in retired(path, texts(path))] == []


def test_pages_use_no_retired_word() -> None:
    pages = [path for path in PAGES if path.name != "glossary.md"]
    assert [found for path in pages for found in retired(path, prose(path))] == []


def test_files_beside_the_package_use_no_retired_word() -> None:
    allowed = re.compile(r"front-door|nobody$|default: nobody")
    found = [
        f"{name_of(path)}:{number}: {hit[0]}"
        for path in SIDE_FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (hit := RETIRED.search(line)) and not allowed.search(line)
    ]
    assert found == []


def test_calls_are_denied_or_rejected_but_not_refused() -> None:
    package = [path for path in MODULES if "h2" not in path.parts]
    found = [
        f"{name_of(path)}:{number}: {line.strip()[:80]}"
        for path in [*package, *SIDE_FILES, *PAGES]
        if path.name not in ("glossary.md", "CHANGELOG.md", "drain.md")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if REFUSED.search(ALLOWED_REFUSED.sub("", line))
    ]
    assert found == []


def test_metrics_use_no_retired_word() -> None:
    own = [one for one in INSTRUMENTS if not one.reference]
    texts_of_metrics = [text for one in own for text in (one.name.replace("_", " "), one.about, *one.attributes)]
    assert [
        text for text in texts_of_metrics if RETIRED_PUBLIC_WORDS.search(text.replace("RLS_MAX_HELD_CALLS", ""))
    ] == []


def test_merge_rules_are_named_max_and_min() -> None:
    assert {rule.name for rule in MergeRule} == {"SUM", "MAX", "MIN"}


def test_log_events_use_no_retired_word() -> None:
    events = [(name_of(path), ast.unparse(call.args[0])) for path, call in all_log_calls()]
    found = {event for event in events if RETIRED_PUBLIC_WORDS.search(event[1].replace("_", " "))}
    assert sorted(found) == []


def test_operations_and_fields_of_the_admin_api_use_no_retired_word() -> None:
    document = documented_app().openapi()
    operations = [one["operationId"] for path in document["paths"].values() for one in path.values()]
    schemas = document["components"]["schemas"]
    fields = [f"{name}.{field}" for name, schema in schemas.items() for field in schema.get("properties", {})]
    found = [name for name in [*operations, *fields] if RETIRED_PUBLIC_WORDS.search(re.sub(r"[_.]", " ", name))]
    assert found == []


def test_diagnostics_do_not_continue_with_it_is() -> None:
    modules = [path for path in MODULES if path.parent.name in ("rules", "yaml", "simulation")]
    found = [
        f"{name_of(path)}:{line}: {text[:80]}"
        for path in modules
        for line, text in texts(path)
        if not text.startswith(("#", '"""')) and re.search(r"(^f?[\"']|; )it is ", text)
    ]
    assert found == []


def test_docstrings_say_what_the_object_is_or_does() -> None:
    found = [
        f"{name_of(path)}:{line}: {text[:60]}"
        for path in CODE
        for line, text in docstrings(path)
        if RIDDLES.match(text)
    ]
    assert found == []


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
        for path in CODE
        for line, name in identifiers(path)
        if path != PREVIOUS_RELEASE
        and name not in ALLOWED_IDENTIFIERS
        and any(map(RETIRED_IDENTIFIERS.fullmatch, words(name)))
    }
    assert sorted(found) == []


def test_allowed_identifiers_are_in_use() -> None:
    used = {name for path in CODE for _, name in identifiers(path)}
    assert [name for name in ALLOWED_IDENTIFIERS if name not in used] == []


def test_words_of_an_identifier() -> None:
    assert words("_held_bytes") == {"", "held", "bytes"}
    assert words("MAX_LINES_SHOWN") == {"max", "lines", "shown"}
    assert words("ToldOnce") == {"told", "once"}


def test_bounds_are_named_max_and_min() -> None:
    files = [path for path in CODE if path != Path(__file__)]
    assert [name_of(path) for path in files if RETIRED_NAMES.search(path.read_text())] == []


def test_class_names_have_one_meaning() -> None:
    """Schemas of the admin API have the names of what they show."""
    elsewhere = {name: [path for path in paths if "/schemas/" not in path] for name, paths in classes().items()}
    assert {name: paths for name, paths in elsewhere.items() if len(paths) > 1} == {}


def test_openapi_components_are_plain_nouns() -> None:
    components = documented_app().openapi()["components"]["schemas"]
    assert [name for name in components if RETIRED_COMPONENTS.search(name)] == []


def test_glossary_and_code_share_their_terms() -> None:
    terms = set(re.findall(r"^\| ([a-z][^|]*?) \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE))
    listed = {term.strip() for row in terms for term in row.split(",")}
    assert [term for term in IN_CODE if term not in listed] == []
    assert [name for name in IN_CODE.values() if name not in classes()] == []
