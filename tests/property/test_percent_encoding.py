"""Percent-decoding agrees with the standard library, and parameters are found for every spelling of their name."""

from __future__ import annotations

from urllib.parse import quote, unquote

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ratelimit_rls.core.attributes import Attributes, QueryParameterSource
from ratelimit_rls.core.percent_encoding import percent_decode

# No deadline: the machine may be busy.
patiently = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])

# Characters of escapes, names and separators, so that they combine often, and sometimes any other.
characters = st.sampled_from("aF4c%+ &=ö€\n") | st.characters(exclude_categories=["Cs"])
texts = st.text(characters, max_size=8) | st.lists(
    st.sampled_from(["%", "%4", "%61", "%c3", "%B6", "%25", "%3D", "%26", "%2b", "%20", "a", "ö", "+", " "]), max_size=6
).map("".join)


def straightforward(text: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        return text


def parsed(query: str, wanted: str) -> str | None:
    """Return the first parameter of that name, or of the literal name if it has escapes itself."""
    for part in query.split("&"):
        name, _, value = part.partition("=")
        if wanted in (name, straightforward(name.replace("+", " "))):
            return straightforward(value.replace("+", " "))
    return None


@st.composite
def spelling(draw: st.DrawFn, name: str) -> str:
    """Draw an encoding of the name as in a form, or nearly."""
    spellings: list[st.SearchStrategy[str]] = []
    for character in name:
        escape = quote(character, safe="") if quote(character, safe="") != character else f"%{ord(character):02X}"
        spellings.append(st.sampled_from([character, escape, escape.lower(), "+" if character == " " else character]))
    return "".join(draw(one) for one in spellings)


@st.composite
def name_and_query(draw: st.DrawFn) -> tuple[str, str]:
    """Draw a name, and a query that may contain it."""
    name = draw(texts)
    parts = st.one_of(texts, spelling(name), st.builds("{}={}".format, spelling(name), texts))
    return name, "&".join(draw(st.lists(parts, max_size=5)))


@patiently
@given(texts)
def test_percent_decode_agrees_with_urllib(text: str) -> None:
    assert percent_decode(text) == straightforward(text)


@patiently
@given(name_and_query())
@example(("a", "b=1&%61=2&a=3"))
@example(("a", "x=&a&a=1"))
@example(("a", "aa=1&ba=2&b=a&c=%26a=3"))
@example(("a b", "a+b=1"))
@example(("a+b", "a+b=1"))
@example(("a+b", "a%2bb=1"))
@example(("a=b", "a=b&a%3Db=1"))
@example(("a&b", "a&b=1&a%26b=2"))
@example(("%61", "a=1&%2561=2"))
@example(("%", "%=1"))
@example((" %ff", "+%ff=1"))
@example(("+ %ff", "++%ff=1&+ %ff=2"))
@example(("ö", "%C3%b6=1"))
@example(("a", "a\n=1&a=2\n"))
def test_parameter_is_found_for_every_spelling_of_its_name(name_and_query: tuple[str, str]) -> None:
    name, query = name_and_query
    assert QueryParameterSource(name).value(Attributes(query=query)) == parsed(query, name)
