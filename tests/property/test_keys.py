"""No two descriptors share a counter."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratelimit_rls.core.keys import encode_tag, storage_key
from ratelimit_rls.core.model import Algorithm, Entry, Limit, Unit

# The machine may be busy: how long an example takes says nothing here.
patiently = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])

# What the encoding itself is made of, so that it gets every chance to be confused, and anything else now and then.
texts = st.one_of(st.text("ab/=%{}~_2F:", max_size=6), st.text(max_size=6))
descriptors = st.tuples(texts, st.lists(st.builds(Entry, texts, texts), max_size=4).map(tuple))
limits = st.builds(
    Limit, st.integers(0, 2**32 - 1), st.sampled_from([unit for unit in Unit if unit]), st.sampled_from(Algorithm)
)


@patiently
@given(descriptors, descriptors)
def test_different_descriptors_have_different_tags(
    one: tuple[str, tuple[Entry, ...]], other: tuple[str, tuple[Entry, ...]]
) -> None:
    assert (encode_tag(*one) == encode_tag(*other)) == (one == other)


@patiently
@given(descriptors, limits, descriptors, limits)
def test_different_counters_have_different_keys(
    one: tuple[str, tuple[Entry, ...]], limit: Limit, other: tuple[str, tuple[Entry, ...]], other_limit: Limit
) -> None:
    same = (one, limit.algorithm, limit.unit) == (other, other_limit.algorithm, other_limit.unit)

    keys = storage_key("", encode_tag(*one), limit), storage_key("", encode_tag(*other), other_limit)

    assert (keys[0] == keys[1]) == same


@patiently
@given(st.text(min_size=400, max_size=700), st.integers(0, 399))
def test_long_values_that_differ_in_one_place_have_different_tags(value: str, at: int) -> None:
    changed = value[:at] + ("a" if value[at] != "a" else "b") + value[at + 1 :]

    assert encode_tag("d", [Entry("k", value)]) != encode_tag("d", [Entry("k", changed)])


@patiently
@given(descriptors)
def test_a_tag_never_breaks_out_of_its_braces_or_its_line(one: tuple[str, tuple[Entry, ...]]) -> None:
    tag = encode_tag(*one)

    assert not set(tag) & set(b"{} \n\r\0")
