"""At load time: how long passes take on this device, by their width and the depth of the cache."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ...isolation import Isolation
from ...records import LoadedModel, PrefillChunk, Prompt
from ..memory import arrays, leaves
from ..replication import ONE_PROCESS, Replication
from ..scheduling.costs import UNMEASURED, Curve

log = logging.getLogger(__name__)

WIDTHS = (1, 4, 8, 16, 32, 64, 256)
"""Tokens of the passes: what a stream, a few streams, parts of a tile and whole tiles take."""
DEEP_WIDTHS = (1, 64)
DEPTH = 2048
"""Tokens of the deep cache."""
REPEATS = 2
"""Passes of each width, of which the faster counts: the first may compile kernels."""
ENOUGH = 2.0
"""Seconds after which wider passes are left out: a slow machine should not load for long."""

MakeCache = Callable[[], list[Any]]


def calibrate(
    model: LoadedModel, make_cache: MakeCache, replication: Replication = ONE_PROCESS
) -> Curve:
    """Time passes of `model` on the engine thread. Never raises: what fails is not measured.

    `replication`: with other processes, all of which run the passes for which the first has time.
    """
    began = time.perf_counter()

    def enough() -> bool:
        late = time.perf_counter() - began > ENOUGH
        return replication.decide("timed enough", lambda: late, bool, bool)

    short: list[tuple[int, float]] = []
    deep: list[tuple[int, float]] = []
    # a learnt position beyond the context is read from whatever lies behind the others
    context = model.info.context_length
    with Isolation() as tried:
        for width in [n for n in WIDTHS if REPEATS * n <= context]:
            short.append((width, _timed(model, make_cache(), 0, width)))
            if enough():
                break
    if tried.fault is not None:
        log.warning("passes could not be timed: %s", tried.fault.summary)
    if len(short) < 2:
        return UNMEASURED
    with Isolation() as tried:
        fits = DEPTH + REPEATS * max(DEEP_WIDTHS) <= context
        if fits and not enough():
            deep = [
                (n, _timed(model, deep_cache(model, make_cache), DEPTH, n)) for n in DEEP_WIDTHS
            ]
    if tried.fault is not None:
        log.info("passes over a deep cache could not be timed: %s", tried.fault.summary)
    return Curve.through(short, deep, DEPTH)


def _timed(model: LoadedModel, cache: list[Any], start: int, width: int) -> float:
    """Seconds of the fastest of some passes over `width` tokens."""
    prompt = Prompt(spread(model, start + REPEATS * width))
    took = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        logits = model.prefill(PrefillChunk(prompt, start, start + width, cache))
        mx.eval(logits, arrays(cache))
        took.append(time.perf_counter() - began)
        start += width
    return min(took)


def deep_cache(model: LoadedModel, make_cache: MakeCache) -> list[Any]:
    """A row cache that looks as if it held `DEPTH` tokens, without a pass over them."""
    cache = make_cache()
    model.prefill(PrefillChunk(Prompt(spread(model, 1)), 0, 1, cache))
    for layer in leaves(cache):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if isinstance(keys, mx.array) and isinstance(values, mx.array):
            layer.update_and_fetch(*(_longer(each, DEPTH - 1) for each in (keys, values)))
    mx.eval(arrays(cache))
    return cache


def _longer(array: mx.array, tokens: int) -> mx.array:
    """(1, heads, any, D) as (1, heads, tokens, D)."""
    return mx.repeat(array[:, :, :1], tokens, axis=2)


def spread(model: LoadedModel, count: int) -> Sequence[int]:
    """Ids spread over the vocabulary: experts and embeddings are read as in a real prompt."""
    return [(7919 * (i + 1)) % max(2, model.info.vocab_size) for i in range(count)]
