"""Messages for errors and warnings about limits and responses: one function per message.

Messages about an `ext_authz` mapping are in ext_authz.py, those about any strict mapping in yaml/strict_mapping.py, and
those about text that is not YAML in yaml/parser.py.

Where envoyproxy/ratelimit has a message for the same mistake, ours contains its sentence word for word, so that it can
be found by a search. What would be right follows. The Problem that carries the message adds the position.
"""

from __future__ import annotations

from collections.abc import Iterable
from zoneinfo import available_timezones

from ratelimit_rls.core.duration import format_duration_us
from ratelimit_rls.core.model import MAX_REQUESTS_PER_UNIT, Algorithm, Limit, Penalty, Position, Unit
from ratelimit_rls.core.response_policy import HeaderFamily
from ratelimit_rls.yaml import parser
from ratelimit_rls.yaml.messages import cut, did_you_mean

UNITS = ("second", "minute", "hour", "day", "week", "month", "year")
ALGORITHMS = tuple(algorithm.value for algorithm in Algorithm)
BURST_ALGORITHMS = tuple(algorithm.value for algorithm in Algorithm if algorithm.has_burst)

MAX_SLIDING_LOG = 10_000
MAX_REFILL_US = 2**51
MAX_MULTIPLIER = 65_535
MAX_VIOLATIONS = 1000
"""Violations that are recorded per client: the maximum that a penalty can count to."""
MAX_MULTIPLIERS = 16
MAX_PENALTY_MULTIPLIER = 10_000
MAX_BODY_BYTES = 16 * 2**10
MAX_HEADER_BYTES = 4 * 2**10
MAX_HEADERS = 32
MAX_EXPRESSIONS = 100
"""Regular expressions of one key at one level. They are tried one after the other, at about a microsecond each."""

# -- the file cannot be read ------------------------------------------------------------------------------------------


def not_yaml(what: str) -> str:
    return f"error loading config file: yaml: {what}"


def unreadable_file(reason: str) -> str:
    return f"error loading config file: {reason}"


def too_large(max_bytes: int) -> str:
    return not_yaml(f"the file is larger than {max_bytes // 2**20} MiB; split it into several files")


def too_many_nodes(most: int) -> str:
    return not_yaml(parser.too_many_nodes(most))


def too_deep(most: int) -> str:
    return not_yaml(f"nested more than {most} levels deep; use at most {most // 2 - 2} levels of descriptors")


def second_document() -> str:
    return "a stored rule is one YAML document, and a second one begins here; store it as a rule of its own"


def unnamed_rule(first_line: str) -> str:
    return f'another rule begins here without a name: write \'{first_line}{{"name": "…"}}\' below this line'


# -- the grammar ------------------------------------------------------------------------------------------------------


def key_not_text(key: str) -> str:
    return f"config error, key is not of type string: {key}; put it in quotes to use it as text"


def list_of_other_than_maps(element: str, example: str | None) -> str:
    """Format the message for a list element that is not a mapping. `example` is None where no list is allowed."""
    right = f"each element is a mapping, e.g. '{example}'" if example else "no list belongs here"
    return f"config error, yaml file contains list of type other than map: {element}; {right}"


def unusable_scalar(text: str) -> str:
    return f"error checking config: {cut(text)} is neither text nor a whole number of 64 bits; put text in quotes"


def wrong_type(line: int, tag: str, text: str | None, go_type: str, wanted: str) -> str:
    """Format the message for a value of the wrong type. `text` is None for a mapping or a list."""
    displayed = "" if text is None else f" `{text if len(text.encode()) <= 10 else text[:7] + '...'}`"
    return not_yaml(f"unmarshal errors: line {line}: cannot unmarshal {tag}{displayed} into {go_type}; {wanted}")


def bad_metadata(reason: str) -> str:
    return f"error parsing metadata: {reason}; metadata must be JSON values"


def misplaced(key: str, right: str) -> str:
    return f"'{key}' has no effect here; it belongs {right}"


def duplicate_key(key: str, first_line: int) -> str:
    return f"'{cut(key)}' is already written at line {first_line}; the last one is in force: drop the others"


# -- domains and descriptors ------------------------------------------------------------------------------------------


def empty_domain() -> str:
    return "config file cannot have empty domain; write 'domain: <name>' at the top, as Envoy's filter sends it"


