"""SPIFFE IDs: the URIs that a service mesh puts into certificates (spiffe://<trust domain>/<path>)."""

from __future__ import annotations

import re

SCHEME = "spiffe://"
MAX_ID_BYTES = 2048
MAX_TRUST_DOMAIN_BYTES = 255

_TRUST_DOMAIN = re.compile(r"[a-z0-9._-]+", re.ASCII)
_SEGMENT = re.compile(r"[a-zA-Z0-9._-]+", re.ASCII)
_ANY_BELOW = "/*"


def is_workload_id(uri: str) -> bool:
    """Return whether a URI is the SPIFFE ID of a workload, by the grammar of the SPIFFE-ID specification.

    A workload's ID has a path. Percent escapes, empty segments, "." and "..", a port, a query, a fragment and capital
    letters in the trust domain are not allowed in an ID, so two different texts are never the same ID.
    """
    if not uri.startswith(SCHEME) or len(uri) > MAX_ID_BYTES:
        return False
    trust_domain, *segments = uri[len(SCHEME) :].split("/")
    return (
        _TRUST_DOMAIN.fullmatch(trust_domain) is not None
        and len(trust_domain) <= MAX_TRUST_DOMAIN_BYTES
        and bool(segments)
        and all(_SEGMENT.fullmatch(segment) and segment not in (".", "..") for segment in segments)
    )


def is_pattern(pattern: str) -> bool:
    """Return whether a text is an ID, or an ID or trust domain followed by `/*`, which matches every ID below it."""
    if pattern.endswith(_ANY_BELOW):
        return is_workload_id(f"{pattern.removesuffix(_ANY_BELOW)}/any")
    return is_workload_id(pattern)


def allows(pattern: str, uri: str) -> bool:
    """Return whether a pattern matches an ID. Whole path segments are compared, case-sensitively."""
    if not is_workload_id(uri):
        return False
    if pattern.endswith(_ANY_BELOW):
        return uri.startswith(pattern[:-1])
    return uri == pattern
