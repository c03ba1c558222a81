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

from ...upstream.cache_classes import ArraysCache, take_back
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

    def keep(self, tokens: int) -> None:
        """Keep the first `tokens` tokens of a pass in the cache, at least one."""
        for layer in leaves(self.cache):
            if hasattr(layer, "update_and_fetch"):
                take_back(layer, self.tokens - tokens)
        for each in self.states:
            each.keep(tokens)
        self.states = []


class ChunkKV:
    """Attention cache of one row and layer, which the model sees as one cache per token."""

    def __init__(self, inner: Any, tokens: int, positions: Sequence[int] | None = None) -> None:
        """`positions`: positions of the tokens of a sparse cache."""
        self.inner = inner
        self.tokens = tokens
        self._positions = positions

    @property
    def offset(self) -> Sequence[int]:
        """Rotary offset of every token."""
        if self._positions is not None:
            return self._positions
        return range(self.inner.offset, self.inner.offset + self.tokens)

    def make_mask(self, N: int, *args: Any, **kwargs: Any) -> Any:
        """The causal mask of the tokens as one chunk. `N`: the one token that each row has."""
        if self._positions is not None:
            return self.inner.mask_at(self._positions, *args, **kwargs)
        return self.inner.make_mask(self.tokens, *args, **kwargs)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append (tokens, heads, 1, D) as (1, heads, tokens, D)."""
        own = keys.swapaxes(0, 2), values.swapaxes(0, 2)
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
