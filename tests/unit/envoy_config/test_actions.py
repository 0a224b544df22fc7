"""Paths by their shape, as a regular expression of Envoy's: met by the same paths as the template."""

from __future__ import annotations

import pytest
import re2

from ratelimit_rls.core.path_template import PathTemplate
from ratelimit_rls.envoy_config.actions import path_regex, rate_limits
from ratelimit_rls.envoy_config.descriptors import MadeEntry, Plan
from ratelimit_rls.envoy_config.source import PathTemplates, path_templates
from ratelimit_rls.envoy_config.written import written

PATHS = ["/", "//", "/a", "/a/", "/a/b", "/a//", "/a/b/c", "/A", "/a.b", "/axb", "/x/b", "/a%2Fb", "*", ""]


@pytest.mark.parametrize("text", ["/", "/**", "/a", "/a/", "/{x}", "/{x}/b", "/a/{x}", "/a/{x}/**", "/a/**", "/a.b"])
@pytest.mark.parametrize("query", ["", "?", "?x=/a/b", "?a?b"])
def test_a_template_is_met_by_the_same_paths_with_any_query(text: str, query: str) -> None:
    template = PathTemplate.parse(text)
    met = [path for path in PATHS if re2.fullmatch(path_regex(template), path + query)]
    assert met == [path for path in PATHS if template.fits(template.split(path))]


def matchers(source: PathTemplates, number: int) -> list[tuple[str, bool]]:
    (one,) = rate_limits(Plan("edge", ((MadeEntry("p", source, number),),), 0))
    (action,) = written(one)["actions"]
    headers = action["header_value_match"]["headers"]
    return [(each["string_match"]["safe_regex"]["regex"], each.get("invert_match", False)) for each in headers]


def test_a_template_leaves_to_earlier_ones_what_fits_both_and_does_not_ask_about_the_others() -> None:
    source = path_templates(("/users/me", "/other", "/users/{id}/x", "/users/{id}"))
    mine, *earlier = matchers(source, 3)
    assert mine == (path_regex(source.templates[3]), False)
    assert earlier == [(path_regex(source.templates[0]), True)]
    assert matchers(source, 0) == [(path_regex(source.templates[0]), False)]
