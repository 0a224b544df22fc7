"""Signed cursors."""

from __future__ import annotations

from ratelimit_rls.admin.http.pagination import Cursors

KEY_SECRET = b"the secret of the tests"


def test_cursor_round_trip() -> None:
    cursors = Cursors(KEY_SECRET)
    for place in (["ä/b"], [2**60], ["x" * 255], ["\U0001f600" * 255]):
        assert cursors.read(cursors.write("/a", {"b": "c"}, place), "/a", {"b": "c"}) == place
        assert len(cursors.write("/a", {}, place)) <= 4200
