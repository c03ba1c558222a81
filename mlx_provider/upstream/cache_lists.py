"""Row caches with layers that are lists of caches (`CacheList`, mlx_lm/models/cache.py 0.32.2).
Imports no mlx."""

from collections.abc import Callable, Sequence
from typing import Any


def leaves(cache: Sequence[Any]) -> list[Any]:
    """Opens lists of caches (`CacheList`)."""
    found: list[Any] = []
    for layer in cache:
        inner = getattr(layer, "caches", None)
        found.extend([layer] if inner is None else leaves(inner))
    return found


def by_leaf(make: Callable[..., Any], *layers: Any) -> Any:
    """`make(*layers)`, or a list of caches (`CacheList`) made so from those in `layers`."""
    if not hasattr(layers[0], "caches"):
        return make(*layers)
    together = type(layers[0])()
    inner = zip(*(layer.caches for layer in layers), strict=True)
    together.caches = tuple(by_leaf(make, *each) for each in inner)
    return together
