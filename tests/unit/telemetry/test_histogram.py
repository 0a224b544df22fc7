"""Histograms: merging is exact, percentiles are within a tenth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimit_rls.telemetry.histogram import BUCKETS, bucket_of, from_text, merge_histograms, percentiles_us, to_text

TIMES = st.floats(1, 50e6)
HISTOGRAMS = st.dictionaries(st.integers(0, BUCKETS - 1), st.integers(1, 2**40))


def of(times_us: list[float]) -> dict[int, int]:
    return merge_histograms({bucket_of(us): 1} for us in times_us)


@given(st.lists(TIMES, min_size=1), st.floats(0.1, 100))
def test_a_percentile_is_off_by_a_tenth_at_most(times_us: list[float], percent: float) -> None:
    (percentiles,) = percentiles_us(of(times_us), [percent])
    assert percentiles is not None
    # The smallest value that this percentage does not exceed.
    exact = next(us for rank, us in enumerate(sorted(times_us), 1) if rank >= len(times_us) * percent / 100)
    assert abs(percentiles - exact) <= exact / 10


@given(st.lists(st.lists(TIMES)))
def test_merging_equals_one_histogram_of_all_values(parts: list[list[float]]) -> None:
    assert merge_histograms(map(of, parts)) == of([us for part in parts for us in part])


@given(HISTOGRAMS)
def test_text_round_trip(histogram: dict[int, int]) -> None:
    assert from_text(to_text(histogram)) == histogram


@given(st.floats(0, 1e12), st.floats(0, 1e12))
def test_buckets_are_monotonic(one_us: float, other_us: float) -> None:
    low, high = sorted([one_us, other_us])
    assert 0 <= bucket_of(low) <= bucket_of(high) < BUCKETS


def test_the_first_and_last_bucket() -> None:
    assert bucket_of(0) == 0
    assert bucket_of(3600e6) == BUCKETS - 1
    assert percentiles_us({}, [50, 95]) == [None, None]
    assert percentiles_us({0: 5}, [95]) == [0]
    third, seventh, ninth = (percentiles_us({bucket: 1}, [50])[0] for bucket in (3, 7, 9))
    percentiles = percentiles_us({3: 90, 7: 9, 9: 1}, [50, 90, 95, 99, 100])
    assert percentiles == [third, third, seventh, seventh, ninth]
    assert to_text({3: 0, 2: 1}) == "2:1"


@pytest.mark.parametrize("text", ["1", "x:1", "1:x", "100:1", "-1:1", "1:0", "1:-4"])
def test_malformed_texts_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_text(text)
