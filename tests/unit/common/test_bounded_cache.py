"""The bounded cache: its bound, and what eviction and replacement keep."""

from __future__ import annotations

from ratelimit_rls.common.bounded_cache import BoundedCache


def test_cache_is_bounded_and_keeps_the_newest() -> None:
    cache = BoundedCache[int, str](10)

    for number in range(1000):
        cache.put(number, str(number))
        assert cache.get(number) == str(number)

    assert len(cache) == len(cache._keys) == 10
    assert [cache.get(key) for key in cache._keys] == [str(key) for key in cache._keys]


def test_every_entry_may_be_evicted() -> None:
    cache = BoundedCache[int, int](3)
    for number in range(3):
        cache.put(number, number)
    for number in range(3, 300):
        cache.put(number, number)

    assert all(cache.get(number) is None for number in range(3))


def test_repeated_put_replaces_and_evicts_nothing() -> None:
    cache = BoundedCache[str, int](2)
    for number in range(10):
        cache.put("a", number)
    cache.put("b", 2)

    assert (cache.get("a"), cache.get("b")) == (9, 2)


def test_clear() -> None:
    cache = BoundedCache[str, int](2)
    cache.put("a", 1)
    cache.clear()
    cache.put("b", 2)

    assert cache.get("a") is None
    assert cache.get("b") == 2
    assert len(cache) == 1
