"""Features of images, by tenant and content hash, within a byte budget."""

from __future__ import annotations

from collections import OrderedDict

import mlx.core as mx
from mlx.utils import tree_flatten

from ..records import Features

Key = tuple[str, str]
"""Tenant, because the time of an answer tells whether an image was seen, and content hash."""


class FeatureCache:
    """An LRU cache. Engine thread only; other threads may use `in`."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._kept: OrderedDict[Key, tuple[Features, int]] = OrderedDict()
        self.nbytes = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def get(self, key: Key) -> Features | None:
        found = self._kept.get(key)
        if found is None:
            return None
        self._kept.move_to_end(key)
        return found[0]

    def put(self, key: Key, features: Features) -> None:
        """Features larger than the budget are not stored."""
        size = features_bytes(features)
        if size > self._budget or key in self._kept:
            return
        self._kept[key] = (features, size)
        self.nbytes += size
        while self.nbytes > self._budget:
            _, (_, dropped) = self._kept.popitem(last=False)
            self.nbytes -= dropped

    def clear(self) -> None:
        self._kept.clear()
        self.nbytes = 0


def features_bytes(features: Features) -> int:
    """Evaluates the arrays."""
    tree = vars(features) if hasattr(features, "__dict__") else features
    found = [a for _, a in tree_flatten(tree) if isinstance(a, mx.array)]
    mx.eval(found)
    return sum(a.nbytes for a in found)
