"""Times at load from which length on two rows decode faster with a shared prefix than with copies.

A shared prefix is read once, but attention in two parts launches more kernels in each layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from time import perf_counter

import mlx.core as mx

from ...isolation import Isolation
from ...records import LoadedModel
from ...upstream.batch_caches import RowCache
from ...upstream.shared_kv import SHAREABLE, divide
from ..memory import arrays, leaves, profile
from ..scheduling.costs import Curve
from .batch_layout import GroupedLayout
from .decode_batch import run_pass
from .deep_cache import MakeCache, deep_cache
from .probe import stand_in

log = logging.getLogger(__name__)

UNMEASURED = 2048
"""Tokens from which on rows share without a measurement: reading so many keys of an 8B model takes
as long as the additional kernels (by arithmetic for 400 GB/s)."""
FEWEST_TOKENS, MOST_TOKENS = 256, 32_768
"""Limits of what a measurement may choose. Below, a copy is nothing; above, memory counts more: a
copy of so many tokens of an 8B model has 4.8 GB."""
CLEARLY = 1.2
"""Rows share a prefix where a step with copies takes this many times as long. On an H100, copies of
10,000 tokens were faster (36 against 41 ms)."""
DEPTH, SLOW_DEPTH = 4096, 1024
"""Tokens of the prefix in the timed passes, on a GPU and on a CPU."""
TAIL = 16
"""Own tokens of each of the two rows in them."""
PASSES = 2
"""Passes of each kind. The fastest counts."""


def least_shared(
    model: LoadedModel,
    make_cache: MakeCache,
    curve: Curve,
    reserve: Callable[[int], bool],
) -> int:
    """Tokens from which on rows should share, on the engine thread. Never raises.

    `reserve`: whether so many bytes are free.
    """
    depth = DEPTH if mx.default_device() == mx.gpu else SLOW_DEPTH
    if not curve.depths or model.info.context_length < depth + TAIL + PASSES:
        return UNMEASURED
    with Isolation() as tried:
        short = deep_cache(model, make_cache, 2 * TAIL, PASSES)
        # the row, a divided layer, and the tails
        if not reserve(2 * profile(short, 2 * TAIL).row_bytes(depth + 2 * TAIL)):
            return UNMEASURED
        apart = _step(model, short, 0)
        divided = _step(model, short, TAIL)
        cache = deep_cache(model, make_cache, depth + TAIL, PASSES)
        deep = _step(model, cache, depth)
        each = (deep - divided) / depth, 2 * curve.per_key(1)
        return least_tokens(apart, divided - apart, *each)
    if tried.fault is not None:
        log.info("a shared prefix could not be timed: %s", tried.fault.summary)
    return UNMEASURED


def least_tokens(step: float, overhead: float, shared: float, copied: float) -> int:
    """The length from which on a step with a shared prefix is clearly faster.

    step: seconds of one without a prefix. overhead: additional ones of a shared prefix. shared,
    copied: seconds for each token of the prefix.
    """
    gained = copied - CLEARLY * shared
    if gained <= 0:
        return MOST_TOKENS
    least = ((CLEARLY - 1) * step + CLEARLY * overhead) / gained
    return round(min(MOST_TOKENS, max(FEWEST_TOKENS, least)))


def _step(model: LoadedModel, cache: RowCache, prefix: int) -> float:
    """Seconds of the fastest pass of two rows that share so many tokens."""
    layout = GroupedLayout()
    layers = [layer for layer in leaves(cache) if type(layer) in SHAREABLE]
    held = layers[0].offset
    for layer in layers if prefix else ():
        divide(layer, prefix)
    rows = [stand_in([1] * held, 0) for _ in range(2)]
    for row in rows:
        layout.add(row, deepcopy(cache))
    took = []
    for at in range(held, held + PASSES):
        (each,) = layout.passes()
        began = perf_counter()
        logits = run_pass(model, each, mx.ones(2, mx.int32), [at] * 2).logits
        mx.eval(logits, [arrays(group.cache) for group in layout.rows.groups])
        took.append(perf_counter() - began)
    return min(took)
