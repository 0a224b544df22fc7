"""Different descriptors never share a counter, with any sharding."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratelimit_rls.core.model import Algorithm, Entry, Limit, Penalty, Unit, WarnAt, Watcher
from ratelimit_rls.core.storage_keys import (
    ShardBy,
    ShardByKey,
    Sharding,
    encode_tag,
    hash_tag,
    key_start,
    key_suffix,
    storage_key,
    tag_encoder,
)

# No deadline: the machine may be busy.
patiently = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])

# Characters of the encoding itself, to provoke ambiguities, and sometimes any other.
texts = st.one_of(
    st.text("ab/=%{}~_23AF:", max_size=6), st.text(max_size=6), st.sampled_from(["a:gcra:60", ":penalty"])
)
Tagged = tuple[str, tuple[Entry, ...], Sharding]
keys = st.sampled_from(["", "a", "b", "=", "a/b"])
shardings: st.SearchStrategy[Sharding] = st.sampled_from(ShardBy) | st.builds(ShardByKey, keys)
entries_of_tags = st.lists(st.builds(Entry, keys | texts, texts), max_size=4).map(tuple)
tagged = st.tuples(texts, entries_of_tags, shardings)
limits = st.builds(
    Limit, st.integers(0, 2**32 - 1), st.sampled_from([unit for unit in Unit if unit]), st.sampled_from(Algorithm)
)
watchers = st.sampled_from([Penalty(1, 1, (1,)), WarnAt(800)])
states = limits | watchers


def key(tag: bytes, state: Limit | Watcher) -> bytes:
    return storage_key(b"", tag, key_suffix(state))


def kind(state: Limit | Watcher) -> object:
    return (state.algorithm, state.unit) if isinstance(state, Limit) else state


def _effective(one: Tagged) -> Tagged:
    """Return the same with the sharding that determines the tag: the default, if no entry has the key."""
    domain, entries, shard_by = one
    if isinstance(shard_by, ShardByKey) and shard_by.key not in {entry.key for entry in entries}:
        return domain, entries, ShardBy.DESCRIPTOR
    return one


@patiently
@given(tagged, tagged)
def test_different_descriptors_have_different_tags(one: Tagged, other: Tagged) -> None:
    assert (encode_tag(*one) == encode_tag(*other)) == (_effective(one) == _effective(other))


@patiently
@given(texts, entries_of_tags, entries_of_tags, shardings)
def test_descriptors_of_one_domain_have_different_tags(
    domain: str, one: tuple[Entry, ...], other: tuple[Entry, ...], shard_by: Sharding
) -> None:
    assert (encode_tag(domain, one, shard_by) == encode_tag(domain, other, shard_by)) == (one == other)


@patiently
@given(tagged, st.sampled_from([0, 490, 505, 510, 600]))
def test_fast_path_gives_the_same_tag(one: Tagged, padding: int) -> None:
    domain, entries, shard_by = one
    tags = tag_encoder(b"rl:", domain, shard_by)
    padded = (*entries, Entry("k", "x" * padding)) if padding else entries

    if isinstance(_effective((domain, padded, shard_by))[2], ShardBy):
        assert tags.of(padded) == b"rl:" + tags._escape_and_shorten(padded)
    assert (
        storage_key(b"p:", encode_tag(*one), b"end")
        == tag_encoder(key_start(b"p:"), domain, shard_by).of(entries) + b":end"
    )


@patiently
@given(tagged, states, tagged, states)
def test_different_states_have_different_keys(
    one: Tagged, state: Limit | Watcher, other: Tagged, other_state: Limit | Watcher
) -> None:
    same = (_effective(one), kind(state)) == (_effective(other), kind(other_state))

    assert (key(encode_tag(*one), state) == key(encode_tag(*other), other_state)) == same


@patiently
@given(tagged, texts)
def test_end_of_tag_is_unambiguous(one: Tagged, behind: str) -> None:
    """Two keys are never equal, whatever follows the colon."""
    tag = encode_tag(*one)

    braced, _, rest = (tag + b":" + behind.encode()).partition(b"}")
    assert braced + b"}" + rest.partition(b":")[0] == tag


@patiently
@given(
    st.text(min_size=400, max_size=700),
    st.integers(0, 399),
    st.sampled_from([*ShardBy, ShardByKey("k"), ShardByKey("l")]),
)
def test_long_values_with_one_difference_have_different_tags(value: str, at: int, shard_by: Sharding) -> None:
    changed = value[:at] + ("a" if value[at] != "a" else "b") + value[at + 1 :]
    for other in ("v", "v" * 600):
        one, another = ([Entry("k", text), Entry("l", other)] for text in (value, changed))

        assert encode_tag("d", one, shard_by) != encode_tag("d", another, shard_by)


@patiently
@given(
    st.lists(st.integers(0, 700), min_size=2, max_size=2, unique=True),
    texts,
    st.sampled_from([*ShardBy, ShardByKey("k")]),
)
def test_lengths_of_domain_and_value_give_different_tags(lengths: list[int], value: str, shard_by: Sharding) -> None:
    """A longer domain cannot compensate for a shorter value."""
    short, long = sorted(lengths)

    one = encode_tag("a" * short, [Entry("k", "a" * long + value)], shard_by)
    other = encode_tag("a" * long, [Entry("k", "a" * short + value)], shard_by)

    assert one != other


@patiently
@given(tagged)
def test_tag_has_no_braces_or_line_breaks_inside(one: Tagged) -> None:
    tag = encode_tag(*one)

    assert tag.startswith(b"{")
    assert (tag.count(b"{"), tag.count(b"}")) == (1, 1)
    assert not set(tag) & set(b" \n\r\0")


@patiently
@given(texts.filter(bool), st.lists(st.builds(Entry, texts, texts | st.just("a" * 600)), max_size=3))
def test_shard_by_domain_hash_tag_depends_on_domain_only(domain: str, entries: list[Entry]) -> None:
    braced, _, _ = encode_tag(domain, entries, ShardBy.DOMAIN).partition(b"}")

    assert braced + b"}" == encode_tag(domain, [])


@patiently
@given(texts.filter(bool), texts | st.just("a" * 600), entries_of_tags, entries_of_tags, keys)
def test_shard_by_key_hash_tag_depends_on_domain_and_value_only(
    domain: str, value: str, before: tuple[Entry, ...], after: tuple[Entry, ...], key: str
) -> None:
    before = tuple(entry for entry in before if entry.key != key)

    braced, _, _ = encode_tag(domain, (*before, Entry(key, value), *after), ShardByKey(key)).partition(b"}")

    assert braced + b"}" == hash_tag(domain, Entry(key, value), ShardByKey(key))
