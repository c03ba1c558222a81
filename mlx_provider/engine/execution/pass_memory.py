"""The memory of a pass, beyond that of rows and weights; and row caches that appear to be deep."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import mlx.core as mx

from ...records import LoadedModel, PrefillChunk, Prompt
from ...upstream.cache_lists import leaves
from ..row_cache import arrays, grow_by
from ..scheduling.chunking import fixed_sizes, worthwhile
from ..scheduling.costs import Curve
from .solo_rows import MakeCache


@dataclass(frozen=True)
class PassBytes:
    row: float = 0.0
    """Per row that decodes."""
    token: float = 0.0
    """Per further token."""
    pair: float = 0.0
    """Per pair of a new token and a cached one. 0 if attention never stores its scores."""
    key: float = 0.0
    """Per cached token, however many are new. 0 if attention copies no keys and values."""


@dataclass(frozen=True)
class PassMemory:
    """Bytes of passes over rows or a chunk, from the measurements and the chunk limits."""

    each: PassBytes
    widest: int
    """Most tokens of a chunk."""
    deepest: Sequence[tuple[int, float]] = field(default=(), repr=False)
    """(tokens of a chunk, largest number of cached tokens before it). A deep chunk is narrow,
    because its time is limited."""
    least: int = 0
    """Tokens that a chunk may always have, however long it takes."""

    @classmethod
    def of(cls, each: PassBytes, curve: Curve, seconds: float, most: int) -> PassMemory:
        sizes = fixed_sizes(most)
        least = worthwhile(sizes, curve.seconds)
        if curve.depths:  # deep in a prompt, attention is most of a pass
            least = max(least, worthwhile(sizes, lambda n: curve.per_key(n) or inf))
        longest = max(seconds, curve.seconds(least))
        widest = bisect_right(range(1, most + 1), longest, key=curve.seconds)
        left = [(n, longest - curve.seconds(n), curve.per_key(n)) for n in (*sizes, widest)]
        deepest = [(n, s / slope if slope > 0 else inf) for n, s, slope in left if n <= widest]
        return cls(each, widest, deepest, least)

    def __call__(self, tokens: int, rows: int) -> int:
        """Bytes of the largest pass of this many rows, or over a prompt of this many tokens."""
        chunk = min(self.widest, tokens)
        pairs = max((min(n, chunk) * min(d, tokens) for n, d in self.deepest), default=0.0)
        pairs = max(pairs, min(self.least, chunk) * tokens)
        each = self.each
        cached = each.pair * pairs + each.key * tokens
        return int(each.row * rows + each.token * max(chunk, rows) + cached)


def deep_cache(model: LoadedModel, make_cache: MakeCache, depth: int, more: int) -> list[Any]:
    """A row cache that appears to hold `depth` tokens, with capacity for `more` tokens. Only its
    first token is computed."""
    cache = make_cache()
    grow_by(cache, depth + more)
    model.prefill(PrefillChunk(Prompt([0]), 0, 1, cache))
    for layer in leaves(cache):
        if _quantised(layer):  # in the buffers of the layer
            for each in (*layer.keys, *layer.values):
                each[:, :, 1:depth] = _repeat(each, depth - 1)
            layer.offset = depth
        elif all(isinstance(getattr(layer, name, None), mx.array) for name in ("keys", "values")):
            first = [_repeat(each, depth - 1) for each in (layer.keys, layer.values)]
            mx.eval(first)  # so that the buffers of the layer are filled in place
            layer.update_and_fetch(*first)
    mx.eval(arrays(cache))
    return cache


def copied_bytes(cache: Sequence[Any]) -> int:
    """Bytes per token of the copy that attention makes of a quantised layer, see
    `upstream.attention`. 0 if no layer of `cache`, which holds a token, is quantised."""
    copies = [
        sum(
            packed.shape[1] * (packed.shape[-1] * 8 * packed.itemsize // layer.bits) * s.itemsize
            for packed, s, _ in (layer.keys, layer.values)
        )
        for layer in filter(_quantised, leaves(cache))
    ]
    return max(copies, default=0)


def _quantised(layer: Any) -> bool:
    return isinstance(getattr(layer, "keys", None), (tuple, list)) and hasattr(layer, "bits")


def _repeat(array: mx.array, tokens: int) -> mx.array:
    """The first token as (1, heads, tokens, D), without a copy of each."""
    first = mx.contiguous(array[:, :, :1])
    return mx.broadcast_to(first, (1, array.shape[1], tokens, array.shape[3]))
