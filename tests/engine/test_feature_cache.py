"""Features of images: eviction of the least recently used ones, within a byte budget."""

import mlx.core as mx

from mlx_provider.engine.inputs import FeatureCache

EACH = 400


def features(seed: int) -> dict[str, mx.array]:
    return {"rows": mx.full((10, 10), seed, dtype=mx.float32)}


def test_the_least_recently_used_features_are_evicted_first() -> None:
    cache = FeatureCache(2 * EACH)
    for name in (1, 2):
        cache.put(("", str(name)), features(name))
    assert cache.get(("", "1")) is not None
    cache.put(("", "3"), features(3))
    assert cache.get(("", "2")) is None
    assert cache.get(("", "1")) is not None
    assert cache.nbytes == 2 * EACH


def test_features_larger_than_the_budget_are_not_stored() -> None:
    cache = FeatureCache(EACH - 1)
    cache.put(("", "1"), features(1))
    assert cache.get(("", "1")) is None
    assert cache.nbytes == 0
