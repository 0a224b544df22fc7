"""Requests as administrators write them, and the rules they meet."""

from __future__ import annotations

from collections.abc import Sequence

from ratelimit_rls.core.model import Descriptor, Entry, Purpose, Request
from ratelimit_rls.core.tree import Tree
from ratelimit_rls.errors import NotReady
from ratelimit_rls.transport.http.admin.backend import AdminBackend
from ratelimit_rls.transport.http.admin.models import Asked, CheckBody, DescriptorBody


def tree_in_force(backend: AdminBackend) -> Tree:
    """Raises NotReady if there is none yet."""
    if backend.rules.current is None:
        raise NotReady("no rules have been loaded yet")
    return backend.rules.current.tree


def request_of(asked: Asked, purpose: Purpose = Purpose.DECIDE) -> Request:
    hits = asked.hits_addend if isinstance(asked, CheckBody) else None
    return Request(asked.domain, tuple(descriptors_of(asked.descriptors, hits)), purpose=purpose)


def descriptors_of(bodies: Sequence[DescriptorBody], hits: int | None = None) -> list[Descriptor]:
    return [Descriptor(tuple(Entry(entry.key, entry.value) for entry in body.entries), hits=hits) for body in bodies]
