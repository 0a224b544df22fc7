"""What is remembered of tokens: for a while, and within a bound."""

from __future__ import annotations

from ratelimit_rls.identity.remembered import Remembered


def test_it_ends() -> None:
    remembered = Remembered[str](10)
    remembered.put(b"1", "one", until_s=5)

    assert remembered.get(b"1", 4.9) == "one"
    assert remembered.get(b"1", 5) is None
    assert remembered.get(b"2", 0) is None


def test_it_is_bounded_and_keeps_the_newest() -> None:
    remembered = Remembered[int](10)

    for number in range(1000):
        remembered.put(b"%d" % number, number, until_s=1)
        assert remembered.get(b"%d" % number, 0) == number

    assert len(remembered) == len(remembered._digests) == 10
    assert {remembered.get(digest, 0) for digest in remembered._digests} == {int(one) for one in remembered._digests}


def test_the_same_once_more_takes_no_other_place() -> None:
    remembered = Remembered[int](2)
    for number in range(10):
        remembered.put(b"1", number, until_s=1)
    remembered.put(b"2", 2, until_s=1)

    assert (remembered.get(b"1", 0), remembered.get(b"2", 0)) == (9, 2)


def test_all_can_be_forgotten() -> None:
    remembered = Remembered[int](2)
    remembered.put(b"1", 1, until_s=1)
    remembered.clear()
    remembered.put(b"2", 2, until_s=1)

    assert remembered.get(b"1", 0) is None
    assert len(remembered) == 1
