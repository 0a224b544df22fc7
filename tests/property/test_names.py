"""Header values of names are unique, and HTTP does not change them."""

from __future__ import annotations

from urllib.parse import unquote

from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from ratelimit_rls.core.names import encode_header_value, name_error

patiently = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])

# Characters of names and of their encoded forms, so that the two overlap often, and sometimes any other.
pieces = st.sampled_from(
    ["a", " ", "%", "%20", "%25", "20", "%F0%9F%98%80", "\N{GRINNING FACE}", "é", "e\u0301", "\xa0"]
)
texts = st.lists(pieces, max_size=5).map("".join) | st.text(max_size=8)
allowed_names = texts.filter(lambda text: name_error(text) is None)


@patiently
@given(texts)
@example("%")
@example("\ud800")
def test_header_value_is_valid_and_decodes_to_the_name(text: str) -> None:
    value = encode_header_value(text)
    assert value.isascii()
    assert value.isprintable()
    assert value == value.strip()
    assert unquote(value, errors="surrogatepass") == text


@patiently
@given(texts, texts)
@example(" alice", "alice")
@example("a\N{GRINNING FACE}", "a%F0%9F%98%80")
@example("%20alice", " alice")
def test_header_values_are_unique(one: str, other: str) -> None:
    assume(one != other)
    assert encode_header_value(one) != encode_header_value(other)
    assert encode_header_value(one).strip() != encode_header_value(other).strip()


@patiently
@given(allowed_names)
def test_valid_name_is_not_stripped_by_http(name: str) -> None:
    assert name == name.strip() != ""
    assert name.isprintable()


def test_plain_names_are_not_encoded() -> None:
    for name in ("alice", "alice@example.com", "a b", "rlk:1/2+3", "~!\"'"):
        assert (encode_header_value(name), name_error(name)) == (name, None)


def test_invalid_names_have_an_error() -> None:
    faults = {"": "empty", " a": "space", "a ": "space", " ": "space", "a\tb": "printed", "a\xa0": "printed"}
    for name, error in {**faults, "a\ud800": "printed", "a\u2028b": "printed", "x" * 256: "256 characters"}.items():
        assert error in (name_error(name) or "")