def duplicate_domain(domain: str, first: Position) -> str:
    return (
        f"duplicate domain '{domain}' in config file; its rules are already in {first}; "
        "name another, or set MERGE_DOMAIN_CONFIG=true to merge them"
    )


def conflicting_setting(key: str, domain: str, first: Position, *, of_rules: bool) -> str:
    """Format the message for a domain setting that differs between files. `of_rules`: a rule may set it, too."""
    right = "and a rule may have its own" if of_rules else "the same in all its files"
    return f"domain '{cut(domain)}' has a different {key} at {first}; a domain has one, {right}"


def duplicate_setting(key: str, domain: str, first: Position) -> str:
    return f"domain '{cut(domain)}' has '{key}' at {first} already; a domain has one, in one of its files"


def empty_key() -> str:
    return "descriptor has empty key; write 'key: <name>', as Envoy's action sends it"


def duplicate_descriptor(path: str, first: Position) -> str:
    return f"duplicate descriptor composite key '{path}'; the same descriptor is at {first}; join the two"


def duplicate_with_same_priority(path: str, first: Position) -> str:
    return (
        f"duplicate descriptor composite key '{path}'; {first} has it with the same priority; "
        "join the two, or give one of them another priority"
    )


def overridden(path: str, by: Position) -> str:
    return f"'{path}' is ignored, with everything below it: {by} takes precedence"


def overridden_switch(key: str, path: str, first: Position) -> str:
    return f"{key} of '{path}' differs at {first}, which comes first and is in force; make the two equal, or drop one"


def overridden_domain_setting(key: str, domain: str, by: Position) -> str:
    return f"'{key}' of domain '{cut(domain)}' is ignored: {by} takes precedence"


def match_in_rule_body(key: str) -> str:
    return (
        f"'{key}' beside 'domain': the targeting says which requests a stored rule is for; drop it, "
        "or write the descriptor under 'descriptors'"
    )


def hidden(wide: str, narrow: str, by: Position) -> str:
    return (
        f"the rules below {wide} do not apply to {narrow}: {by} matches first, and has no such rule; "
        "add it there, too, or target the two so that they do not overlap"
    )


def nothing_to_target() -> str:
    return (
        "there is nothing to target: beside 'domain' write 'descriptors', or what belongs on one, "
        "e.g. 'rate_limit: {unit: minute, requests_per_unit: 5}'"
    )


def too_many_shapes(domain: str, most: int) -> str:
    return (
        f"domain '{cut(domain)}' has stored rules with more than {most} kinds of targeting, and each is a descriptor "
        "of every request; target several rules by the same things"
    )


def share_without_wildcard(label: str) -> str:
    return (
        f"share_threshold can only be used with wildcard values (containing '*'), but found key '{label}'; "
        "or with 'match': without either there is one counter per value, or one for the one value"
    )


# -- rate_limit -------------------------------------------------------------------------------------------------------


def unit_when_unlimited() -> str:
    return "should not specify rate limit unit when unlimited; drop 'unit', or 'unlimited'"


def invalid_unit(unit: str) -> str:
    hint = did_you_mean(unit.lower(), UNITS)
    return f"invalid rate limit unit '{cut(unit)}'; must be one of {', '.join(UNITS)}{hint}"


def empty_replaces() -> str:
    return "should not have an empty replaces entry; write '- name: <the name of another rate_limit>'"


def replaces_itself() -> str:
    return "replaces should not contain name of same descriptor; name another rate_limit, or drop the entry"


def unknown_algorithm(name: str) -> str:
    return f"algorithm '{cut(name)}' is not one of {', '.join(ALGORITHMS)}{did_you_mean(name.lower(), ALGORITHMS)}"


def burst_without_bucket(algorithm: Algorithm) -> str:
    return (
        f"burst has no meaning for algorithm {algorithm.value}; only {', '.join(BURST_ALGORITHMS)} have a burst: "
        "drop burst, or choose one of them"
    )


def zero_burst() -> str:
    return "burst is 0, so that nothing could ever pass; burst must be at least 1 (default: requests_per_unit)"


def burst_beside_zero() -> str:
    return (
        "burst has no effect beside requests_per_unit: 0, which denies everything; drop burst, or allow some requests"
    )


