"""Escapes are read as the standard library reads them, and no way to write a parameter's name is overlooked."""

from __future__ import annotations

from urllib.parse import quote, unquote

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ratelimit_rls.core.attributes import Attributes, QueryParameter
from ratelimit_rls.core.escapes import unescaped

# The machine may be busy: how long an example takes says nothing here.
patiently = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])

# What escapes, names and their ends are made of, so that they meet often, and anything else now and then.
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
    """The first parameter of that name, or as it stands in the query if it has escapes itself."""
    for part in query.split("&"):
        name, _, value = part.partition("=")
        if wanted in (name, straightforward(name.replace("+", " "))):
            return straightforward(value.replace("+", " "))
    return None


@st.composite
def written(draw: st.DrawFn, name: str) -> str:
    """The name in one of the ways that a form could write it, or nearly."""
    ways: list[st.SearchStrategy[str]] = []
    for character in name:
        escape = quote(character, safe="") if quote(character, safe="") != character else f"%{ord(character):02X}"
        ways.append(st.sampled_from([character, escape, escape.lower(), "+" if character == " " else character]))
    return "".join(draw(way) for way in ways)


@st.composite
def asked(draw: st.DrawFn) -> tuple[str, str]:
    """A name, and a query in which it may stand."""
    name = draw(texts)
    parts = st.one_of(texts, written(name), st.builds("{}={}".format, written(name), texts))
    return name, "&".join(draw(st.lists(parts, max_size=5)))


@patiently
@given(texts)
def test_an_escape_is_what_it_is_to_the_standard_library(text: str) -> None:
    assert unescaped(text) == straightforward(text)


@patiently
@given(asked())
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
def test_a_parameter_is_found_however_its_name_is_written(asked: tuple[str, str]) -> None:
    name, query = asked
    assert QueryParameter(name).value(Attributes(query=query)) == parsed(query, name)
