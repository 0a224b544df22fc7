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
    return not_yaml(f"nested more than {most} levels deep; that is enough for {most // 2 - 2} levels of descriptors")


def second_document() -> str:
    return "a stored rule is one YAML document, and a second one begins here; store it as a rule of its own"


def unnamed_rule(first_line: str) -> str:
    return f'another rule begins here without a name: write \'{first_line}{{"name": "…"}}\' below this line'


# -- the grammar ------------------------------------------------------------------------------------------------------


def key_not_text(key: str) -> str:
    return f"config error, key is not of type string: {key}; put it in quotes if it is meant"


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
    return f"'{cut(key)}' is already written at line {first_line}; the last one counts"


# -- domains and descriptors ------------------------------------------------------------------------------------------


def empty_domain() -> str:
    return "config file cannot have empty domain; write 'domain: <name>' at the top, as Envoy's filter sends it"


def duplicate_domain(domain: str, first: Position) -> str:
    return (
        f"duplicate domain '{domain}' in config file; it is already in {first}; "
        "name another, or set MERGE_DOMAIN_CONFIG=true to merge them"
    )


def conflicting_setting(key: str, domain: str, first: Position, *, of_rules: bool) -> str:
    """Format the message for a domain setting that differs between files. `of_rules`: a rule may set it, too."""
    right = "and a rule may have its own" if of_rules else "the same in all its files"
    return f"domain '{cut(domain)}' has another {key} at {first}; a domain has one, {right}"


def duplicate_setting(key: str, domain: str, first: Position) -> str:
    return f"domain '{cut(domain)}' has '{key}' at {first} already; a domain has one, in one of its files"


def empty_key() -> str:
    return "descriptor has empty key; write 'key: <name>', as Envoy's action sends it"


def duplicate_descriptor(path: str, first: Position) -> str:
    return f"duplicate descriptor composite key '{path}'; it is already at {first}; join the two"


def duplicate_with_same_priority(path: str, first: Position) -> str:
    return (
        f"duplicate descriptor composite key '{path}'; {first} has it with the same priority; "
        "join the two, or give one of them another priority"
    )


def overridden(path: str, by: Position) -> str:
    return f"'{path}' is ignored, with everything below it: {by} takes precedence"


def overridden_switch(key: str, path: str, first: Position) -> str:
    return f"{key} of '{path}' is another at {first}, which comes first and counts"


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
    return f"invalid rate limit unit '{cut(unit)}'; it is one of {', '.join(UNITS)}{hint}"


def empty_replaces() -> str:
    return "should not have an empty replaces entry; write '- name: <the name of another rate_limit>'"


def replaces_itself() -> str:
    return "replaces should not contain name of same descriptor; name another rate_limit, or drop the entry"


def unknown_algorithm(name: str) -> str:
    return f"algorithm '{cut(name)}' is not one of {', '.join(ALGORITHMS)}{did_you_mean(name.lower(), ALGORITHMS)}"


def burst_without_bucket(algorithm: Algorithm) -> str:
    return (
        f"burst has no meaning for algorithm {algorithm.value}; it is for {', '.join(BURST_ALGORITHMS)}: "
        "drop it, or choose one of them"
    )


def zero_burst() -> str:
    return "burst is 0, so that nothing could ever pass; it is at least 1 (requests_per_unit if not written)"


def burst_beside_zero() -> str:
    return "burst beside requests_per_unit: 0, which denies everything; drop the burst, or allow some requests"


def log_too_long(requests_per_unit: int) -> str:
    return (
        f"sliding_log remembers every request, so requests_per_unit is at most {MAX_SLIDING_LOG:,}, "
        f"not {requests_per_unit:,}; sliding_window counts any number"
    )


def refills_too_slowly(limit: Limit) -> str:
    years = limit.burst * limit.window_us // limit.requests_per_unit // (Unit.YEAR.seconds * 1_000_000)
    rate = f"{limit.requests_per_unit:,} per {limit.unit.name.lower()}"
    return (
        f"a burst of {limit.burst:,} at {rate} takes {years:,} years to refill; "
        "at most 71 years can be counted exactly (2^51 microseconds): lower the burst or raise the rate"
    )


def bad_multiplier(multiplier: int) -> str:
    return f"unit_multiplier is from 1 to {MAX_MULTIPLIER}, not {multiplier}: unit: minute with 5 is five minutes"


