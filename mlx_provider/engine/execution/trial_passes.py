"""Passes that calibration runs on the device, with their seconds and bytes; and the memory of any
pass, beyond that of rows and weights, by those bytes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Any

import mlx.core as mx

from ...records import LoadedModel, PrefillChunk, Prompt
from ...upstream.cache_classes import QuantizedKVCache, leaves, take_back
from ...upstream.shared_kv import SHAREABLE, divide
from ..request import Row
from ..row_cache import arrays, grow_by, profile
from ..scheduling.chunking import WIDE, fixed_sizes, worthwhile
from ..scheduling.costs import Curve
from ..scheduling.ledger import MemoryProfile
from .batch_layout import NO_DRAFTS, Layout
from .grouped_kv import MixedChunk
from .probe import Reserve, one_step, stand_in
from .solo_rows import MakeCache, some_tokens, timed_pass

REPEATS = 3
"""Passes of each shape. The first may compile kernels and make plans. The fastest of the others
counts."""
SCORED = (16, 32)
"""Tokens of passes over the deep cache that show the memory of scores and of copied keys."""
SHALLOW = 8
"""A timed pass has at most this fraction (1/n) of the tokens of the deep cache."""

Took = Sequence[float]
"""Seconds of passes of one shape, in order. Empty: too little memory is free."""


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


class OnDevice:
    """Passes of a model, `repeats` of each shape."""

    def __init__(
        self, model: LoadedModel, make: MakeCache, reserve: Reserve, repeats: int = REPEATS
    ) -> None:
        self._model = model
        self._make = make
        self._reserve = reserve
        self._repeats = repeats
        self._memory = MemoryProfile(0, 0)
        self._deep: list[Any] = []
        self._depth = self._held = 0
        """Tokens of the deep cache, and its bytes."""
        self._over_empty: dict[int, int] = {}
        """Peak bytes of temporary arrays in passes over an empty cache, by tokens."""
        self._over_deep: dict[int, int] = {}
        """The same over the deep cache."""

    def chunk(self, tokens: int) -> Took:
        if tokens == 1:
            timed_pass(self._model, cache := self._make(), 0, 1)
            self._memory = profile(cache)
        took = []
        for _ in range(self._repeats if self._has_room(self._held, tokens) else 0):
            grow_by(cache := self._make(), tokens)
            seconds, self._over_empty[tokens] = timed_pass(self._model, cache, 0, tokens)
            took.append(seconds)
        return took

    def deepen(self, depth: int) -> bool:
        """Make the deep cache. Returns whether there is memory for it."""
        more = depth // SHALLOW + self._repeats
        held = self._memory.row_bytes(depth + more)
        if not self._has_room(held, 1):
            return False
        self._deep = deep_cache(self._model, self._make, depth, more)
        self._depth, self._held = depth, held
        for tokens in SCORED:
            self.deep(tokens, repeats=1)
            if tokens not in self._over_empty:  # no time was left for it
                self.chunk(tokens)
        return True

    def deep(self, tokens: int, repeats: int = REPEATS) -> Took:
        took = []
        for _ in range(repeats if self._has_room(self._held, tokens) else 0):
            seconds, self._over_deep[tokens] = timed_pass(
                self._model, self._deep, self._depth, tokens
            )
            took.append(seconds)
            self._depth += tokens == 1
            for layer in leaves(self._deep):
                if tokens > 1 and hasattr(layer, "update_and_fetch"):
                    take_back(layer, tokens)
        return took

    def rows(
        self, lengths: Sequence[int], name: str, chunk: int = 0, drafts: int = 0, shared: int = 0
    ) -> Took:
        """`name`: of the layout. `shared`: tokens of a prefix that equal rows share."""
        self._deep, self._held = [], 0
        more, width = self._repeats + drafts, len(lengths) * (1 + drafts)
        held = 2 * len(lengths) * self._memory.row_bytes(max(lengths) + more)
        if not self._has_room(held, chunk + width):
            return ()
        layout, took, cache = Layout(name), [], list[Any]()
        found: dict[Row, list[mx.array]] = {}
        tokens = some_tokens(self._model, max(*lengths, chunk) + more, 0)
        for length in lengths:
            if not (cache and shared):
                cache = deep_cache(self._model, self._make, length, more)
                for layer in leaves(cache) if shared else ():
                    if type(layer) in SHAREABLE:
                        divide(layer, shared)
            found[row := stand_in(tokens[:length], 0)] = []
            layout.add(row, deepcopy(cache) if shared else cache)
        kept = dict.fromkeys(found, 1) if drafts else NO_DRAFTS
        for _ in range(self._repeats):
            along = None
            if chunk:
                along = MixedChunk(tokens[:chunk], range(chunk), cache := self._make())
                grow_by(cache, chunk)
            began = perf_counter()
            one_step(self._model, layout, found, along, kept, wrong=drafts)
            took.append(perf_counter() - began)
        return took

    @property
    def nbytes(self) -> PassBytes:
        empty, deep = self._over_empty, self._over_deep
        one, widest = empty.get(1, 0), max((n for n in empty if n <= WIDE), default=1)
        token = max(0, empty.get(widest, 0) - one) / max(1, widest - 1)
        if not all(n in deep and n in empty for n in SCORED):
            return PassBytes(one, token)
        (few, less), (many, more) = ((n, max(0, deep[n] - empty[n])) for n in SCORED)
        pair = max(0, more - less) / (many - few) / self._depth
        return PassBytes(one, token, pair, max(0.0, less / self._depth - few * pair))

    def _has_room(self, held: int, width: int) -> bool:
        """Reserve `held` bytes and the most of a pass of this width and of its own cache. Scores of
        attention over an empty cache grow with the square of the width."""
        short, over_empty = next(reversed(self._over_empty.items()), (1, 0))
        deepest = self._over_deep if self._deep else {}
        deep, over_deep = next(reversed(deepest.items()), (1, 0))
        times = width / short
        released = max(
            over_empty * max(times, times**2), over_deep * width / deep * (1 + 1 / SHALLOW)
        )
        return self._reserve(held + self._memory.row_bytes(width) + int(released))


def deep_cache(model: LoadedModel, make_cache: MakeCache, depth: int, more: int) -> list[Any]:
    """A row cache that appears to hold `depth` tokens, with capacity for `more` tokens. Only its
    first token is computed."""
    cache = make_cache()
    grow_by(cache, depth + more)
    model.prefill(PrefillChunk(Prompt([0]), 0, 1, cache))
    for layer in leaves(cache):
        if isinstance(layer, QuantizedKVCache):  # in the buffers of the layer
            for each in (*layer.keys, *layer.values):
                each[:, :, 1:depth] = _repeat(each, depth - 1)
            layer.offset = depth
        elif all(isinstance(getattr(layer, name, None), mx.array) for name in ("keys", "values")):
            first = [_repeat(each, depth - 1) for each in (layer.keys, layer.values)]
            mx.eval(first)  # so that the buffers of the layer are filled in place
            layer.update_and_fetch(*first)
    mx.eval(arrays(cache))
    return cache


def _repeat(array: mx.array, tokens: int) -> mx.array:
    """The first token as (1, heads, tokens, D), without a copy of each."""
    first = mx.contiguous(array[:, :, :1])
    return mx.broadcast_to(first, (1, array.shape[1], tokens, array.shape[3]))
