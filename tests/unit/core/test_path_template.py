"""Which paths a template matches."""

from __future__ import annotations

import re

import pytest

from ratelimit_rls.core.path_template import PathTemplate


def fits(template: str, path: str) -> bool:
    parsed = PathTemplate.parse(template)
    return parsed.fits(parsed.split(path))


@pytest.mark.parametrize(
    ("template", "path"),
    [
        ("/", "/"),
        ("/users", "/users"),
        ("/users/", "/users/"),
        ("/users/{id}", "/users/7"),
        ("/users/{id}", "/users/%2F"),
        ("/users/{id}/orders", "/users/7/orders"),
        ("/users/{id}/**", "/users/7"),
        ("/users/{id}/**", "/users/7/"),
        ("/users/{id}/**", "/users/7/orders/8"),
        ("/**", "/"),
        ("/**", "/a//b/../c"),
        ("/a//b", "/a//b"),
        ("/{a}/{b}", "/x/y"),
    ],
)
def test_template_matches_path(template: str, path: str) -> None:
    assert fits(template, path)


@pytest.mark.parametrize(
    ("template", "path"),
    [
        ("/", "/users"),
        ("/users", "/users/"),
        ("/users", "/Users"),
        ("/users", "/%75sers"),
        ("/users/{id}", "/users/"),
        ("/users/{id}", "/users"),
        ("/users/{id}", "/users/7/orders"),
        ("/users/{id}/**", "/users/"),
        ("/users/{id}/**", "/users"),
        ("/users/{id}/**", "/user/7"),
        ("/a/b", "/a//b"),
        ("/a/b", "xa/b"),  # does not start with a slash
        ("/**", ""),
        ("/**", "*"),
        ("/", ""),
    ],
)
def test_template_does_not_match_path(template: str, path: str) -> None:
    assert not fits(template, path)


def test_path_is_split_no_further_than_needed() -> None:
    template = PathTemplate.parse("/a/{b}")
    assert template.split("/a/b" + "/c" * 100_000) == ["a", "b", "c" + "/c" * 99_999]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "does not start with '/'"),
        ("users", "does not start with '/'"),
        ("/users?page=1", "has a '?' or a '#'"),
        ("/users/{id", "'{id'; a segment must be plain text or '{name}'"),
        ("/users/{id}.json", "'{id}.json'; a segment"),
        ("/users/{}", "the name in braces must"),
        ("/users/{a-b}", "the name in braces must"),
        ("/users/{id}/x/{id}", "has '{id}' twice"),
        ("/users/**/x", "'**' before its end"),
        ("/users/x**", "'**' before its end"),
        ("/users/*", "'*'; a segment"),
    ],
)
def test_invalid_template(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        PathTemplate.parse(text)


@pytest.mark.parametrize(
    ("earlier", "later", "covered"),
    [
        ("/**", "/users", True),
        ("/{a}", "/users", True),
        ("/{a}", "/", False),
        ("/{a}", "/{b}", True),
        ("/{a}/**", "/users/**", True),
        ("/{a}", "/users/**", False),
        ("/users", "/{a}", False),
        ("/users/**", "/users/{id}", True),
        ("/users/{id}", "/users/**", False),
    ],
)
def test_covers(earlier: str, later: str, covered: bool) -> None:
    assert PathTemplate.parse(earlier).covers(PathTemplate.parse(later)) is covered
