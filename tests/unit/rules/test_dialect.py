"""The YAML dialect of envoyproxy/ratelimit, scalar by scalar. Each row was compared with go-yaml v2 itself."""

from __future__ import annotations

import math

import pytest
import yaml

from ratelimit_rls.core.model import Limit, Rule, Unit
from ratelimit_rls.errors import RulesError
from ratelimit_rls.rules.compile import compile_documents
from ratelimit_rls.rules.source_document import SourceDocument, load
from ratelimit_rls.rules.stored_rule import Targeting
from ratelimit_rls.yaml.scalars import ScalarKind, resolve

AS_WRITTEN = [
    "007",
    "0x1F",
    "true",
    "y",
    "No",
    "on",
    "2020-01-01",
    "50.0.0.5",
    "10:30",
    "1_000",
    "-1",
    "_",
    "é",
    "1e999",
]


@pytest.mark.parametrize("text", AS_WRITTEN)
def test_text_field_keeps_the_scalar_as_written(text: str) -> None:
    tree = compile_documents({"f": f"domain: d\ndescriptors: [{{key: k, value: {text}}}]".encode()}).tree

    assert ("k", text) in tree.domains["d"].exact


@pytest.mark.parametrize(
    "text", ["1.5", "1e3", ".5", "08", "089", "1.", "-2E+05", ".inf", ".NaN", str(2**63), str(2**64)]
)
def test_float_or_oversized_integer_must_be_quoted(text: str) -> None:
    with pytest.raises(RulesError, match="error checking config"):
        compile_documents({"f": f"domain: d\ndescriptors: [{{key: k, value: {text}}}]".encode()})

    tree = compile_documents({"f": f"domain: d\ndescriptors: [{{key: k, value: '{text}'}}]".encode()}).tree

    assert ("k", text) in tree.domains["d"].exact


@pytest.mark.parametrize("null", ["", "~", "null", "Null", "NULL"])
def test_null_is_the_same_as_absent(null: str) -> None:
    text = f"domain: d\ndescriptors:\n  - key: k\n    value: {null}\n    rate_limit: {null}\n    descriptors: {null}\n"

    tree = compile_documents({"f": text.encode()}).tree

    assert tree.domains["d"].by_key["k"].rule is None


BOOLEANS = {
    True: ["y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"],
    False: ["n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"],
}


@pytest.mark.parametrize(("text", "value"), [(text, value) for value, texts in BOOLEANS.items() for text in texts])
def test_booleans_are_yaml_1_1_with_single_letters(text: str, value: bool) -> None:
    rule = _only_rule(f"shadow_mode: {text}\n    rate_limit: {{unit: second, requests_per_unit: 1}}")

    assert rule.shadow_mode is value


COUNTS = {
    "0": 0,
    "5": 5,
    "+5": 5,
    "1_000": 1000,
    "1__0_": 10,
    "0x1F": 31,
    "0X1f": 31,
    "0b101": 5,
    "0B11": 3,
    "017": 15,
    "0o17": 15,
    "00": 0,
    "-0": 0,
    "4294967295": 2**32 - 1,
    '!!int "5"': 5,
}


@pytest.mark.parametrize(("text", "count"), COUNTS.items())
def test_numbers_are_read_in_every_base(text: str, count: int) -> None:
    rule = _only_rule(f"rate_limit: {{unit: second, requests_per_unit: {text}}}")

    assert rule.limits
    assert rule.limits[0].requests_per_unit == count


@pytest.mark.parametrize("text", ["4294967296", "-1", "10:30", "five", "0b12", "0xZZ", "yes", '"5"', "2020-01-01"])
def test_count_outside_uint32_is_rejected(text: str) -> None:
    with pytest.raises(RulesError, match=r"cannot unmarshal .* into uint32"):
        _only_rule(f"rate_limit: {{unit: second, requests_per_unit: {text}}}")


def test_long_scalars_are_resolved_quickly() -> None:
    assert resolve("1" * 5_000_000)[0] is ScalarKind.STRING
    assert resolve("0x" + "f" * 17) == (ScalarKind.STRING, "0x" + "f" * 17)
    assert resolve("18446744073709551616") == (ScalarKind.FLOAT, 2.0**64)
    assert resolve("18446744073709551615") == (ScalarKind.INT, 2**64 - 1)
    assert resolve("-9223372036854775808") == (ScalarKind.INT, -(2**63))
    assert resolve("-9223372036854775809")[0] is ScalarKind.FLOAT
    assert resolve("-.inf") == (ScalarKind.FLOAT, -math.inf)


def test_second_document_of_a_file_is_a_warning() -> None:
    compiled = compile_documents({"f": b"---\ndomain: a\n---\ndomain: [\n"})
    assert set(compiled.tree.domains) == {"a"}
    assert [(w.line, w.column, w.code) for w in compiled.warnings] == [(3, 1, "unread")]
    assert "nothing is read from here on" in compiled.warnings[0].message


