"""Times passes on this device at load, by width and by cache depth."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from ...isolation import Isolation
from ...records import LoadedModel, PrefillChunk, Prompt
from ..memory import arrays, leaves
from ..replication import ONE_PROCESS, Replication
from ..row_cache import grow_by
from ..scheduling.chunking import LONGEST_GAP
from ..scheduling.costs import UNMEASURED, Curve

log = logging.getLogger(__name__)

WIDTHS = (1, 4, 8, 16, 32, 64, 256)
"""Tokens of the timed passes: one stream, a few streams, parts of a tile, and whole tiles."""
DEEP_WIDTHS = (1, 4, 8, 16, 64, 128, 256, 1024)
"""Widths that are also timed over a deep cache. On Metal (mlx 0.32.4), attention has kernels for up
to 8 tokens (4 if 8 heads share keys). The other kernels take as long for 9 tokens as for 64."""
FLAT = 64
"""Widest pass, in tokens, with this flat cost."""
DEPTHS = (8192, 2048)
"""Depths of the deep cache in tokens. The first one within the context is used; on a CPU only the
last one."""
REPEATS = 2
"""Passes per width. The faster one counts, because the first may compile kernels."""
DEEP_ENOUGH = 3.5
"""After this many seconds, no wider pass over the deep cache is timed. A pass that is expected to
take longer than a chunk may is not timed either."""
MOSTLY = 4.0
"""If a pass over the deep cache takes this many times as long, attention dominates, and wider
passes take proportionally longer."""
ENOUGH = 2.0
"""After this many seconds, wider passes are not timed, so that a slow machine loads fast."""
WARM, WARM_PASSES = 0.2, 16
"""Most seconds and passes of untimed warm-up: an idle device runs at a lower clock."""

MakeCache = Callable[[], list[Any]]


def calibrate(
    model: LoadedModel, make_cache: MakeCache, replication: Replication = ONE_PROCESS
) -> Curve:
    """Time passes of `model` on the engine thread. Never raises; a pass that fails is not measured.

    `replication`: other processes, which run the same passes as the first process.
    """
    context = model.info.context_length
    # a learned position beyond the context would read memory outside its table
    depths = DEPTHS if mx.default_device() == mx.gpu else DEPTHS[-1:]
    depth = next((n for n in depths if n + REPEATS * 2 * FLAT <= context), 0)
    timing = _Timing(model, make_cache, replication)
    with Isolation() as tried:
        if depth:
            timing.warm()
            timing.over(depth)
    if tried.fault is not None:
        log.info("passes over a deep cache could not be timed: %s", tried.fault.summary)
    with Isolation() as tried:
        timing.short_ones([n for n in WIDTHS if REPEATS * n <= context])
    if tried.fault is not None:
        log.warning("passes could not be timed: %s", tried.fault.summary)
    if len(timing.short) < 2:
        return UNMEASURED
    return Curve.through(sorted(timing.short.items()), sorted(timing.deep.items()), depth or 1)


class _Timing:
    """Seconds of passes, by width."""

    def __init__(self, model: LoadedModel, make: MakeCache, replication: Replication) -> None:
        self._model = model
        self._make = make
        self._replication = replication
        self.short: dict[int, float] = {}
        self.deep: dict[int, float] = {}

    def warm(self) -> None:
        """Run untimed passes until the device reaches its clock."""
        began = time.perf_counter()
        for _ in range(WARM_PASSES):
            self._timed(self._make(), 0, 1)
            if self._first(lambda: time.perf_counter() - began > WARM):
                break

    def over(self, depth: int) -> None:
        """Time passes over a cache of `depth` tokens, and the same passes over an empty cache."""
        began, start = time.perf_counter(), depth
        cache = deep_cache(self._model, self._make, depth, REPEATS * sum(DEEP_WIDTHS))
        for width in DEEP_WIDTHS:
            late = start + REPEATS * width > self._model.info.context_length
            if late or self._first(partial(self._enough, width, began)):
                break
            self._time_short(width)
            self.deep[width], start = self._timed(cache, start, width)

    def _enough(self, width: int, began: float) -> bool:
        """Whether to skip passes of this width and wider ones over the deep cache."""
        late = time.perf_counter() - began > DEEP_ENOUGH
        if width <= FLAT:
            return late
        widest = max(self.deep)
        attends = self.deep[widest] > MOSTLY * self.short[widest]
        return late or attends or self.deep[widest] * width / widest > LONGEST_GAP

    def short_ones(self, widths: Sequence[int]) -> None:
        """Time the passes of these widths that are not timed yet."""
        began = time.perf_counter()
        for width in [n for n in widths if n not in self.short]:
            self._time_short(width)
            if self._first(lambda: time.perf_counter() - began > ENOUGH):
                break

    def _time_short(self, width: int) -> None:
        cache = self._make()
        grow_by(cache, REPEATS * width)
        self.short[width], _ = self._timed(cache, 0, width)

    def _timed(self, cache: list[Any], start: int, width: int) -> tuple[float, int]:
        """Seconds of the fastest of several passes over `width` tokens, and the end position."""
        prompt = Prompt(spread(self._model, start + REPEATS * width))
        took = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            logits = self._model.prefill(PrefillChunk(prompt, start, start + width, cache))
            mx.eval(logits, arrays(cache))
            took.append(time.perf_counter() - began)
            start += width
        return min(took), start

    def _first(self, own: Callable[[], bool]) -> bool:
        """The decision of the first process, so that all processes run the same passes."""
        return self._replication.decide("timed enough", own, bool, bool)


def deep_cache(model: LoadedModel, make_cache: MakeCache, depth: int, more: int) -> list[Any]:
    """A row cache that appears to hold `depth` tokens, made without a pass, with capacity for
    `more` tokens."""
    cache = make_cache()
    grow_by(cache, depth + more)
    model.prefill(PrefillChunk(Prompt(spread(model, 1)), 0, 1, cache))
    for layer in leaves(cache):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if isinstance(keys, mx.array) and isinstance(values, mx.array):
            layer.update_and_fetch(*(_longer(each, depth - 1) for each in (keys, values)))
    mx.eval(arrays(cache))
    return cache


def _longer(array: mx.array, tokens: int) -> mx.array:
    """(1, heads, any, D) repeated or cut to (1, heads, tokens, D)."""
    return mx.repeat(array[:, :, :1], tokens, axis=2)


def spread(model: LoadedModel, count: int) -> Sequence[int]:
    """Ids spread over the vocabulary, so that a pass reads experts and embeddings as for a real
    prompt."""
    return [(7919 * (i + 1)) % max(2, model.info.vocab_size) for i in range(count)]
