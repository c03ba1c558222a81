"""Passes over prompt tokens that are not consecutive, and a test whether a model supports them.

To the model, each token is a row at its own position. Only attention treats the tokens as one row.
So tokens from any place can fill one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ...isolation import Isolation
from ...records import LoadedModel
from ...upstream.cache_classes import KVCache
from ...upstream.sparse_cache import sparse
from ..execution.grouped_kv import with_wide_rows
from ..execution.mixed_chunk import MixedChunk
from ..execution.solo_rows import decoded, decoding, some_tokens

LENGTH = 12
"""Tokens of the trial prompt."""
MOVED = 70
"""Offset of its positions."""
AT_ONCE = 7
"""Tokens in the first of its two passes."""

MakeCache = Callable[[], list[Any]]


def run_alone(model: LoadedModel, chunk: MixedChunk) -> mx.array:
    """Append a chunk to its row's cache. Returns logits (vocab,) after its last token."""
    tokens, places = (mx.array(list(each), mx.int32) for each in (chunk.tokens, chunk.positions))
    last = mx.array([len(chunk.tokens) - 1])
    return model.decode(tokens, with_wide_rows(None, [], [], [chunk.turned]), places, last)[0]


def problem(model: LoadedModel, make_cache: MakeCache) -> str:
    """Why the tokens of this model's prompts cannot be left out. Empty: they can. (Engine
    thread.)"""
    kinds = {type(layer) for layer in make_cache()} - {KVCache}
    if kinds:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        return f"its layers keep more than keys and values of each token ({names})"
    with Isolation() as tried:
        return _trial(model, make_cache)
    return f"a trial failed: {tried.fault.summary}" if tried.fault else ""


def _trial(model: LoadedModel, make_cache: MakeCache) -> str:
    """A prompt that starts at position `MOVED` must give the same result as one that starts at 0.

    Attention depends only on the distance between tokens. If a model also uses the number of cached
    tokens or their absolute positions, the results differ.
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
