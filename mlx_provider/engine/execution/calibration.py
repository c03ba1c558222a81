"""Times passes on this device at load, by width and by cache depth."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ...isolation import Isolation
from ...records import LoadedModel, PrefillChunk, Prompt
from ..memory import MemoryProfile, arrays, profile
from ..row_cache import grow_by
from ..scheduling.chunking import LONGEST_GAP
from ..scheduling.costs import UNMEASURED, Curve
from .deep_cache import MakeCache, copied_bytes, deep_cache, spread

log = logging.getLogger(__name__)

WIDTHS = (1, 4, 8, 16, 32, 64, 256)
"""Tokens of the timed passes: one stream, a few streams, parts of a tile, and whole tiles."""
DEEP_WIDTHS = (1, 4, 5, 8, 16, 64, 128, 256, 1024)
"""Widths that are also timed over a deep cache. On Metal (mlx 0.32.4), attention has kernels for up
to 8 tokens (4 if 8 heads share keys, so that 5 are timed). The other kernels take as long for 9
tokens as for 64."""
FLAT = 64
"""Widest pass, in tokens, with this flat cost."""
DEPTHS = (8192, 4096, 2048, 1024)
"""Depths of the deep cache in tokens. The first one within the context and the free memory is
used."""
SLOW_DEPTHS = DEPTHS[2:]
"""The same on a CPU."""
SHALLOW = 8
"""A timed pass has at most this fraction (1/n) of the tokens of the deep cache."""
REPEATS = 2
"""Passes per width. The faster one counts, because the first may compile kernels."""
DEEP_ENOUGH = 4.5
"""After this many seconds, no wider pass over the deep cache is timed. A pass that is expected to
take longer than a chunk may is not timed either."""
MOSTLY = 4.0
"""If a pass over the deep cache takes this many times as long, attention dominates, and wider
passes take proportionally longer."""
ENOUGH = 2.0
"""After this many seconds, wider passes are not timed, so that a slow machine loads fast."""
WARM, WARM_PASSES = 0.2, 16
"""Most seconds and passes of untimed warm-up: an idle device runs at a lower clock."""

Reserve = Callable[[int], bool]
"""Reserves bytes for measurements, in place of those reserved before. Returns whether they are
free."""


def unlimited(nbytes: int) -> bool:
    """The reservation of a process without a memory limit."""
    return True


def calibrate(model: LoadedModel, make_cache: MakeCache, reserve: Reserve = unlimited) -> Curve:
    """Time passes of `model` on the engine thread. Never raises; a pass that fails is not measured.

    `reserve`: a pass for whose memory it returns `False` is not run.
    """
    context, depth = model.info.context_length, 0
    # a learned position beyond the context would read memory outside its table
    known = DEPTHS if mx.default_device() == mx.gpu else SLOW_DEPTHS
    depths = [n for n in known if n + REPEATS * 2 * FLAT <= context]
    timing = _Timing(model, make_cache, reserve)
    with Isolation() as tried:
        timing.warm()
        if depth := next(filter(timing.fits, depths), 0):
            timing.over(depth)
        elif depths:
            log.info("passes over a deep cache are not timed: too little memory is free")
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

    def __init__(self, model: LoadedModel, make: MakeCache, reserve: Reserve) -> None:
        self._model = model
        self._make = make
        self._reserve = reserve
        self._memory = MemoryProfile(0, 0)
        self._copied = 0
        """Bytes of a copy of one token of one quantised layer."""
        self._held = 0
        """Bytes of the deep cache, and of the copy of one of its layers."""
        self._released = 0
        """Bytes that the last passes used at their peak and released."""
        self._over_empty = self._over_deep = (1, 0)
        """Width of the widest passes so far over an empty and over the deep cache, and the bytes
        that they released."""
        self.short: dict[int, float] = {}
        self.deep: dict[int, float] = {}

    def warm(self) -> None:
        """Run untimed passes until the device reaches its clock."""
        began = time.perf_counter()
        for _ in range(WARM_PASSES):
            cache = self._make()
            self._timed(cache, 0, 1)
            self._memory, self._copied = profile(cache, REPEATS), copied_bytes(cache)
            if time.perf_counter() - began > WARM:
                break

    def fits(self, depth: int) -> bool:
        """Reserve the memory of passes over a cache of `depth` tokens, if it is free."""
        return self._reserve(self._deep_bytes(depth) + self._pass_bytes(1))

    def over(self, depth: int) -> None:
        """Time passes over a cache of `depth` tokens, and the same passes over an empty cache."""
        began, start = time.perf_counter(), depth
        self._held = self._deep_bytes(depth)
        cache = deep_cache(self._model, self._make, depth, _behind(depth))
        for width in _widths(depth):
            late = start + REPEATS * width > self._model.info.context_length
            if late or self._enough(width, began) or not self._room(width):
                break
            self._time_short(width)
            self.deep[width], start = self._timed(cache, start, width)
            self._over_deep = width, self._released
        self._held, self._over_deep = 0, (1, 0)

    def _deep_bytes(self, depth: int) -> int:
        tokens = depth + _behind(depth)
        return self._memory.row_bytes(tokens) + tokens * self._copied

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
            if not self._room(width):
                break
            self._time_short(width)
            if time.perf_counter() - began > ENOUGH:
                break

    def _time_short(self, width: int) -> None:
        cache = self._make()
        grow_by(cache, REPEATS * width)
        self.short[width], _ = self._timed(cache, 0, width)
        self._over_empty = max(self._over_empty, (width, self._released))

    def _timed(self, cache: list[Any], start: int, width: int) -> tuple[float, int]:
        """Seconds of the fastest of several passes over `width` tokens, and the end position."""
        prompt = Prompt(spread(self._model, start + REPEATS * width))
        took = []
        mx.reset_peak_memory()
        for _ in range(REPEATS):
            began = time.perf_counter()
            logits = self._model.prefill(PrefillChunk(prompt, start, start + width, cache))
            mx.eval(logits, arrays(cache))
            took.append(time.perf_counter() - began)
            start += width
        self._released = mx.get_peak_memory() - mx.get_active_memory()
        return min(took), start

    def _room(self, width: int) -> bool:
        """Reserve the memory of passes of this width, if it is free."""
        return self._reserve(self._held + self._pass_bytes(width))

    def _pass_bytes(self, width: int) -> int:
        """Most bytes of such passes and of their own cache. Scores of attention over an empty cache
        grow with the square of the width."""
        (short, over_empty), (deep, over_deep) = self._over_empty, self._over_deep
        times = width / short
        released = max(
            over_empty * max(times, times**2), over_deep * width / deep * (1 + 1 / SHALLOW)
        )
        return self._memory.row_bytes(REPEATS * width) + int(released)


def _widths(depth: int) -> list[int]:
    """Widths of the passes over a cache of `depth` tokens."""
    return [n for n in DEEP_WIDTHS if n * SHALLOW <= depth]


def _behind(depth: int) -> int:
    """Tokens of all these passes."""
    return REPEATS * sum(_widths(depth))
