"""Times at load the passes that will run on this device: chunks, decode passes, mixed passes, and
decode passes of rows that share a prefix."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from time import perf_counter
from typing import Any

import mlx.core as mx

from ...isolation import Isolation
from ...records import LoadedModel, PrefillChunk, Prompt
from ...records.drafter import MOST_DRAFTS
from ...upstream.batch_caches import RowCache
from ...upstream.cache_classes import take_back
from ...upstream.shared_kv import SHAREABLE, divide
from ..memory import MemoryProfile, arrays, leaves, profile
from ..row_cache import grow_by
from ..scheduling.chunking import LONGEST_GAP, WIDE
from ..scheduling.costs import UNMEASURED, Curve
from .batch_layout import NO_DRAFTS, GroupedLayout, make_layout
from .decode_batch import run_pass
from .grouped_kv import MixedChunk
from .pass_memory import MakeCache, Reserve, copied_bytes, deep_cache, spread, unlimited
from .probe import Probe, stand_in

log = logging.getLogger(__name__)

WIDTHS = (1, 4, 8, 16, 32, 64, 256, 512, 1024, 2048)
"""Tokens of the timed chunks: drafts, parts of a tile, and the sizes of chunks."""
DEEP_WIDTHS = (1, 8, 64, 256, 1024)
"""Widths that are also timed over a deep cache. On Metal (mlx 0.32.4), attention has kernels for up
to 8 tokens; the others take as long for 9 as for 64."""
ROWS = (1, 2, 4, 8, 16)
"""Rows of the timed decode passes,"""
LONGEST_ROW, SLOW_ROW = 1920, 240
"""and tokens of the longest of them on a GPU and on a CPU. No two have the same length."""
MIXED, BRIEF = 4, 0.2
"""Rows of the timed mixed pass, and the most seconds of its chunk."""
DRAFTS = (1, 3, 7)
"""Drafts of the row in the timed passes with drafts."""
COMPILED = (1, 8, 16, 32, 64, 256)
"""Tokens of passes for which a GPU may have to compile kernels: a product has others for few rows,
for each size of a tile, and where weights are dequantised."""
FLAT = 64
"""Widest pass, in tokens, with this flat cost."""
DEPTHS = (8192, 4096, 2048, 1024)
"""Depths of the deep cache in tokens. The first one within the context and the free memory is
used."""
SLOW_DEPTHS = DEPTHS[2:]
"""The same on a CPU."""
SHALLOW = 8
"""A timed pass has at most this fraction (1/n) of the tokens of the deep cache."""
REPEATS = 3
"""Passes of each shape. The first may compile kernels and make plans, so it is apart. The fastest
of the others counts."""
ENOUGH = 1.5
"""After this many seconds of passes of a kind, no further ones are timed, so that a slow machine
loads fast. First passes do not count: what they compile is needed anyway."""
MOSTLY = 4.0
"""If a pass over the deep cache takes this many times as long, attention dominates, and wider
passes take proportionally longer."""
LITTLE = 0.01
"""New shapes that take so many seconds longer are not avoided."""
CLEARLY = 0.9
"""Rows are padded if their passes then take less than this part of the time. Wider chunks are not
timed if they take more than this part of the time of as many tokens in narrower ones."""

Took = Sequence[float]
"""Seconds of passes of one shape; the first may be the first ever. Empty: too little memory
is free."""
SHARED_UNMEASURED = 2048
"""Tokens from which on rows share without a measurement: reading so many keys of an 8B model takes
as long as the additional kernels (by arithmetic for 400 GB/s)."""
FEWEST_TOKENS, MOST_TOKENS = 256, 32_768
"""Limits of what a measurement may choose. Below, a copy is nothing; above, memory counts more: a
copy of so many tokens of an 8B model has 4.8 GB."""
SHARED_GAIN = 1.2
"""Rows share a prefix where a step with copies takes this many times as long. On an H100, copies of
10,000 tokens were faster (36 against 41 ms)."""
SHARED_DEPTH, SLOW_SHARED_DEPTH = 4096, 1024
"""Tokens of the prefix in the timed passes, on a GPU and on a CPU."""
TAIL = 16
"""Own tokens of each of the two rows in them."""
SHARED_PASSES = 2
"""Passes of each kind. The fastest counts."""


class Times:
    def __init__(
        self, passes: OnDevice, context: int, depths: Sequence[int], longest_row: int
    ) -> None:
        """`context`: most tokens of a row. `depths`: of the deep cache, the best first."""
        self._passes = passes
        self._context = context
        self._depths = [n for n in depths if n + FLAT + REPEATS <= context]
        self._longest_row = min(longest_row, context - REPEATS - MOST_DRAFTS)
        self.short: dict[int, float] = {}
        self.deep: dict[int, float] = {}
        self.depth = 1
        self._first: list[float] = []
        """By how many seconds the first passes of whole tiles were slower."""
        self._spent = 0.0

    def chunks(self) -> None:
        self._spent = 0.0
        for width in (n for n in WIDTHS if n <= self._context):
            if width > FLAT and self._known(width):
                break
            took = self._took(self._passes.chunk, width)
            if not took:
                break
            self.short[width] = self._later(took)
            if width >= FLAT:
                self._first.append(max(0.0, took[0] - self.short[width]))

    def _known(self, width: int) -> bool:
        """Whether a chunk takes as long for each token as narrower ones, or too long to run."""
        (n, s), (m, t) = sorted(self.short.items())[-2:]
        return t * width / m > LONGEST_GAP or (m > FLAT and t >= CLEARLY * s * m / n)

    def over_deep_cache(self) -> None:
        """Time chunks over the deepest cache for which there is memory."""
        depth = 0
        with Isolation() as tried:
            depth = next(filter(self._passes.deepen, self._depths), 0)
        if not depth:
            if self._depths:
                why = "too little memory is free" if tried.fault is None else tried.fault.summary
                log.info("passes over a deep cache are not timed: %s", why)
            return
        self.depth, self._spent = depth, 0.0
        for width in (n for n in DEEP_WIDTHS if n in self.short and n * SHALLOW <= depth):
            if depth + width > self._context or self._dominates(width):
                break
            took = self._took(self._passes.deep, width)
            if not took:
                break
            self.deep[width] = self._later(took)

    def _dominates(self, width: int) -> bool:
        """Whether what wider passes take is known, or is longer than a chunk may take."""
        if width <= FLAT:
            return False
        widest = max(self.deep)
        attends = self.deep[widest] > MOSTLY * self.short[widest]
        return attends or self.deep[widest] * width / widest > LONGEST_GAP

    def rows(self, layout: str) -> dict[int, float]:
        return self._each(ROWS, lambda count: self._passes.rows(self.unlike(count), layout))

    def saved(self, layout: str, rows: dict[int, float]) -> float | None:
        """By how many seconds a mixed pass is faster than two passes. `None`: not measured."""
        width = max((n for n, s in self.short.items() if n <= WIDE and s <= BRIEF), default=0)
        if MIXED not in rows or width < 2:
            return None
        took = self._each([width], lambda n: self._passes.rows(self.unlike(MIXED), layout, n))
        return rows[MIXED] + self.short[width] - took[width] if took else None

    def drafts(self, layout: str, rows: dict[int, float]) -> dict[int, float]:
        """By how many seconds passes of one row with drafts are longer than one without."""
        counts = DRAFTS if 1 in rows else ()
        took = self._each(counts, lambda n: self._passes.rows(self.unlike(1), layout, 0, n))
        return {n: seconds - rows[1] for n, seconds in took.items()}

    def unlike(self, count: int) -> list[int]:
        return [max(1, self._longest_row * (i + 1) // count) for i in range(count)]

    def curve(self, rows: dict[int, float], saved: float | None, drafts: dict[int, float]) -> Curve:
        if len(self.short) < 2:
            return UNMEASURED
        first = min(self._first, default=0.0)
        short, deep = sorted(self.short.items()), sorted(self.deep.items())
        plain = Curve.through(short, deep, self.depth)
        least = min(self.short.values()) / 2
        alone = [
            (n, max(least, took - sum(self.unlike(n)) * plain.per_key(1)))
            for n, took in sorted(rows.items())
        ]
        if first < LITTLE:
            first = 0.0
        found = Curve.through(short, deep, self.depth, alone, saved, first)
        keys = sum(self.unlike(1))
        own = [
            (n, max(0.0, longer - found.with_drafts(n, 1, 1, keys)))
            for n, longer in sorted(drafts.items())
        ]
        return replace(found, drafts=own)

    def _each(self, sizes: Sequence[int], run: Callable[[int], Took]) -> dict[int, float]:
        self._spent, found = 0.0, {}
        for size in sizes:
            took = self._took(run, size)
            if not took:
                break
            found[size] = self._later(took)
        return found

    def _took(self, run: Callable[[int], Took], size: int) -> Took:
        """What passes take. Empty: too little memory or time is left, or they fail."""
        if self._spent > ENOUGH:
            return ()
        with Isolation() as tried:
            return run(size)
        if tried.fault is not None:
            log.warning("passes could not be timed: %s", tried.fault.summary)
        return ()

    def _later(self, took: Took) -> float:
        self._spent += sum(took[1:])
        return min(took[1:])


def choose(times: Times, probe: Probe) -> tuple[Curve, bool]:
    """The curve, and whether rows are padded: where passes of several rows are clearly faster."""
    times.chunks()
    times.over_deep_cache()
    if probe.layout != "grouped" or not times.short:
        return times.curve({}, None, {}), False
    layout, rows = "grouped", times.rows("grouped")
    if probe.padded:
        padded = times.rows("padded")
        both = [n for n in padded if n in rows and n > 1]
        if both and sum(padded[n] for n in both) < CLEARLY * sum(rows[n] for n in both):
            layout, rows = "padded", padded
    saved = times.saved(layout, rows) if probe.mixes else None
    drafts = times.drafts(layout, rows) if probe.drafts else {}
    return times.curve(rows, saved, drafts), layout == "padded"


def compile_kernels(model: LoadedModel, make_cache: MakeCache, reserve: Reserve) -> None:
    """Run passes of each kind, so that no request waits until their kernels are compiled: on CUDA
    up to 40 s each. Never raises: the probe reports what fails."""
    passes = OnDevice(model, make_cache, reserve)
    with Isolation():
        for width in COMPILED:
            if width <= model.info.context_length:
                passes.chunk(width)


def calibrate(
    model: LoadedModel, make_cache: MakeCache, probe: Probe, reserve: Reserve = unlimited
) -> tuple[Curve, bool]:
    """Time passes of `model` on the engine thread. Never raises; a pass that fails is not measured.
    `reserve`: a pass for whose memory it returns `False` is not run. Returns what `choose` does."""
    gpu = mx.default_device() == mx.gpu
    depths, longest = (DEPTHS, LONGEST_ROW) if gpu else (SLOW_DEPTHS, SLOW_ROW)
    passes = OnDevice(model, make_cache, reserve)
    times = Times(passes, model.info.context_length, depths, longest)
    return choose(times, probe)


class OnDevice:
    """Passes of a model, `REPEATS` of each shape."""

    def __init__(self, model: LoadedModel, make: MakeCache, reserve: Reserve) -> None:
        self._model = model
        self._make = make
        self._reserve = reserve
        self._memory = MemoryProfile(0, 0)
        self._copied = 0
        """Bytes of a copy of one token of one quantised layer."""
        self._deep: list[Any] = []
        self._depth = 0
        self._held = 0
        """Bytes of the deep cache, and of the copy of one of its layers."""
        self._over_empty = self._over_deep = (1, 0)
        """Width of the widest passes so far over an empty and over the deep cache, and the bytes
        that they released at their peak."""

    def chunk(self, tokens: int) -> Took:
        if tokens == 1:
            cache = self._make()
            self._timed(cache, 0, 1)
            self._memory, self._copied = profile(cache), copied_bytes(cache)
        if not self._reserve(self._held + self._pass_bytes(tokens)):
            return ()
        took, released = [], 0
        for _ in range(REPEATS):
            cache = self._make()
            grow_by(cache, tokens)
            seconds, released = self._timed(cache, 0, tokens)
            took.append(seconds)
        self._over_empty = tokens, released
        return took

    def deepen(self, depth: int) -> bool:
        """Make the deep cache. Returns whether there is memory for it."""
        more = depth // SHALLOW + REPEATS
        held = self._memory.row_bytes(depth + more) + (depth + more) * self._copied
        if not self._reserve(held + self._pass_bytes(1)):
            return False
        self._deep = deep_cache(self._model, self._make, depth, more)
        self._depth, self._held = depth, held
        return True

    def deep(self, tokens: int) -> Took:
        if not self._reserve(self._held + self._pass_bytes(tokens)):
            return ()
        took, released = [], 0
        for _ in range(REPEATS):
            seconds, released = self._timed(self._deep, self._depth, tokens)
            took.append(seconds)
            if tokens == 1:
                self._depth += 1
                continue
            for layer in leaves(self._deep):
                if hasattr(layer, "update_and_fetch"):
                    take_back(layer, tokens)
        self._over_deep = tokens, released
        return took

    def rows(self, lengths: Sequence[int], layout: str, chunk: int = 0, drafts: int = 0) -> Took:
        self._deep, self._held, self._over_deep = [], 0, (1, 0)
        more, width = REPEATS + drafts, len(lengths) * (1 + drafts)
        held = 2 * len(lengths) * self._memory.row_bytes(max(lengths) + more)
        if not self._reserve(held + self._pass_bytes(chunk + width)):
            return ()
        rows, took = make_layout(layout), []
        widths = {}
        for length in lengths:
            row = stand_in([1] * length, 0)
            rows.add(row, deep_cache(self._model, self._make, length, more))
            widths[row] = 1 + drafts
        tokens = list(spread(self._model, max(chunk, width)))
        for _ in range(REPEATS):
            along = None
            if chunk:
                along = MixedChunk(tokens[:chunk], range(chunk), cache := self._make())
                grow_by(cache, chunk)
            (each,) = rows.passes(along, widths if drafts else NO_DRAFTS)
            order = (*each.rows, *each.drafting)
            at = [n for row in order for n in range(row.length, row.length + widths[row])]
            began = perf_counter()
            first = mx.array(tokens[:width], dtype=mx.int32)
            mx.eval(run_pass(self._model, each, first, at).logits)
            took.append(perf_counter() - began)
            for row in order:
                rows.keep(row, 1)
                row.tokens.append(1)
        return took

    def _timed(self, cache: list[Any], start: int, width: int) -> tuple[float, int]:
        """Seconds of a pass over `width` tokens, and the bytes that it released."""
        prompt = Prompt(spread(self._model, start + width))
        mx.reset_peak_memory()
        began = perf_counter()
        logits = self._model.prefill(PrefillChunk(prompt, start, start + width, cache))
        mx.eval(logits, arrays(cache))
        took = perf_counter() - began
        return took, mx.get_peak_memory() - mx.get_active_memory()

    def _pass_bytes(self, width: int) -> int:
        """Most bytes of such a pass and of its own cache. Scores of attention over an empty cache
        grow with the square of the width."""
        (short, over_empty), (deep, over_deep) = self._over_empty, self._over_deep
        times = width / short
        released = max(
            over_empty * max(times, times**2), over_deep * width / deep * (1 + 1 / SHALLOW)
        )
        return self._memory.row_bytes(width) + int(released)


# -- shared prefixes


def least_shared(model: LoadedModel, make_cache: MakeCache, curve: Curve, reserve: Reserve) -> int:
    """Tokens from which on two rows decode faster with a shared prefix than with copies, on the
    engine thread. Never raises. A shared prefix is read once, but attention in two parts launches
    more kernels in each layer."""
    depth = SHARED_DEPTH if mx.default_device() == mx.gpu else SLOW_SHARED_DEPTH
    if not curve.depths or model.info.context_length < depth + TAIL + SHARED_PASSES:
        return SHARED_UNMEASURED
    with Isolation() as tried:
        short = deep_cache(model, make_cache, 2 * TAIL, SHARED_PASSES)
        # the row, a divided layer, and the tails
        if not reserve(2 * profile(short).row_bytes(depth + 2 * TAIL)):
            return SHARED_UNMEASURED
        apart = _step(model, short, 0)
        divided = _step(model, short, TAIL)
        cache = deep_cache(model, make_cache, depth + TAIL, SHARED_PASSES)
        deep = _step(model, cache, depth)
        each = (deep - divided) / depth, 2 * curve.per_key(1)
        return least_tokens(apart, divided - apart, *each)
    if tried.fault is not None:
        log.info("a shared prefix could not be timed: %s", tried.fault.summary)
    return SHARED_UNMEASURED


def least_tokens(step: float, overhead: float, shared: float, copied: float) -> int:
    """The length from which on a step with a shared prefix is clearly faster. step: seconds of one
    without a prefix. overhead: additional ones of a shared prefix. shared, copied: seconds for each
    token of the prefix."""
    gained = copied - SHARED_GAIN * shared
    if gained <= 0:
        return MOST_TOKENS
    least = ((SHARED_GAIN - 1) * step + SHARED_GAIN * overhead) / gained
    return round(min(MOST_TOKENS, max(FEWEST_TOKENS, least)))


def _step(model: LoadedModel, cache: RowCache, prefix: int) -> float:
    layout = GroupedLayout()
    layers = [layer for layer in leaves(cache) if type(layer) in SHAREABLE]
    held = layers[0].offset
    for layer in layers if prefix else ():
        divide(layer, prefix)
    rows = [stand_in([1] * held, 0) for _ in range(2)]
    for row in rows:
        layout.add(row, deepcopy(cache))
    took = []
    for at in range(held, held + SHARED_PASSES):
        (each,) = layout.passes()
        began = perf_counter()
        logits = run_pass(model, each, mx.ones(2, mx.int32), [at] * 2).logits
        mx.eval(logits, [arrays(group.cache) for group in layout.rows.groups])
        took.append(perf_counter() - began)
    return min(took)
