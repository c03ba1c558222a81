"""Row caches that appear to hold a long prompt, made without computing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ...records import LoadedModel, PrefillChunk, Prompt
from ..memory import arrays, leaves
from ..row_cache import grow_by

MakeCache = Callable[[], list[Any]]
Reserve = Callable[[int], bool]
"""Reserves bytes for measurements, in place of those reserved before. Returns whether they are
free."""


def unlimited(nbytes: int) -> bool:
    """The reservation of a process without a memory limit."""
    return True


def deep_cache(model: LoadedModel, make_cache: MakeCache, depth: int, more: int) -> list[Any]:
    """A row cache that appears to hold `depth` tokens, with capacity for `more` tokens. Only its
    first token is computed."""
    cache = make_cache()
    grow_by(cache, depth + more)
    model.prefill(PrefillChunk(Prompt(spread(model, 1)), 0, 1, cache))
    for layer in leaves(cache):
        if _quantised(layer):
            _repeat_quantised(layer, depth)
        elif all(isinstance(getattr(layer, name, None), mx.array) for name in ("keys", "values")):
            layer.update_and_fetch(*(_longer(each, depth - 1) for each in _first_token(layer)))
    mx.eval(arrays(cache))
    return cache


def spread(model: LoadedModel, count: int) -> Sequence[int]:
    """Ids spread over the vocabulary, so that a pass reads experts and embeddings as for a real
    prompt."""
    return [(7919 * (i + 1)) % max(2, model.info.vocab_size) for i in range(count)]


def copied_bytes(cache: Sequence[Any]) -> int:
    """Bytes per token of the copy that attention makes of a quantised layer, see
    `upstream.attention`. 0 if no layer of `cache`, which holds a token, is quantised."""
    return max(map(_copied, filter(_quantised, leaves(cache))), default=0)


def _copied(layer: Any) -> int:
    """Bytes of one token's keys and values if they were not quantised."""
    found = 0
    for packed, scales, _ in (layer.keys, layer.values):
        values = packed.shape[-1] * 8 * packed.itemsize // layer.bits
        found += packed.shape[1] * values * scales.itemsize
    return found


def _quantised(layer: Any) -> bool:
    """Whether a layer keeps (packed, scales, biases), as mlx-lm's `QuantizedKVCache` does."""
    return isinstance(getattr(layer, "keys", None), (tuple, list)) and hasattr(layer, "bits")


def _repeat_quantised(layer: Any, depth: int) -> None:
    """Write the first token to the places of all others, in the buffers of the layer."""
    for stored in (layer.keys, layer.values):
        for each in stored:
            each[:, :, 1:depth] = _longer(mx.contiguous(each[:, :, :1]), depth - 1)
    layer.offset = depth


def _first_token(layer: Any) -> list[mx.array]:
    """Copies of its keys and values, so that the buffers of the layer are filled in place."""
    found = [mx.contiguous(each[:, :, :1]) for each in (layer.keys, layer.values)]
    mx.eval(found)
    return found


def _longer(array: mx.array, tokens: int) -> mx.array:
    """(1, heads, 1, D) repeated to (1, heads, tokens, D), without a copy."""
    return mx.broadcast_to(array, (1, array.shape[1], tokens, array.shape[3]))
