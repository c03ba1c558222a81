"""Bytes that a conversation copies, and the memory that it takes, turn by turn."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from allocator_replay import DIM, LAYERS, StandIn
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.prefix_cache import buffers, segments
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.testing.driver import new_engine, new_request, run

TOKEN_BYTES = 2 * LAYERS * DIM * 2
"""Of the stand-in model."""
REPLY = 60


@dataclass
class Copies:
    """Copied bytes of keys and values, and of states."""

    nbytes: int = 0


@contextmanager
def counted() -> Iterator[Copies]:
    """Counts what the engine makes contiguous, and rows that outgrow their buffers."""
    found = Copies()
    contiguous, extend, copy = mx.contiguous, buffers.extend, segments.copy_tokens
    update = KVCache.update_and_fetch

    def copied(array: mx.array, *more: Any) -> mx.array:
        found.nbytes += array.nbytes  # with new capacity, if it makes any
        return contiguous(array, *more)

    def filled(piece: mx.array, *more: Any) -> None:
        found.nbytes += piece.nbytes
        copy(piece, *more)

    def grown(array: mx.array, tokens: int) -> Any:
        found.nbytes += array.nbytes
        return extend(array, tokens)

    def updated(layer: KVCache, keys: mx.array, values: mx.array) -> Any:
        before = 0 if layer.keys is None else layer.keys.shape[2]
        held = layer.offset
        fetched = update(layer, keys, values)
        if before and layer.keys.shape[2] != before:
            found.nbytes += 2 * layer.keys.nbytes * held // layer.keys.shape[2]
        return fetched

    with (
        patch.object(mx, "contiguous", copied),
        patch.object(segments, "copy_tokens", filled),
        patch.object(buffers, "extend", grown),
        patch.object(KVCache, "update_and_fetch", updated),
    ):
        yield found


@dataclass(frozen=True)
class Turn:
    tokens: int
    """Of the conversation after it."""
    cached: int
    copied: int
    """Bytes."""
    peak: float
    """Most memory that it took, as a multiple of its KV."""


def conversation(engine: Engine, turns: int, first: int, each: int) -> list[Turn]:
    """A first prompt, then turns of a reply and `each` new tokens."""
    prompt, found = [1] * first, list[Turn]()
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    for turn in range(turns):
        request = new_request(prompt, max_tokens=REPLY)
        engine.submit(request)
        mx.reset_peak_memory()
        with counted() as copies:
            run(engine)
        held = (len(prompt) + REPLY) * TOKEN_BYTES
        peak = (mx.get_peak_memory() - before) / held
        found.append(Turn(len(prompt) + REPLY, request.cached_tokens, copies.nbytes, peak))
        prompt = [*prompt, *request.rows[0].tokens, *([2 + turn] * each)]
    return found


def measured(
    *, in_place: bool, turns: int = 10, first: int = 20_000, each: int = 4_000
) -> list[Turn]:
    stored = PrefixCache(budget=lambda: 2**30)
    model: Any = StandIn()
    engine = new_engine(model, max_chunk=2048, reserve=512, prefix_cache=stored, in_place=in_place)
    return conversation(engine, turns, first, each)
