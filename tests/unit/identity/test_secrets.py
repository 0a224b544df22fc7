"""Keys and tokens that we make: found by a public id, compared by a keyed hash, and never shown again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimit_rls.identity.secrets import digest, matches, new_secret, public_id

SECRET = b"0123456789abcdef"


@pytest.mark.parametrize("kind", ["rlk", "rla"])
def test_a_new_secret_is_found_by_its_id_and_by_nothing_else(kind: str) -> None:
    made = new_secret(kind)

    assert public_id(made.text, kind) == made.public_id
    assert public_id(made.text, "rla" if kind == "rlk" else "rlk") is None
    assert made.text == f"{kind}_{made.public_id}_{made.text[17:]}"
    assert len(made.public_id) == 12
    assert len(made.text) == 60


def test_no_two_secrets_are_alike() -> None:
    made = [new_secret("rlk") for _ in range(100)]

    assert len({one.text for one in made}) == len({one.public_id for one in made}) == 100


def test_a_secret_does_not_show_itself() -> None:
    made = new_secret("rlk")

    assert made.text not in repr(made)
    assert made.text not in f"{made}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rlk",
        "rlk__",
        "rlk_" + "a" * 12,
        "rlk_" + "a" * 12 + "_" + "b" * 42,
        "rlk_" + "a" * 12 + "_" + "b" * 44,
        "rlk_" + "a" * 12 + "_" + "b" * 42 + "\n",
        "rlk_" + "A" * 12 + "_" + "b" * 43,
        "rlk_" + "1" * 12 + "_" + "b" * 43,
        "rlk_" + "é" * 12 + "_" + "b" * 43,
        "rlk_" + "a" * 12 + "_" + "b" * 42 + "=",
        "RLK_" + "a" * 12 + "_" + "b" * 43,
        " rlk_" + "a" * 12 + "_" + "b" * 42,
        "rlk_" * 1_000_000,
    ],
)
def test_what_has_another_shape_has_no_id(text: str) -> None:
    assert public_id(text, "rlk") is None


almost = st.builds(
    lambda *parts: "_".join(parts),
    st.sampled_from(["rlk", "rla", "rl"]),
    st.text("abz27", min_size=11, max_size=13),
    st.text("aZ09_-é", min_size=42, max_size=44),
)


@given(st.text() | almost)
def test_an_id_is_never_more_than_an_id(text: str) -> None:
    found = public_id(text, "rlk")

    assert found is None or (len(found) == 12 and found.isascii() and found.isalnum() and text.startswith("rlk_"))


@given(st.text(), st.text())
def test_a_digest_matches_what_it_was_made_from_alone(one: str, other: str) -> None:
    kept = digest(SECRET, one)

    assert matches(SECRET, one, kept)
    assert matches(SECRET, other, kept) == (one == other)
    assert not matches(b"another secret!!", one, kept)


def test_nothing_matches_an_unknown_id() -> None:
    assert not matches(SECRET, new_secret("rlk").text, None)
    assert not matches(SECRET, "\ud800", None)
