"""One file per kind of error: the sentence of envoyproxy/ratelimit, the position, and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratelimit_rls.errors import RulesError
from ratelimit_rls.rules.compile import compile_documents

REJECTED = Path(__file__).parent / "rejected"

# file: (line, column, message, remedy)
EXPECTED = {
    # the text
    "not_yaml": (4, 1, "error loading config file: yaml: while scanning a quoted scalar", "end of stream"),
    "top_level_not_a_map": (1, 1, "cannot unmarshal !!seq into map[interface {}]interface {}", "'domain:'"),
    "foreign_tag": (1, 9, "error loading config file", "write the plain value"),
    "unknown_anchor": (1, 9, "unknown anchor 'edge' referenced", "before its aliases"),
    "endless_anchor": (4, 18, "anchor 'all' value contains itself", ""),
    "bad_merge": (3, 9, "map merge requires map or sequence of maps as the value", ""),
    # the grammar
    "key_not_text": (4, 5, "config error, key is not of type string: y", "in quotes"),
    "unknown_key": (4, 5, "config error, unknown key 'ratelimit'", "did you mean 'rate_limit'?"),
    # several limits, and other windows
    "no_limits": (4, 13, "'limits' is an empty list", "at least one"),
    "limits_beside_rate_limit": (5, 13, "a descriptor cannot have both 'limits' and 'rate_limit'", "under 'limits'"),
    "unlimited_among_limits": (5, 9, "'unlimited' among 'limits'", "rate_limit: {unlimited: true}"),
    "same_window_twice": (6, 9, "a fixed_window over the same window", "change the window"),
    "multiplier_zero": (4, 71, "unit_multiplier must be from 1 to 65535, not 0", "five minutes"),
    "calendar_of_hours": (4, 62, "days, weeks, months and years, not hours", "change the unit"),
    "calendar_of_buckets": (4, 61, "calendar windows are fixed windows, and gcra has none", "drop 'calendar'"),
    "calendar_with_multiplier": (4, 63, "unit_multiplier has no meaning with 'calendar: true'", "drop one"),
    "timezone_without_calendar": (4, 61, "timezone has no meaning without 'calendar: true'", "calendar: true"),
    "unknown_timezone": (4, 77, "timezone 'Europe/Berlinn' is unknown", "did you mean 'Europe/Berlin'?"),
    "timezone_outside": (4, 77, "timezone '../../etc/passwd' is unknown", "Europe/Berlin"),
    "unknown_action": (4, 13, "action 'deny' is not one of reject, throttle, log_only, allow", "one of"),
    # match
    "value_beside_match": (5, 12, "a descriptor cannot have both 'value' and 'match'", "keep one"),
    "match_of_nothing": (4, 12, "'match' takes one of cidr, prefix and regex, not none", "a descriptor for each"),
    "match_two_ways": (
        4,
        12,
        "'match' takes one of cidr, prefix and regex, not prefix, regex",
        "a descriptor for each",
    ),
    "bad_cidr": (4, 19, "cidr '10.0.0.1/8' is not a network: 10.0.0.1/8 has host bits set", "10.0.0.0/8"),
    "empty_prefix": (4, 21, "an empty prefix matches every value", "drop 'match'"),
    "bad_regex": (4, 20, "regex '(a' cannot be used: missing ): (a", "RE2"),
    "regex_with_back_reference": (4, 20, "cannot be used: invalid escape sequence", "no back-references"),
    "regex_too_large": (4, 20, "cannot be used", "RE2"),
    "duplicate_pattern": (5, 5, "duplicate descriptor composite key 'edge.user_prefix(a)'", "join the two"),
    "duplicate_network": (
        5,
        5,
        "duplicate descriptor composite key 'edge.ip_cidr(::ffff:10.0.0.0/104)'; the same descriptor is at ",
        "join the two",
    ),
    "empty_regex": (4, 20, "an empty regex matches the empty value alone", "drop 'match'"),
    "unknown_way": (4, 13, "config error, unknown key 'glob'", "allowed here: cidr, prefix, regex"),
    "list_of_text": (3, 5, "config error, yaml file contains list of type other than map: user", "- key: user"),
    "float_value": (4, 12, "error checking config", "in quotes"),
    "uint64_value": (4, 12, "error checking config", "in quotes"),
    # the types
    "list_for_text": (4, 78, "yaml file contains list of type other than map: a", "a list is not allowed here"),
    "list_for_rate_limit": (4, 18, "yaml file contains list of type other than map: 5", "a list is not allowed here"),
    "list_of_counts": (4, 52, "yaml file contains list of type other than map: 5", "'- unit: minute'"),
    "list_overwritten": (4, 17, "line 4: cannot unmarshal !!seq into config.YamlRateLimit", "must be a mapping"),
    "negative_count": (6, 26, "line 6: cannot unmarshal !!int `-1` into uint32", "from 0 to 4294967295"),
    "quoted_count": (6, 26, "line 6: cannot unmarshal !!str `1234567...` into uint32", "without quotes"),
    "quoted_flag": (4, 18, "line 4: cannot unmarshal !!str `true` into bool", "without quotes"),
    "map_for_text": (3, 10, "line 3: cannot unmarshal !!map into string", "must be text"),
    "map_for_list": (3, 3, "line 3: cannot unmarshal !!map into []config.YamlDescriptor", "a list of mappings"),
    "text_for_rate_limit": (4, 17, "line 4: cannot unmarshal !!str `5/m` into config.YamlRateLimit", "a mapping"),
    # domains and descriptors
    "empty_file": (1, 1, "config file cannot have empty domain", "domain: <name>"),
    "empty_domain": (1, 1, "config file cannot have empty domain", "domain: <name>"),
    "empty_key": (3, 10, "descriptor has empty key", "key: <name>"),
    "missing_key": (3, 5, "descriptor has empty key", "key: <name>"),
    "duplicate_descriptor": (7, 9, "duplicate descriptor composite key 'edge.plan_free.user'", ".yaml:6:9"),
    "share_without_wildcard": (
        5,
        22,
        "share_threshold can only be used with wildcard values (containing '*'), but found key 'path_/v1'",
        "or with 'match'",
    ),
    "metadata_not_json": (5, 15, "error parsing metadata: .inf", "JSON"),
    "unknown_charge": (2, 9, "charge 'sometimes' is not one of", "always, admitted"),
    # rate_limit
    "unlimited_with_unit": (6, 13, "should not specify rate limit unit when unlimited", "drop 'unit'"),
    "invalid_unit": (5, 13, "invalid rate limit unit 'minutes'", "did you mean 'minute'?"),
    "unknown_unit": (5, 13, "invalid rate limit unit 'unknown'", "second, minute, hour, day, week, month, year"),
    "missing_unit": (5, 7, "invalid rate limit unit ''", "second, minute"),
    "replaces_nothing": (8, 17, "should not have an empty replaces entry", "name: <"),
    "replaces_itself": (9, 17, "replaces should not contain name of same descriptor", "name another"),
    "unknown_algorithm": (7, 18, "algorithm 'tokenbucket' is not one of", "did you mean 'token_bucket'?"),
    "burst_without_bucket": (7, 14, "burst has no meaning for algorithm fixed_window", "gcra"),
    "burst_of_nothing": (8, 14, "burst is 0", "at least 1"),
    "burst_beside_zero": (8, 14, "burst has no effect beside requests_per_unit: 0", "drop burst"),
    "sliding_log_too_long": (6, 26, "at most 10,000, not 10,001", "sliding_window"),
    "fills_too_slowly": (8, 14, "a burst of 72 at 1 per year takes 72 years to refill", "at most 71 years"),
}


@pytest.mark.parametrize("name", sorted(path.stem for path in REJECTED.glob("*.yaml")))
def test_rejected_file_has_position_message_and_remedy(name: str) -> None:
    file = REJECTED / f"{name}.yaml"

    with pytest.raises(RulesError) as raised:
        compile_documents({file.name: file.read_bytes()})

    (problem,) = raised.value.problems
    line, column, sentence, remedy = EXPECTED[name]
    assert (problem.file, problem.line, problem.column) == (file.name, line, column)
    assert sentence in problem.message
    assert remedy in problem.message


def test_every_expectation_has_a_file() -> None:
    assert EXPECTED.keys() == {path.stem for path in REJECTED.glob("*.yaml")}


def test_all_errors_of_all_files_are_reported_in_order() -> None:
    files = {
        "b.yaml": b"domain: b\ndescriptors:\n  - key: ''\n  - key: x\n    rate_limit: {unit: fortnight}\n",
        "a.yaml": b"domain: a\nwhat: 1\ndescriptors:\n  - key: k\n    shadow_mode: 3\n  - key: k\n",
        "c.yaml": b"{",
    }

    with pytest.raises(RulesError) as raised:
        compile_documents(files)

    assert [(problem.file, problem.line) for problem in raised.value.problems] == [
        ("a.yaml", 2),
        ("a.yaml", 5),
        ("a.yaml", 6),
        ("b.yaml", 3),
        ("b.yaml", 5),
        ("c.yaml", 2),
    ]


def test_message_format_is_position_severity_and_sentence() -> None:
    with pytest.raises(RulesError, match=r"^x\.yaml:1:9: error: config file cannot have empty domain"):
        compile_documents({"x.yaml": b"domain: ''"})