def log_too_long(requests_per_unit: int) -> str:
    return (
        f"sliding_log records every request, so requests_per_unit must be at most {MAX_SLIDING_LOG:,}, "
        f"not {requests_per_unit:,}; sliding_window has no such bound"
    )


def refills_too_slowly(limit: Limit) -> str:
    years = limit.burst * limit.window_us // limit.requests_per_unit // (Unit.YEAR.seconds * 1_000_000)
    rate = f"{limit.requests_per_unit:,} per {limit.unit.name.lower()}"
    return (
        f"a burst of {limit.burst:,} at {rate} takes {years:,} years to refill; "
        "at most 71 years can be counted exactly (2^51 microseconds): lower the burst or raise the rate"
    )


def bad_multiplier(multiplier: int) -> str:
    return (
        f"unit_multiplier must be from 1 to {MAX_MULTIPLIER}, not {multiplier}; e.g. 5 with unit: minute is five "
        "minutes"
    )


def timezone_without_calendar() -> str:
    return (
        "timezone has no meaning without 'calendar: true', since other windows do not depend on it; "
        "add 'calendar: true', or drop timezone"
    )


def no_calendar_for_unit(unit: Unit) -> str:
    return f"a calendar has days, weeks, months and years, not {unit.name.lower()}s; drop 'calendar' or change the unit"


def no_calendar_for_algorithm(algorithm: Algorithm) -> str:
    return f"calendar windows are fixed windows, and {algorithm.value} has none; drop 'calendar' or 'algorithm'"


def calendar_with_multiplier() -> str:
    return (
        "unit_multiplier has no meaning with 'calendar: true', whose windows are single days, weeks, months or years; "
        "drop one of them"
    )


def unknown_timezone(name: str) -> str:
    hint = did_you_mean(name, available_timezones())
    return f"timezone '{cut(name)}' is unknown; must be an IANA name, such as UTC or Europe/Berlin{hint}"


def limits_beside_rate_limit() -> str:
    return "a descriptor cannot have both 'limits' and 'rate_limit'; write all limits under 'limits'"


def no_limits() -> str:
    return "'limits' is an empty list; write at least one limit, or drop 'limits'"


def unlimited_among_limits() -> str:
    return "'unlimited' among 'limits' would undo the others; write 'rate_limit: {unlimited: true}' alone"


def same_window_twice(limit: Limit) -> str:
    return (
        f"another limit of this descriptor is a {limit.algorithm.value} over the same window, so that the two would "
        "share a counter; keep the smaller one, or change the window or the algorithm"
    )


def unknown_choice(key: str, value: str, known: Iterable[str]) -> str:
    return f"{key} '{cut(value)}' is not one of {', '.join(known)}{did_you_mean(value.lower(), known)}"


def unknown_shard_by(text: str, known: Iterable[str]) -> str:
    choices = f"{', '.join(known)} or {{key: …}}, e.g. {{key: org}}"
    return f"shard_by '{text}' is not one of {choices}{did_you_mean(text.lower(), known)}"


def bad_shard_by_key(text: str, example: str) -> str:
    return f"shard_by: key '{text}' is not the key of a descriptor's entry; write e.g. {{{example}}}"


def unused_shard_by_key(key: str, domain: str) -> str:
    return f"shard_by: no rule of domain '{cut(domain)}' has the key '{cut(key)}', so it has no effect"


# -- throttle, penalty, warn_at --------------------------------------------------------------------------------------


def bad_max_delay(text: str, reason: str) -> str:
    return f"max_delay: {cut(text)} {reason}"


def max_delay_without_throttle() -> str:
    return (
        "max_delay has no meaning without 'action: throttle': no other action delays calls; add it, or drop max_delay"
    )


def throttle_without_queue() -> str:
    return (
        f"action: throttle needs a rate_limit, or one among limits, with algorithm {', '.join(BURST_ALGORITHMS)}: "
        "only they know when the next slot comes"
    )


def throttle_with_charge() -> str:
    return (
        "charge: always cannot be used with action: throttle, where a denied call takes no place in the queue; "
        "drop 'charge', whose value is 'admitted' for such a rule"
    )


def throttle_with(mode: str) -> str:
    return f"action: throttle has no effect with {mode}, which denies no call by itself; drop one of them"


def penalty_with(mode: str) -> str:
    return f"penalty has no effect with {mode}, which denies no call by itself; drop one of them"


