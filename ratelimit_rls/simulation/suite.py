"""Reader of test files: the rules under test, and the test cases.

descriptors: per_user.yaml          the rules, relative to this file; or a list of files
domain: demo                        the default for all tests
tests:
  - name: the sixth request in a minute is denied
    steps:
      - {descriptor: {user: alice}, times: 5, expect: ok, remaining: 0}
      - {at: 1s, descriptor: {user: alice}, expect: over_limit, retry_after: 59s}
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ratelimit_rls.core.tree import Tree
from ratelimit_rls.errors import Problem, RulesError
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.rules.source_document import SourceDocument, load
from ratelimit_rls.rules.sources.files import RulesFiles
from ratelimit_rls.simulation.case import Case, CaseStep, Suite
from ratelimit_rls.simulation.case_step import CaseContext, read_step
from ratelimit_rls.simulation.clock import DEFAULT_START_US, parse_timestamp
from ratelimit_rls.yaml.findings import Findings
from ratelimit_rls.yaml.nodes import YamlList, YamlScalar, excerpt
from ratelimit_rls.yaml.strict_mapping import StrictMapping

ENDINGS = (".test.yaml", ".test.yml")

_SUITE_KEYS = ("descriptors", "merge_domains", "domain", "start", "tests")
_CASE_KEYS = ("name", "domain", "start", "steps")


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Return the test files in `paths`: every file, and all *.test.yaml and *.test.yml of directories."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(file for file in path.rglob("*") if file.name.endswith(ENDINGS) and file.is_file())
        else:
            found.append(path)
    return list(dict.fromkeys(found))


def load_suites(files: Sequence[Path]) -> list[Suite]:
    """Load test files. Raise RulesError with all errors in them and in their rules."""
    suites: list[Suite] = []
    problems: set[Problem] = set()
    for file in files:
        try:
            suites.append(read_suite(file))
        except RulesError as error:
            problems.update(error.problems)
    if problems:
        raise RulesError(problems)
    return suites


def read_suite(file: Path) -> Suite:
    (source,) = RulesFiles([file]).read()
    found = Findings(source.name)
    root = load(source)
    if root is None:
        raise RulesError([Problem(source.name, 1, 1, "the file is empty; write 'descriptors:' and 'tests:'")])
    fields = StrictMapping(root, _SUITE_KEYS, found)
    rules = _rules(fields, file, found)
    tree = _tree(rules, fields.boolean("merge_domains"), found) if not found.errors else None
    start_us = fields.read("start", parse_timestamp)
    domain = fields.text("domain")
    fields.required_list("tests", "tests: [{name: …, steps: […]}]")
    cases = [
        _case(StrictMapping(node, _CASE_KEYS, found), domain, start_us, tree, found) for node in fields.items("tests")
    ]
    if found.errors or tree is None:
        raise RulesError(set(found.errors))
    return Suite(source.name, tuple(Path(rule.name) for rule in rules), tree, tuple(cases))


def _tree(rules: Sequence[SourceDocument], merge_domains: bool, found: Findings) -> Tree | None:
    """Compile the rules; None after errors, which are reported together with those in the tests."""
    try:
        return compile_documents(rules, merge_domains=merge_domains).tree
    except RulesError as error:
        found.errors += error.problems
        return None


def _rules(fields: StrictMapping, file: Path, found: Findings) -> list[SourceDocument]:
    node = fields.required("descriptors", "descriptors: <the rules file beside this one>")
    if node is None:
        return []
    sources: dict[str, SourceDocument] = {}
    for item in node.items if isinstance(node, YamlList) else (node,):
        if not isinstance(item, YamlScalar):
            found.error(item, f"descriptors: {excerpt(item)} is not a file; name one or a list of them")
            continue
        path = file.parent / item.text
        if path.is_file():
            sources.update((source.name, source) for source in RulesFiles([path]).read())
        else:
            found.error(item, f"descriptors: there is no file {path}; names are relative to this file")
    return list(sources.values())


def _case(fields: StrictMapping, domain: str | None, start_us: int | None, tree: Tree | None, found: Findings) -> Case:
    own = fields.read("start", parse_timestamp)
    start_us = own if own is not None else start_us if start_us is not None else DEFAULT_START_US
    fields.required("name", "name: <name of the test>")
    fields.required_list("steps", "steps: [{descriptor: {user: alice}, expect: ok}]")
    domain = fields.text("domain") or domain
    if not domain and not fields.has("domain"):
        fields.required("domain", "domain: <as Envoy's filter sends it>")
    setting = CaseContext(start_us, domain or "", tree if domain else None)
    steps: list[CaseStep] = []
    for node in fields.items("steps"):
        step = read_step(node, setting, steps[-1].at_us if steps else start_us, found)
        steps += [step] if step else []
    return Case(found.position(fields.node), fields.text("name") or "", domain or "", start_us, tuple(steps))
