"""Passes over tokens of a prompt that do not follow each other, and whether a model can have them.

To the model each token is a row of its own, at its own position; attention alone knows that they
are one row's. So tokens from anywhere fill one pass, however few of them stood side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ...isolation import Isolation
from ...records import LoadedModel
from ...upstream.cache_classes import KVCache
from ...upstream.sparse_cache import sparse
from ..execution.grouped_kv import beside
from ..execution.mixed_chunk import MixedChunk
from ..execution.solo_rows import decoded, decoding, some_tokens

LENGTH = 12
"""Tokens of the trial's prompt,"""
MOVED = 70
"""by how much later its tokens stand in it,"""
AT_ONCE = 7
"""and how many are in the first of two passes."""

MakeCache = Callable[[], list[Any]]


def run_alone(model: LoadedModel, chunk: MixedChunk) -> mx.array:
    """Append a chunk to its row's cache; logits (vocab,) after its last token."""
    tokens, places = (mx.array(list(each), mx.int32) for each in (chunk.tokens, chunk.positions))
    last = mx.array([len(chunk.tokens) - 1])
    return model.decode(tokens, beside(None, [], [], [chunk.turned]), places, last)[0]


def problem(model: LoadedModel, make_cache: MakeCache) -> str:
    """Why no tokens of this model's prompts can be left out; empty: they can (engine thread)."""
    kinds = {type(layer) for layer in make_cache()} - {KVCache}
    if kinds:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        return f"its layers keep more than keys and values of each token ({names})"
    with Isolation() as tried:
        return _trial(model, make_cache)
    return f"a trial failed: {tried.fault.summary}" if tried.fault else ""


def _trial(model: LoadedModel, make_cache: MakeCache) -> str:
    """A prompt in which nothing stands before position `MOVED` gives what it gives from 0 on.

    Attention knows how far tokens are apart and no more; what a model makes of anything else, of
    how many are held or where they stand, shows here.
    """
    tokens = some_tokens(model, LENGTH, 1)
    alone = decoding(model, make_cache, tokens, 0)
    cache = sparse(make_cache())
    _append(model, cache, tokens, 0, AT_ONCE)
    _append(model, cache, tokens, AT_ONCE, LENGTH)
    steps = len(alone.logits)
    found = decoded(model, cache, tokens[:steps], LENGTH + MOVED)
    return alone.problem(found)


def _append(
    model: LoadedModel, cache: list[Any], tokens: Sequence[int], start: int, stop: int
) -> None:
    places = range(start + MOVED, stop + MOVED)
    mx.eval(run_alone(model, MixedChunk(tokens[start:stop], places, cache, sparse=True)))