def timezone_without_calendar() -> str:
    return "timezone has no meaning without 'calendar: true': other windows are the same everywhere"


def no_calendar_for_unit(unit: Unit) -> str:
    return f"a calendar has days, weeks, months and years, not {unit.name.lower()}s; drop 'calendar' or change the unit"


def no_calendar_for_algorithm(algorithm: Algorithm) -> str:
    return f"calendar windows are fixed windows, and {algorithm.value} has none; drop 'calendar' or 'algorithm'"


def calendar_with_multiplier() -> str:
    return "unit_multiplier has no meaning for a calendar: which two months would belong together?"


def unknown_timezone(name: str) -> str:
    hint = did_you_mean(name, available_timezones())
    return f"timezone '{cut(name)}' is not known; it is a name such as UTC or Europe/Berlin{hint}"


def limits_beside_rate_limit() -> str:
    return "'limits' and 'rate_limit' on one descriptor; write all of them under 'limits'"


def no_limits() -> str:
    return "'limits' is an empty list; write at least one limit, or drop it"


def unlimited_among_limits() -> str:
    return "'unlimited' among 'limits' would undo the others; write 'rate_limit: {unlimited: true}' alone"


def same_window_twice(limit: Limit) -> str:
    return (
        f"another limit of this descriptor is a {limit.algorithm.value} over the same window, so that the two would "
        "share a counter; keep the smaller one, or change the window or the algorithm"
    )


def unknown_choice(key: str, value: str, known: Iterable[str]) -> str:
    return f"{key} '{cut(value)}' is not one of {', '.join(known)}{did_you_mean(value.lower(), known)}"


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
        "charge: always with action: throttle, where a denied call takes no place in the queue; "
        "drop 'charge', it is admitted"
    )


def throttle_with(mode: str) -> str:
    return f"action: throttle with {mode}, which denies no call by itself, so that no call would wait; drop one of them"


def penalty_with(mode: str) -> str:
    return f"penalty with {mode}, which denies no call by itself, so that nothing can be penalised; drop one of them"


def too_many_violations(after: int) -> str:
    return f"after: at most {MAX_VIOLATIONS} violations are remembered, not {after}"


def bad_multiplier_count(number: int) -> str:
    return f"multipliers: a list of 1 to {MAX_MULTIPLIERS} whole numbers, not of {number:,}; e.g. [1, 2, 4, 8]"


def multiplier_too_large(multiplier: int) -> str:
    return f"multipliers: {multiplier} is more than {MAX_PENALTY_MULTIPLIER:,}, the maximum"


def decreasing_multipliers() -> str:
    return "multipliers must not decrease: repeated violations would wait less; e.g. [1, 2, 4, 8]"


def penalty_too_long(penalty: Penalty) -> str:
    counted = penalty.after + len(penalty.multipliers)
    return (
        f"penalty: after {penalty.after} and {len(penalty.multipliers)} multipliers would count {counted} violations; "
        f"at most {MAX_VIOLATIONS} are remembered: lower 'after'"
    )


def bad_warn_at(value: str) -> str:
    return (
        f"warn_at: {value} is not a fraction of the limit; it is a number above 0.1 and below 1, "
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
        f"so that it could outlive it; at most {format_duration_us(window_us // 2)}, or a longer window"
    )


def hot_with(what: str) -> str:
    return (
        f"{what} with hot, where hits are leased before the calls arrive, so that which call is denied, and when, "
        "is not known to the store; drop one of them"
    )


def hot_with_charge() -> str:
    return (
        "charge: always with hot, where hits are leased before the calls arrive, so that denied calls cannot be "
        "counted; drop 'charge', it is admitted"
    )


def hot_in_charging_domain() -> str:
    return (
        "hot in a domain with charge: always, where denied calls count too, which a lease cannot do; "
        "write 'charge: admitted' beside it, or drop it"
    )


def hot_without_limit(what: str) -> str:
    return f"{what} with hot, where nothing is counted that could be taken in advance; drop one of them"


# -- answer and deny --------------------------------------------------------------------------------------------------


def limits_of_with(what: str, reason: str) -> str:
    return f"'limits_of' cannot be used with '{what}': {reason}"


def unknown_family(name: str, families: Iterable[str]) -> str:
    return f"headers: {name} is not one of {', '.join(families)}{did_you_mean(name.lower(), families)}"


