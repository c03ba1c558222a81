"""A mixed chunk: tokens of a prompt that share the forward pass of rows that decode.

A pass over few tokens costs mostly what reading the weights costs, and rows that decode pay that
anyway. To the model each token of the chunk is a row of its own; attention and recurrent layers
alone know that they are one row's, since their keys and states belong to one cache.
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
    """Text tokens of one prompt, to be appended to its own row cache."""

    tokens: Sequence[int]
    positions: Sequence[int]
    """Rotary position of each."""
    cache: list[Any]
    ends_prompt: bool = True
    """Logits are wanted after its last token."""
    sparse: bool = False
    """Tokens were left out between its own: its cache is a `SparseKVCache`."""

    @property
    def turned(self) -> Turned:
        """Its place in a pass."""
        places = self.positions if self.sparse else None
        return Turned(self.cache, len(self.tokens), positions=places)


@dataclass
class Turned:
    """Tokens of one row that stand where others have rows."""

    cache: list[Any]
    """The row's own."""
    tokens: int
    drafts: bool = False
    """The last ones may be taken back: see `keep`."""
    states: list[Prefixes] = field(default_factory=list)
    """Of recurrent layers, filled by the pass."""
    positions: Sequence[int] | None = None
    """Of the tokens, where they do not follow each other."""

    def keep(self, tokens: int) -> None:
        """Of the tokens of a pass the first ones stay in the cache, one at the least."""
        for layer in leaves(self.cache):
            if hasattr(layer, "update_and_fetch"):
                take_back(layer, self.tokens - tokens)
        for each in self.states:
            each.keep(tokens)
        self.states = []


class ChunkKV:
    """One row's attention cache of one layer, seen by the model as one cache for each token."""

    def __init__(self, inner: Any, tokens: int, positions: Sequence[int] | None = None) -> None:
        """`positions`: where those of a sparse cache stand."""
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
        """What the tokens may see, as one chunk. `N`: the one token that a row has."""
        return self.inner.make_mask(self.tokens, *args, **kwargs)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append (tokens, heads, 1, D) as (1, heads, tokens, D)."""
        fetched: tuple[Any, Any] = self.inner.update_and_fetch(
            keys.swapaxes(0, 2), values.swapaxes(0, 2)
        )
        if self._positions is not None:
            self.inner.reach(self._positions[-1] + 1)
        return fetched


def can_share_a_pass(cache: Sequence[Any]) -> bool:
    """Whether every layer of a row cache is attention that counts its tokens, or recurrent."""
    return all(
        isinstance(layer.offset, int)
        if hasattr(layer, "update_and_fetch")
        else isinstance(layer, ArraysCache)
        for layer in leaves(cache)
    )
