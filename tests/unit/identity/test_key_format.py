"""Format of API keys and admin tokens: public id, keyed digest, and no secret in repr."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimit_rls.identity.key_format import digest, matches, new_secret, public_id

SECRET = b"0123456789abcdef"


@pytest.mark.parametrize("kind", ["rlk", "rla"])
def test_new_secret_has_an_id_of_its_kind(kind: str) -> None:
    made = new_secret(kind)  # type: ignore[arg-type]

    assert public_id(made.text, kind) == made.public_id  # type: ignore[arg-type]
    assert public_id(made.text, "rla" if kind == "rlk" else "rlk") is None
    assert made.text == f"{kind}_{made.public_id}_{made.text[17:]}"
    assert len(made.public_id) == 12
    assert len(made.text) == 60


def test_secrets_are_unique() -> None:
    made = [new_secret("rlk") for _ in range(100)]

    assert len({one.text for one in made}) == len({one.public_id for one in made}) == 100


def test_repr_has_no_secret() -> None:
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
def test_other_formats_have_no_id(text: str) -> None:
    assert public_id(text, "rlk") is None


almost = st.builds(
    lambda *parts: "_".join(parts),
    st.sampled_from(["rlk", "rla", "rl"]),
    st.text("abz27", min_size=11, max_size=13),
    st.text("aZ09_-é", min_size=42, max_size=44),
)


@given(st.text() | almost)
def test_public_id_is_only_the_id(text: str) -> None:
    found = public_id(text, "rlk")

    assert found is None or (len(found) == 12 and found.isascii() and found.isalnum() and text.startswith("rlk_"))


@given(st.text(), st.text())
def test_digest_matches_its_text_only(one: str, other: str) -> None:
    kept = digest(SECRET, one)

    assert matches(SECRET, one, kept)
    assert matches(SECRET, other, kept) == (one == other)
    assert not matches(b"another secret!!", one, kept)


def test_nothing_matches_unknown_id() -> None:
    assert not matches(SECRET, new_secret("rlk").text, None)
    assert not matches(SECRET, "\ud800", None)