def too_many_violations(after: int) -> str:
    return (
        f"after: {after} is more than the {MAX_VIOLATIONS} violations that are recorded per client; must be at most "
        f"{MAX_VIOLATIONS}"
    )


def bad_multiplier_count(number: int) -> str:
    return f"multipliers: must be a list of 1 to {MAX_MULTIPLIERS} whole numbers, not of {number:,}; e.g. [1, 2, 4, 8]"


def multiplier_too_large(multiplier: int) -> str:
    return f"multipliers: {multiplier} is too large; must be at most {MAX_PENALTY_MULTIPLIER:,}"


def decreasing_multipliers() -> str:
    return "multipliers must not decrease: repeated violations would wait less; e.g. [1, 2, 4, 8]"


def penalty_too_long(penalty: Penalty) -> str:
    counted = penalty.after + len(penalty.multipliers)
    return (
        f"penalty: after {penalty.after} and {len(penalty.multipliers)} multipliers would count {counted} violations; "
        f"at most {MAX_VIOLATIONS} are recorded: lower 'after'"
    )


def bad_warn_at(value: str) -> str:
    return (
        f"warn_at: {value} is not a fraction of the limit; must be a number above 0.1 and below 1, "
        "with at most three decimals and without quotes, e.g. 0.8"
    )


# -- hot -------------------------------------------------------------------------------------------------------------


def split_not_supported() -> str:
    return (
        "'split' is not needed: leases spare the one node that counts a hot key as well as several counters would, "
        "and keep one that is exact; use 'lease'"
    )


def lease_too_long(lease_us: int, window_us: int) -> str:
    return (
        f"lease: {format_duration_us(lease_us)} is more than half of a window of {format_duration_us(window_us)}, "
        f"so that leased hits could outlive the window; "
        f"must be at most {format_duration_us(window_us // 2)}, or choose a longer window"
    )


def hot_with(what: str) -> str:
    return (
        f"{what} cannot be used with hot, where hits are leased before the calls arrive, so that the store "
        "does not know which call is denied, and when; drop one of them"
    )


def hot_with_charge() -> str:
    return (
        "charge: always cannot be used with hot, where hits are leased before the calls arrive, so that denied "
        "calls cannot be counted; drop 'charge', whose value is 'admitted' for such a rule"
    )


def hot_in_charging_domain() -> str:
    return (
        "hot cannot be used in a domain with charge: always, since a lease does not charge denied calls; "
        "write 'charge: admitted' beside hot, or drop hot"
    )


def hot_without_limit(what: str) -> str:
    return f"hot has no effect with {what}, since no hits are counted that could be leased; drop one of them"


# -- answer and deny --------------------------------------------------------------------------------------------------


def limits_of_with(what: str, reason: str) -> str:
    return f"'limits_of' cannot be used with '{what}': {reason}"


def unknown_family(name: str, families: Iterable[str]) -> str:
    return f"headers: {name} is not one of {', '.join(families)}{did_you_mean(name.lower(), families)}"


def family_twice(family: HeaderFamily) -> str:
    return f"headers: {family.value} is already in the list; drop one of the two"


def conflicting_reset_headers() -> str:
    first, second = HeaderFamily.LEGACY.value, HeaderFamily.LEGACY_EPOCH.value
    return f"headers: {first} and {second} have the same names and report the reset differently; keep one of them"


def unknown_format(name: str, formats: Iterable[str]) -> str:
    return f"format: {name} is not one of {', '.join(formats)}; for a text of your own write 'body'"


def format_beside_body() -> str:
    return "'deny' cannot have both 'format' and 'body', since a response has one body; keep one of them"


def not_a_template(what: str, value: str) -> str:
    return f"{what}: {value} is not text; must be text, which may have placeholders such as ${{retry_after}}"


def bad_template(what: str, reason: str) -> str:
    return f"{what}: the template {reason}"


def body_too_long() -> str:
    return f"body is too long; must be at most {MAX_BODY_BYTES // 2**10} KiB"


def content_type_without_body() -> str:
    return "content_type has no meaning without 'body': a format has its own; drop it, or write a body"


def bad_content_type(text: str) -> str:
    return f"content_type: '{cut(text)}' is not a media type; e.g. text/html; charset=utf-8"


