"""ETags: a thing's version, in quotes; and what a request says of those it has seen."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ratelimit_rls.transport.http.admin.problems import Fault, Stale

_TAG = re.compile(r'\s*(?:W/)?"([\x21\x23-\x7e\x80-\xff]*)"\s*(?:,|$)')
_ANY = "*"
LONGEST = 1000


def etag(version: int) -> str:
    return f'"{version}"'


@dataclass(frozen=True, slots=True)
class Seen:
    """What If-Match and If-None-Match ask for; None: nothing."""

    match: frozenset[str] | None = None
    none_match: frozenset[str] | None = None

    @property
    def is_to_create(self) -> bool:
        return self.none_match is not None and _ANY in self.none_match

    def require(self, version: int | None, what: str) -> None:
        """Before a change: raises Stale unless the thing (None: there is none) is as the request has seen it."""
        tag = None if version is None else etag(version)
        if self.is_to_create and tag is not None:
            raise Stale(f"{what} is there already; without If-None-Match it is replaced", tag)
        if self.match is None:
            return
        if tag is None:
            raise Stale(f"{what} is not there, and If-Match asks for it to be", None)
        if _ANY not in self.match and tag not in self.match:
            raise Stale(f"{what} has changed since you read it: it is now {tag}; read it again and decide anew", tag)

    def knows(self, version: int) -> bool:
        """Before an answer to GET: whether the caller has it already."""
        return self.none_match is not None and (_ANY in self.none_match or etag(version) in self.none_match)


def seen(if_match: str | None, if_none_match: str | None) -> Seen:
    """Raises a Fault (400) if a header is not written as it must be."""
    return Seen(_tags("If-Match", if_match), _tags("If-None-Match", if_none_match))


def _tags(header: str, value: str | None) -> frozenset[str] | None:
    if value is None:
        return None
    if value.strip() == _ANY:
        return frozenset([_ANY])
    tags, at = [], 0
    while len(value) <= LONGEST and (found := _TAG.match(value, at)):
        tags.append(f'"{found[1]}"')
        at = found.end()
    if at != len(value) or not tags:
        raise Fault(400, "bad-request", f'{header} is no list of ETags; use e.g. {header}: "3"')
    return frozenset(tags)
