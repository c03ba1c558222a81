"""Passes over prompt tokens that are not consecutive, and a test whether a model supports them.

To the model, each token is a row at its own position; attention and recurrent layers treat the
tokens as one row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ...isolation import Isolation
from ...records import LoadedModel
from ...upstream.sparse_cache import sparse, unsupported
from ..execution.grouped_kv import with_wide_rows
from ..execution.mixed_chunk import MixedChunk
from ..execution.solo_rows import decoding, some_tokens
from ..memory import leaves

LENGTH = 12
MOVED = 70
AT_ONCE = 7

MakeCache = Callable[[], list[Any]]


def run_alone(model: LoadedModel, chunk: MixedChunk) -> mx.array:
    """Append a chunk to its row's cache. Returns logits (vocab,) after its last token."""
    tokens, places = (mx.array(list(each), mx.int32) for each in (chunk.tokens, chunk.positions))
    last = mx.array([len(chunk.tokens) - 1])
    return model.decode(tokens, with_wide_rows(None, [], [], [chunk.turned]), places, last)[0]


def problem(model: LoadedModel, make_cache: MakeCache) -> str:
    """Why no tokens of this model's prompts can be left out. Empty: they can. Engine thread."""
    kinds = {type(layer).__name__ for layer in leaves(make_cache()) if unsupported(layer)}
    if kinds:
        return f"its layers need every token ({', '.join(sorted(kinds))})"
    with Isolation() as tried:
        return _trial(model, make_cache)
    return f"a trial failed: {tried.fault.summary}" if tried.fault else ""


def _trial(model: LoadedModel, make_cache: MakeCache) -> str:
    """A prompt that starts at position `MOVED` must give the same result as one at 0. It does not
    if a model uses absolute positions or the number of cached tokens."""
    tokens = some_tokens(model, LENGTH, 1)
    alone = decoding(model, make_cache, tokens, 0)
    cache = sparse(make_cache())
    again = [*tokens, *tokens[: len(alone.logits)]]
    ends = [0, AT_ONCE, *range(LENGTH, len(again) + 1)]
    found = [_append(model, cache, again, *each) for each in itertools.pairwise(ends)]
    return alone.problem(found[2:])


def _append(
    model: LoadedModel, cache: list[Any], tokens: Sequence[int], start: int, stop: int
) -> mx.array:
    places = range(start + MOVED, stop + MOVED)
    logits = run_alone(model, MixedChunk(tokens[start:stop], places, cache, sparse=True))
    mx.eval(logits)
    return logits
