"""A test file as typed values: which rules are tried, and what is asked of them when.

descriptors: per_user.yaml          the rules, beside this file; or a list of files
domain: demo                        of every test that names no other
tests:
  - name: the sixth request in a minute is refused
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
from ratelimit_rls.rules.fields import Fields
from ratelimit_rls.rules.grammar import Findings
from ratelimit_rls.rules.load import Source, load
from ratelimit_rls.rules.node import YamlList, YamlScalar, excerpt
from ratelimit_rls.rules.sources.files import RulesFiles
from ratelimit_rls.trial.case import Case, CaseStep, Suite
from ratelimit_rls.trial.moments import START_US, parse_moment
from ratelimit_rls.trial.step import Setting, read_step

ENDINGS = (".test.yaml", ".test.yml")

_SUITE_KEYS = ("descriptors", "merge_domains", "domain", "start", "tests")
_CASE_KEYS = ("name", "domain", "start", "steps")


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The test files among `paths`: every file, and of directories what ends in .test.yaml or .test.yml."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(file for file in path.rglob("*") if file.name.endswith(ENDINGS) and file.is_file())
        else:
            found.append(path)
    return list(dict.fromkeys(found))


def load_suites(files: Sequence[Path]) -> list[Suite]:
    """Raises RulesError with everything that is wrong in any of them, or in the rules they are about."""
    suites: list[Suite] = []
    problems: set[Problem] = set()
    for file in files:
        try:
            suites.append(read_suite(file))
        except RulesError as refused:
            problems.update(refused.problems)
    if problems:
        raise RulesError(problems)
    return suites


def read_suite(file: Path) -> Suite:
    (source,) = RulesFiles([file]).read()
    found = Findings(source.name)
    root = load(source)
    if root is None:
        raise RulesError([Problem(source.name, 1, 1, "the file is empty; write 'descriptors:' and 'tests:'")])
    fields = Fields(root, _SUITE_KEYS, found)
    rules = _rules(fields, file, found)
    tree = _tree(rules, fields.truth("merge_domains"), found) if not found.errors else None
    start_us = fields.read("start", parse_moment)
    domain = fields.text("domain")
    fields.required_list("tests", "tests: [{name: …, steps: […]}]")
    cases = [_case(Fields(node, _CASE_KEYS, found), domain, start_us, tree, found) for node in fields.items("tests")]
    if found.errors or tree is None:
        raise RulesError(set(found.errors))
    return Suite(source.name, tuple(Path(rule.name) for rule in rules), tree, tuple(cases))


def _tree(rules: Sequence[Source], merge_domains: bool, found: Findings) -> Tree | None:
    """None if the rules are wrong, which is told together with what is wrong in the tests."""
    try:
        return compile_documents(rules, merge_domains=merge_domains).tree
    except RulesError as refused:
        found.errors += refused.problems
        return None


def _rules(fields: Fields, file: Path, found: Findings) -> list[Source]:
    node = fields.required("descriptors", "descriptors: <the rules file beside this one>")
    if node is None:
        return []
    sources: dict[str, Source] = {}
    for item in node.items if isinstance(node, YamlList) else (node,):
        if not isinstance(item, YamlScalar):
            found.error(item, f"descriptors: {excerpt(item)} is not a file; name one or a list of them")
            continue
        path = file.parent / item.text
        if path.is_file():
            sources.update((source.name, source) for source in RulesFiles([path]).read())
        else:
            found.error(item, f"descriptors: there is no file {path}; the name is taken from where this file is")
    return list(sources.values())


def _case(fields: Fields, domain: str | None, start_us: int | None, tree: Tree | None, found: Findings) -> Case:
    own = fields.read("start", parse_moment)
    start_us = own if own is not None else start_us if start_us is not None else START_US
    fields.required("name", "name: <what is shown>")
    fields.required_list("steps", "steps: [{descriptor: {user: alice}, expect: ok}]")
    domain = fields.text("domain") or domain
    if not domain and not fields.has("domain"):
        fields.required("domain", "domain: <as Envoy's filter sends it>")
    setting = Setting(start_us, domain or "", tree if domain else None)
    steps: list[CaseStep] = []
    for node in fields.items("steps"):
        step = read_step(node, setting, steps[-1].at_us if steps else start_us, found)
        steps += [step] if step else []
    return Case(found.position(fields.node), fields.text("name") or "", domain or "", start_us, tuple(steps))
