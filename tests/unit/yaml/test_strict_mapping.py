"""The strict reader: what it accepts, and errors at the position of the key or value."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ratelimit_rls.yaml.findings import Findings
from ratelimit_rls.yaml.parser import parse
from ratelimit_rls.yaml.strict_mapping import StrictMapping

KEYS = ("count", "flag", "items", "mode", "name")
MODES = {"fast": 1, "slow": 2}


def read(text: str) -> StrictMapping:
    root = parse(text.encode())
    assert root is not None
    return StrictMapping(root, KEYS, Findings("a.yaml"), unsupported={"size": "write 'count'"})


def errors(fields: StrictMapping) -> list[str]:
    return [str(problem).removeprefix("a.yaml:") for problem in fields.found.errors]


def test_values_have_their_types() -> None:
    fields = read("{count: 3, flag: yes, items: [a, 1], mode: slow, name: 007}")

    assert (fields.integer("count", 3, 3), fields.boolean("flag"), fields.texts("items")) == (3, True, ("a", "1"))
    assert (fields.choice("mode", MODES), fields.text("name"), fields.read("name", int, 1)) == (2, "007", 7)
    assert errors(fields) == []


def test_null_is_absent() -> None:
    fields = read("{count: ~, flag: null, items: , mode: , name: }")

    assert not any(fields.has(key) for key in KEYS)
    assert (fields.integer("count", 1), fields.boolean("flag"), fields.items("items")) == (None, False, ())
    assert (fields.choice("mode", MODES), fields.text("name"), fields.read("name", int, 1)) == (None, None, 1)
    assert errors(fields) == []


def test_a_key_overrides_a_merged_one() -> None:
    fields = read("<<: {name: a, mode: fast}\nname: b\n")

    assert (fields.text("name"), fields.text("mode"), errors(fields)) == ("b", "fast", [])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("7", "1:1: error: 7 is not a mapping; its keys are count, flag, items, mode, name"),
        ("name: a\nnmae: b", "2:1: error: config error, unknown key 'nmae'; did you mean 'name'?"),
        ("[a]: b", "1:1: error: config error, unknown key 'a list'; allowed here: count, flag, items, mode, name"),
        ("size: 1", "1:1: error: write 'count'"),
        ("name: a\nname: b", "2:1: error: 'name' is written twice"),
        ("name: a\nname: ~", "2:1: error: 'name' is written twice"),
    ],
)
def test_wrong_keys_are_reported(text: str, error: str) -> None:
    assert errors(read(text)) == [error]


@pytest.mark.parametrize(
    ("text", "use", "error"),
    [
        ("flag: 1", lambda fields: fields.boolean("flag"), "1:7: error: flag: 1 is not true or false"),
        ("count: 0", lambda fields: fields.integer("count", 1), "1:8: error: count: 0 is not a whole number from 1 on"),
        ("count: 9", lambda fields: fields.integer("count", 1, 8), "1:8: error: count: 9 is more than 8"),
        ("items: a", lambda fields: fields.items("items"), "1:8: error: items: a is not a list"),
        (
            "items: [a, b, c]",
            lambda fields: fields.items("items", 1),
            "1:12: error: 'items' has 3 elements; at most 1 are allowed",
        ),
        ("items: [[a]]", lambda fields: fields.texts("items"), "1:9: error: items: a list is not text"),
        ("mode: late", lambda fields: fields.choice("mode", MODES), "1:7: error: mode: late is not one of fast, slow"),
        ("name: {}", lambda fields: fields.text("name"), "1:7: error: name: a mapping is not text"),
        (
            "flag: on",
            lambda fields: fields.required("name", "name: a"),
            "1:1: error: 'name' is missing; write 'name: a'",
        ),
        (
            "items: []",
            lambda fields: fields.required_list("items", "items: [a]"),
            "1:8: error: 'items' is empty; write 'items: [a]'",
        ),
    ],
)
def test_wrong_values_are_reported(text: str, use: Callable[[StrictMapping], object], error: str) -> None:
    fields = read(text)

    use(fields)

    assert errors(fields) == [error]
