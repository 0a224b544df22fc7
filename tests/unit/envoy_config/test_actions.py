"""Path templates as Envoy regular expressions: they match the same paths as the template."""

from __future__ import annotations

import pytest
import re2

from ratelimit_rls.core.path_template import PathTemplate
from ratelimit_rls.envoy_config.actions import path_regex, rate_limits
from ratelimit_rls.envoy_config.descriptors import DomainDescriptors, SentEntry
from ratelimit_rls.envoy_config.serialize import to_json_dict
from ratelimit_rls.envoy_config.value_sources import PathTemplateAction, path_template_source

PATHS = ["/", "//", "/a", "/a/", "/a/b", "/a//", "/a/b/c", "/A", "/a.b", "/axb", "/x/b", "/a%2Fb", "*", ""]


@pytest.mark.parametrize("text", ["/", "/**", "/a", "/a/", "/{x}", "/{x}/b", "/a/{x}", "/a/{x}/**", "/a/**", "/a.b"])
@pytest.mark.parametrize("query", ["", "?", "?x=/a/b", "?a?b"])
def test_path_regex_matches_the_same_paths_as_the_template(text: str, query: str) -> None:
    template = PathTemplate.parse(text)
    matched = [path for path in PATHS if re2.fullmatch(path_regex(template), path + query)]
    assert matched == [path for path in PATHS if template.fits(template.split(path))]


def matchers(source: PathTemplateAction, number: int) -> list[tuple[str, bool]]:
    (one,) = rate_limits(DomainDescriptors("edge", ((SentEntry("p", source, number),),), 0))
    (action,) = to_json_dict(one)["actions"]
    headers = action["header_value_match"]["headers"]
    return [(each["string_match"]["safe_regex"]["regex"], each.get("invert_match", False)) for each in headers]


def test_path_match_excludes_only_overlapping_earlier_templates() -> None:
    source = path_template_source(("/users/me", "/other", "/users/{id}/x", "/users/{id}"))
    own, *earlier = matchers(source, 3)
    assert own == (path_regex(source.templates[3]), False)
    assert earlier == [(path_regex(source.templates[0]), True)]
    assert matchers(source, 0) == [(path_regex(source.templates[0]), False)]