def family_twice(family: HeaderFamily) -> str:
    return f"headers: {family.value} is already in the list; once is enough"


def conflicting_reset_headers() -> str:
    first, second = HeaderFamily.LEGACY.value, HeaderFamily.LEGACY_EPOCH.value
    return f"headers: {first} and {second} have the same names and report the reset differently; keep one of them"


def unknown_format(name: str, formats: Iterable[str]) -> str:
    return f"format: {name} is not one of {', '.join(formats)}; a text of your own is 'body: …'"


def format_beside_body() -> str:
    return "'format' and 'body' in one deny; a denial has one body: keep one of them"


def not_a_template(what: str, value: str) -> str:
    return f"{what}: {value} is not text; write a text, with placeholders such as ${{retry_after}}"


def bad_template(what: str, reason: str) -> str:
    return f"{what}: the template {reason}"


def body_too_long() -> str:
    return f"body: longer than {MAX_BODY_BYTES // 2**10} KiB; a denial must cost less than the request"


def content_type_without_body() -> str:
    return "content_type has no meaning without 'body': a format has its own; drop it, or write a body"


def bad_content_type(text: str) -> str:
    return f"content_type: '{cut(text)}' is not a media type; e.g. text/html; charset=utf-8"


def bad_status(value: str) -> str:
    return f"status: {value} is not a denial; it is a whole number from 400 to 599, without quotes (429 if not written)"


def headers_not_a_mapping(value: str) -> str:
    return f"headers: {value} is not a mapping of names to texts; e.g. {{x-support: 'see https://example.com/limits'}}"


def bad_header_name(value: str) -> str:
    return f"headers: '{value}' is not the name of a header; a name is letters, digits, dashes and the like"


def reserved_header(name: str) -> str:
    return f"headers: '{name}' belongs to the connection or to the message as it is sent; drop it"


def content_type_among_headers() -> str:
    return "headers: the content type is written as 'content_type', beside 'body'"


def header_twice(name: str) -> str:
    return f"headers: '{cut(name)}' is already written; upper and lower case make no difference"


def too_many_headers(number: int) -> str:
    return f"headers: {number} of them; at most {MAX_HEADERS}"


def bad_header_text(what: str) -> str:
    return (
        f"{what}: a line break, another control character or a space at one end has no place here; "
        "write one line of text"
    )


def header_too_long(what: str) -> str:
    return f"{what}: longer than {MAX_HEADER_BYTES // 2**10} KiB; what is long belongs in the body"


# -- match ------------------------------------------------------------------------------------------------------------


def value_beside_match() -> str:
    return "'value' and 'match' on one descriptor; keep one of them"


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
    return f"regex '{cut(text)}' cannot be used: {reason}; it is RE2 syntax, without back-references and look-around"


# -- warnings ---------------------------------------------------------------------------------------------------------


def unread_document() -> str:
    return "from here on nothing is read: of a file the first YAML document counts; put the next one in its own file"


def no_effect_without_limit(key: str) -> str:
    return f"'{key}' has no effect on a descriptor without rate_limit"


def no_effect_when_unlimited(key: str) -> str:
    return f"'{key}' has no effect when unlimited"


def no_effect_without_store(key: str) -> str:
    return f"'{key}' has no effect where nothing is counted, neither on this descriptor nor below it"


def limit_beside_allow(key: str) -> str:
    return f"'{key}' has no effect beside 'action: allow', which lets everything pass uncounted; drop one of them"


def denies_everything(is_written: bool) -> str:
    reason = "requests_per_unit is 0" if is_written else "there is no requests_per_unit, which means 0"
    return f"{reason}: every request is denied"


def unreachable(what: str, by: str, at: Position) -> str:
    return f"{what} is never matched: it is always preceded by {by} at {at}"


def unknown_replaces(name: str) -> str:
    return f"replaces '{cut(name)}', but no rate_limit of this domain has that name"


def unmapped_descriptor(keys: Iterable[str]) -> str:
    return f"no rule of this domain matches a descriptor of {', '.join(keys)}: it has no effect"


# -- formatting -------------------------------------------------------------------------------------------------------

TEXT = "it is text"
BOOLEAN = "it is true or false, without quotes"
COUNT = f"it is a whole number from 0 to {MAX_REQUESTS_PER_UNIT}, without quotes"
