"""Test results as JUnit XML, for build servers."""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree.ElementTree import Element, SubElement, tostring

from ratelimit_rls.simulation.runner import CaseResult
from ratelimit_rls.simulation.xml_text import xml_text


def junit_xml(files: Iterable[tuple[str, Iterable[tuple[CaseResult, str]]]]) -> bytes:
    """Return JUnit XML with one suite per test file. Each result comes with a text that describes its differences."""
    root = Element("testsuites", name="ratelimit-rls test")
    for file, outcomes in files:
        suite = SubElement(root, "testsuite", name=xml_text(file), errors="0", skipped="0")
        failures = tests = 0
        for outcome, text in outcomes:
            tests += 1
            failures += not outcome.passed
            _add_case(suite, file, outcome, text)
        suite.set("tests", str(tests))
        suite.set("failures", str(failures))
    written: bytes = tostring(root, encoding="utf-8", xml_declaration=True)
    return written


def _add_case(suite: Element, file: str, outcome: CaseResult, text: str) -> None:
    case = outcome.case
    file, name = xml_text(file), xml_text(case.name)
    attributes = {"name": name, "classname": file, "file": file, "line": str(case.position.line)}
    element = SubElement(suite, "testcase", attributes)
    if outcome.passed:
        return
    first = outcome.differences[0]
    message = f"expected {', '.join(first.expected)}; got {', '.join(first.got)}"
    SubElement(element, "failure", type="difference", message=xml_text(message)).text = xml_text(text)