@pytest.mark.parametrize("end", ["---\n", "...\n", "--- # the end\n\n# of it", "---\n...\n---"])
def test_trailing_document_marker_is_not_a_second_document(end: str) -> None:
    text = f"domain: a\n{end}".encode()
    assert compile_documents([SourceDocument("f", text)]).warnings == ()
    assert compile_documents([SourceDocument("f", text, 5, Targeting())]).warnings == ()


def test_second_document_of_a_stored_rule_is_an_error() -> None:
    text = b"domain: m1\ndescriptors: []\n---\ndomain: m2\ndescriptors: nonsense\n"
    with pytest.raises(RulesError) as raised:
        compile_documents([SourceDocument("database:x", text, 5, Targeting())])
    assert str(raised.value) == (
        "database:x:3:1: error: a stored rule is one YAML document, and a second one begins here; store it as a rule "
        "of its own"
    )


def test_positions_count_lines_above_the_part() -> None:
    for text, place in (
        (b"domain: a\ndescriptors: 5", (12, 14)),
        (b"domain: a\n? [", (13, 1)),
        (b"domain: a\n\x00", (12, 1)),
        (b"domain: a\n---\nb: 1", (12, 1)),
        (b"# nothing", (11, 1)),
        (b"domain: a\n<<: 5", (12, 5)),
    ):
        with pytest.raises(RulesError) as raised:
            compile_documents([SourceDocument("f", text, 5, Targeting(), lines_above=10)])
        (problem,) = raised.value.problems
        assert (problem.line, problem.column) == place, text


@pytest.mark.parametrize("bom", [b"\xef\xbb\xbfdomain: \xc3\xa9", "\ufeffdomain: é".encode("utf-16-le")])
def test_byte_order_mark_is_ignored(bom: bytes) -> None:
    assert set(compile_documents({"f": bom}).tree.domains) == {"é"}


def test_duplicate_key_uses_the_last_and_warns() -> None:
    compiled = compile_documents({"f": b"domain: a\ndescriptors: []\ndomain: b\n"})

    assert set(compiled.tree.domains) == {"b"}
    assert [(w.line, w.column, w.code) for w in compiled.warnings] == [(3, 1, "duplicate-key")]


def test_duplicate_key_next_to_a_merge_warns() -> None:
    text = "domain: d\ndescriptors:\n- key: a\n  key: b\n  <<: {value: c, enabled: true}\n"
    compiled = compile_documents({"f": text.encode()})

    assert [(w.line, w.column, w.code) for w in compiled.warnings if w.code == "duplicate-key"] == [
        (4, 3, "duplicate-key")
    ]


MERGES = {
    "a key after the merge overrides it": ("{<<: *a, value: w}", "k", "w"),
    "a merge after the key overrides the key": ("{key: j, <<: *a}", "k", "v"),
    "of several merged maps the first wins": ("{<<: [*b, *a], shadow_mode: y}", "b", "v"),
}


@pytest.mark.parametrize(("merge", "key", "value"), MERGES.values(), ids=MERGES.keys())
def test_merge_key_takes_effect_at_its_position(merge: str, key: str, value: str) -> None:
    text = f"metadata: {{a: &a {{key: k, value: v}}, b: &b {{key: b}}}}\ndomain: d\ndescriptors: [{merge}]"

    compiled = compile_documents({"f": text.encode()})

    assert set(compiled.tree.domains["d"].exact) == {(key, value)}
    assert not [w for w in compiled.warnings if w.code == "duplicate-key"]


def test_rate_limit_is_merged_over_the_inherited_one() -> None:
    text = (
        "domain: d\ndescriptors:\n  - &base {key: a, rate_limit: {unit: hour, requests_per_unit: 5}}\n"
        "  - {<<: *base, key: b, rate_limit: {requests_per_unit: 6}}\n"
    )

    rules = {rule.path: rule.limits[0] for rule in compile_documents({"f": text.encode()}).tree.rules()}

    assert rules["d.a"] == _limit(5)
    assert rules["d.b"] == _limit(6)


def test_metadata_is_converted_to_json_values() -> None:
    rule = _only_rule(
        "metadata: {text: a, n: 0x10, f: 1.5, yes: y, none: ~, list: [1, [b]], 7: {x: {y: 2020-01-01}}}\n"
        "    rate_limit: {unlimited: true}"
    )

    assert rule.metadata == {
        "text": "a",
        "n": 16,
        "f": 1.5,
        "yes": True,
        "none": None,
        "list": [1, ["b"]],
        "7": {"x": {"y": "2020-01-01"}},
    }


POSITIONED = """\
# remark
domain: "é ü"   # 𝄞
descriptors:
  - key: &k tenant
    value: |
      several
      lines
    metadata: {a: [1, *k], ? b : 'c'}
  -
    key: *k
"""


def test_both_parsers_report_equal_positions() -> None:
    source = SourceDocument("f", POSITIONED.encode())

    assert load(source, yaml.SafeLoader) == load(source, yaml.CSafeLoader)


def _only_rule(descriptor: str) -> Rule:
    (rule,) = compile_documents({"f": f"domain: d\ndescriptors:\n  - key: k\n    {descriptor}\n".encode()}).tree.rules()
    return rule


def _limit(requests_per_unit: int) -> Limit:
    return Limit(requests_per_unit, Unit.HOUR)
