"""A mixed chunk: tokens of a prompt that share the forward pass of rows that decode.

The cost of a pass over few tokens is mostly the cost of reading the weights, which the rows that
decode pay already. To the model, each token of the chunk is a row. Only attention and recurrent
layers treat the tokens as one row, because their keys and states belong to one cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ...upstream.batch_caches import RowCache, columns
from ...upstream.cache_classes import (
    ArraysCache,
    BatchKVCache,
    KVCache,
    RotatingKVCache,
    append_behind,
    take_back,
    visible_behind,
)
from ...upstream.recurrent import Prefixes
from ..memory import leaves


@dataclass(frozen=True)
class MixedChunk:
    """Text tokens of one prompt, to append to its row cache."""

    tokens: Sequence[int]
    positions: Sequence[int]
    """Rotary position of each token."""
    cache: list[Any]
    ends_prompt: bool = True
    """Whether logits are wanted after its last token."""
    sparse: bool = False
    """Whether tokens between them were left out. The cache is then one of `sparse`."""

    @property
    def turned(self) -> Turned:
        """The chunk as a part of a pass."""
        places = self.positions if self.sparse else None
        return Turned(self.cache, len(self.tokens), positions=places)


@dataclass
class Turned:
    """Several tokens of one row, each in the place of a row."""

    cache: list[Any]
    """The cache of the row."""
    tokens: int
    drafts: bool = False
    """Whether the last tokens may be rejected, see `keep`."""
    states: list[Prefixes] = field(default_factory=list)
    """Prefix states of recurrent layers. The pass fills them."""
    positions: Sequence[int] | None = None
    """Positions of the tokens, if they are not consecutive."""
    stale: mx.array | None = None
    """How many of the last tokens in the cache do not hold, (1,) int32, while that is not read."""
    places: mx.array | None = None
    """(tokens,) int32, if there may be stale tokens before."""

    def keep(self, tokens: int) -> None:
        """Keep the first `tokens` tokens of a pass in the cache, at least one."""
        for layer in leaves(self.cache):
            if hasattr(layer, "update_and_fetch"):
                take_back(layer, self.tokens - tokens)
        for each in self.states:
            each.keep(tokens)
        self.states = []

    def keep_unread(self, held: mx.array) -> None:
        """Let the next pass follow the first `held` + 1 tokens, held: (1,) int32. `keep` may
        follow. Attention caches keep all of them meanwhile."""
        for each in self.states:
            each.keep_unread(held)

    def take_back(self, tokens: int) -> None:
        """Shorten the attention caches: as many tokens before those of the pass did not hold, or
        these do not."""
        for layer in leaves(self.cache):
            if hasattr(layer, "update_and_fetch"):
                take_back(layer, tokens)
        self.stale = None

    def follow(self, stale: mx.array) -> None:
        """So many of the last tokens in the cache do not hold, (1,) int32."""
        layers = (each for each in leaves(self.cache) if hasattr(each, "update_and_fetch"))
        first = next(layers).offset
        self.stale = stale
        self.places = mx.arange(first, first + self.tokens, dtype=mx.int32) - stale


def may_be_stale(cache: RowCache) -> bool:
    """Whether a pass may follow tokens in a row's cache, or in that of its group, of which an
    unread number does not hold."""
    layers = list(leaves(cache))
    attention = [each for each in layers if hasattr(each, "update_and_fetch")]
    counts = {_count_of(each) for each in attention}
    alike = len(counts) == 1 and None not in counts
    others = [each for each in layers if not hasattr(each, "update_and_fetch")]
    return alike and all(isinstance(each, ArraysCache) for each in others)


def _count_of(layer: Any) -> int | None:
    """Tokens of an attention cache. `None`: its tokens cannot be stale."""
    if type(layer) is BatchKVCache:
        return columns(layer)
    if type(layer) is KVCache or (type(layer) is RotatingKVCache and not layer.keep):
        return int(layer.offset)
    return None


class ChunkKV:
    """Attention cache of one row and layer, which the model sees as one cache per token."""

    def __init__(self, inner: Any, row: Turned) -> None:
        self.inner = inner
        self.tokens = row.tokens
        self._positions = row.positions
        self._stale, self._places = row.stale, row.places

    @property
    def offset(self) -> Sequence[int] | mx.array:
        """Rotary offset of every token, until they are appended."""
        if self._positions is not None:
            return self._positions
        if self._places is not None:
            return self._places
        return range(self.inner.offset, self.inner.offset + self.tokens)

    def make_mask(self, N: int, *args: Any, **kwargs: Any) -> Any:
        """The causal mask of the tokens as one chunk. `N`: the one token that each row has."""
        if self._places is not None:
            return visible_behind(self.inner, self._places, kwargs.get("window_size"))
        if self._positions is not None:
            return self.inner.mask_at(self._positions, *args, **kwargs)
        return self.inner.make_mask(self.tokens, *args, **kwargs)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append (tokens, heads, 1, D) as (1, heads, tokens, D)."""
        own = keys.swapaxes(0, 2), values.swapaxes(0, 2)
        if self._stale is not None:
            self._places = None
            return append_behind(self.inner, *own, self._stale)
        fetched: tuple[Any, Any] = (
            self.inner.update_and_fetch(*own)
            if self._positions is None
            else self.inner.append_at(*own, self._positions)
        )
        return fetched


def can_share_a_pass(cache: Sequence[Any]) -> bool:
    """Whether every layer of a row cache is attention with a token count, or recurrent."""
    return all(
        isinstance(layer.offset, int)
        if hasattr(layer, "update_and_fetch")
        else isinstance(layer, ArraysCache)
        for layer in leaves(cache)
    )