def bad_status(value: str) -> str:
    return (
        f"status: {value} is not the status of an error; must be a whole number from 400 to 599, without quotes "
        "(default: 429)"
    )


def headers_not_a_mapping(value: str) -> str:
    return f"headers: {value} is not a mapping of names to texts; e.g. {{x-support: 'see https://example.com/limits'}}"


def bad_header_name(value: str) -> str:
    return f"headers: '{value}' is not the name of a header; a name has letters, digits and any of !#$%&'*+-.^_`|~"


def reserved_header(name: str) -> str:
    return f"headers: '{name}' is set by the HTTP connection, not by a rule; drop it"


def content_type_among_headers() -> str:
    return "headers: the content type cannot be set here; write 'content_type' beside 'body'"


def header_twice(name: str) -> str:
    return f"headers: '{cut(name)}' is written twice (case is ignored); keep one of them"


def too_many_headers(number: int) -> str:
    return f"headers: there are {number}; must be at most {MAX_HEADERS}"


def bad_header_text(what: str) -> str:
    return (
        f"{what}: the text has a line break, another control character or a space at one end; "
        "write one line of text without them"
    )


def header_too_long(what: str) -> str:
    return f"{what}: the text is too long; must be at most {MAX_HEADER_BYTES // 2**10} KiB, or written in the body"


# -- match ------------------------------------------------------------------------------------------------------------


def value_beside_match() -> str:
    return "a descriptor cannot have both 'value' and 'match'; keep one of them"


def not_one_match_kind(kinds: Iterable[str]) -> str:
    written = ", ".join(kinds)
    return f"'match' takes one of cidr, prefix and regex, not {written or 'none'}; write a descriptor for each"


def bad_cidr(text: str, reason: str) -> str:
    return f"cidr '{cut(text)}' is not a network: {reason}; e.g. 10.0.0.0/8 or 2001:db8::/32"


def empty_prefix() -> str:
    return "an empty prefix matches every value; drop 'match' to do that"


def empty_regex() -> str:
    return (
        "an empty regex matches the empty value alone; write one that says which values, or drop 'match' to match all"
    )


def bad_regex(text: str, reason: str) -> str:
    return (
        f"regex '{cut(text)}' cannot be used: {reason}; must be RE2 syntax, which has no back-references and "
        "look-around"
    )


def too_many_expressions(key: str) -> str:
    return (
        f"key '{cut(key)}' has more than {MAX_EXPRESSIONS} regular expressions at this level, and a value is matched "
        "with one after the other, at a microsecond or more each; must be fewer: join some with '|', or use prefix, "
        "cidr or a value with '*', which cost the same however many there are"
    )


# -- warnings ---------------------------------------------------------------------------------------------------------


def unread_document() -> str:
    return (
        "nothing is read from here on, since only the first YAML document of a file is; put the next one in a file "
        "of its own"
    )


def no_effect_without_limit(key: str) -> str:
    return f"'{key}' has no effect on a descriptor without rate_limit; add a rate_limit, or drop it"


def no_effect_when_unlimited(key: str) -> str:
    return f"'{key}' has no effect when unlimited; drop it, or 'unlimited'"


def no_effect_without_store(key: str) -> str:
    return f"'{key}' has no effect where nothing is counted, neither on this descriptor nor below it"


def limit_beside_allow(key: str) -> str:
    return f"'{key}' has no effect beside 'action: allow', which lets everything pass uncounted; drop one of them"


def denies_everything(is_written: bool) -> str:
    reason = "requests_per_unit is 0" if is_written else "there is no requests_per_unit, which means 0"
    return f"{reason}, so that every request is denied"


def unreachable(what: str, by: str, at: Position) -> str:
    return f"{what} is never matched: it is always preceded by {by} at {at}"


def unknown_replaces(name: str) -> str:
    return f"replaces '{cut(name)}' has no effect: no rate_limit of this domain has that name"


def unmapped_descriptor(keys: Iterable[str]) -> str:
    return f"no rule of this domain matches a descriptor of {', '.join(keys)}: it has no effect"


# -- formatting -------------------------------------------------------------------------------------------------------

TEXT = "must be text"
BOOLEAN = "must be true or false, without quotes"
COUNT = f"must be a whole number from 0 to {MAX_REQUESTS_PER_UNIT}, without quotes"
