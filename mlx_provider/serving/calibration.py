"""Times the passes of a model at load, as they will run on this device: chunks, rows, both, and
drafts. Also measures their bytes, and tries whether rows that share a prefix are faster.
`calibrate` is the entry, `Times` chooses what is timed, and `OnDevice` runs the passes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from time import perf_counter
from typing import Any

import mlx.core as mx

from ..engine.execution.batch_layout import NO_WIDTHS
from ..engine.execution.grouped_kv import MixedChunk
from ..engine.request import SamplingParams
from ..engine.row_cache import arrays, grow_by, profile
from ..engine.scheduling.chunking import LONGEST_GAP, WIDE, PassBytes
from ..engine.scheduling.costs import UNMEASURED, Curve, non_decreasing
from ..engine.scheduling.ledger import MemoryProfile
from ..isolation import Fault, attempt
from ..records import LoadedModel, PrefillChunk, Prompt
from ..records.extensions import MOST_DRAFTS
from ..upstream.cache_classes import QuantizedKVCache, layers_of, take_back
from .probe import Probe, Reserve, Trial, share_prefix, unlimited
from .solo_rows import MakeCache, some_tokens, timed_pass

log = logging.getLogger(__name__)

WIDTHS = (1, 4, 8, 16, 32, 64, 256, 512, 1024, 2048)
"""Tokens of the timed chunks: drafts, parts of a tile, and the sizes of chunks."""
DEEP_WIDTHS = (1, 8, 64, 256, 1024)
"""Widths that are also timed over a deep cache. On Metal (mlx 0.32.4), attention has kernels for up
to 8 tokens; the others keep scores and take as long for 9 as for 64."""
DEPTHS = (8192, 4096, 2048, 1024)
"""Depths of the deep cache. The first within the context and the free memory is used."""
SLOW_DEPTHS = DEPTHS[2:]
"""`DEPTHS` on a CPU."""
ROWS, MANY = (1, 2, 4, 8, 16), 32
"""Numbers of rows in the timed decode passes. `MANY` is only timed where new shapes take longer:
more than 16 rows have other kernels. No two rows have the same length."""
LONGEST_ROW, SLOW_ROW = 1920, 240
"""Tokens of the longest of these rows, on a GPU and on a CPU."""
MIXED, BRIEF = 4, 0.2
"""Rows of the timed mixed pass, and the most seconds of its chunk."""
DRAFTS = (1, 3, 7)
"""Drafts of the row in the timed passes with drafts."""
COMPILED = 256
"""Tokens of the widest pass for which a GPU may have to compile kernels."""
SAMPLED = [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_p=0.9, top_k=20)]
SAMPLED += [SamplingParams(min_p=0.1), SamplingParams(0, repetition_penalty=1.1)]
"""Sampling as of models' defaults and common clients, whose kernels a GPU may have to compile."""
FLAT = 64
"""Tokens: up to this width, passes may all take about as long."""
ENOUGH, IN_ALL = 1.5, 5.0
"""Seconds of passes of one kind, and of all kinds, after which no more are timed. The first pass of
a shape does not count."""
LITTLE = 0.01
"""Seconds: a shape whose first pass takes longer by less than this needs no care."""
CLEARLY = 0.9
"""Another layout is used if its passes take less than this part of the time. Wider passes are not
timed if they take more than this part of the time of as many tokens in narrower ones."""
SHARED_UNMEASURED, NOT_FASTER = 2048, 2**31
"""Tokens from which on rows share a prefix: if no trial worked (reading so many keys of an 8B model
takes as long as the added kernels); if the trial was not faster (so only if memory is short)."""
SHARED_GAIN = 1.2
"""Sharing counts as faster if a step with copies takes this many times as long. On an H100, eight
rows with copies of one prefix of 10,000 tokens took 41 ms, rows of unlike prompts 36 ms."""
SHARED_DEPTH, SLOW_SHARED_DEPTH, TAIL = 4096, 1024, 16
"""Tokens of the prefix in the trial, on a GPU and on a CPU; own tokens of its two rows."""
REPEATS = 3
"""Passes of each shape. The first may compile kernels. The fastest of the others counts."""
SCORED = (16, 32)
"""Tokens of passes over the deep cache that show the memory of scores and of copied keys."""
SHALLOW = 8
"""A timed pass has at most one token for this many of the deep cache."""

Took = Sequence[float]
"""Seconds of passes of one shape, in order. Empty: too little memory is free."""
Seconds = dict[int, float]
"""Seconds of the fastest pass, by its tokens, rows or drafts."""


@dataclass(frozen=True)
class Measured:
    probe: Probe
    """Its layout is `padded` or `solo` where steps of several rows are then clearly faster."""
    curve: Curve
    passes: PassBytes = field(default_factory=PassBytes)
    least_shared: int = SHARED_UNMEASURED  # tokens from which on rows share a prefix

    @property
    def lasts(self) -> bool:
        """Whether no part has failed in a way that a later attempt can mend."""
        return self.probe.conclusive and self.curve != UNMEASURED

    def choose_layout(self, *, together: bool) -> Measured:
        """What holds for the layout that will run. `together`: options need rows that share passes,
        also if passes of one row are faster."""
        probe = self.probe
        if probe.layout != "solo" or not probe.padded:  # `solo` was not chosen for its speed
            return self
        alone = replace(probe, mixes=False, drafts=False, shares=False)
        return replace(self, probe=replace(probe, layout="grouped") if together else alone)


@dataclass
class Times:
    passes: OnDevice
    context: int  # most tokens of a row
    depths: Sequence[int]  # of the deep cache, the best first
    longest_row: int
    seconds_left: float = IN_ALL

    def measure(self, probe: Probe) -> Measured:
        """Time what the probe allows, and choose the layout."""
        short, curve = self._time_chunks()
        if probe.layout != "grouped" or not short:
            return Measured(probe, curve)
        probe, rows = self._time_rows(probe, [MANY] if curve.first else [])
        width = max((n for n, s in short.items() if n <= WIDE and s <= BRIEF), default=0)
        with_chunk = partial(self.passes.rows, self._lengths(MIXED), probe.layout)
        mixes = probe.mixes and MIXED in rows and width > 1
        mixed = self._time([width] if mixes else [], with_chunk)
        with_drafts = partial(self.passes.rows, self._lengths(1), probe.layout, 0)
        verifies = probe.drafts and 1 in rows and probe.layout != "solo"
        verified = self._time(DRAFTS if verifies else [], with_drafts)
        if curve == UNMEASURED:
            return Measured(probe, curve)
        # of rows without attention to their cached tokens, which the curve counts by `per_key`
        least, per_key = min(short.values()) / 2, curve.per_key(1)
        bare = {n: max(least, s - per_key * sum(self._lengths(n))) for n, s in rows.items()}
        saved = rows[MIXED] + short[width] - mixed[width] if mixed else 0.0  # unmeasured: none
        curve = replace(curve, rows=non_decreasing(bare), saved=saved)
        # of drafts, beyond what the curve expects of the additional tokens
        expected = partial(curve.with_drafts, width=1, rows=1, keys=sum(self._lengths(1)))
        drafts = ((n, max(0.0, s - rows[1] - expected(n))) for n, s in verified.items())
        return Measured(probe, replace(curve, drafts=tuple(drafts)))

    def _time_chunks(self) -> tuple[Seconds, Curve]:
        """Time chunks over empty caches, and over the deepest cache that fits into memory. Returns
        the times over empty ones, and the curve through all."""
        slower = list[float]()  # seconds that the first pass of a shape takes longer

        def run(width: int) -> Took:
            took = self.passes.chunk(width)
            if took and width >= FLAT:
                slower.append(took[0] - min(took[1:]))
            return took

        short = self._time([n for n in WIDTHS if n <= self.context], run)
        depths = [n for n in self.depths if n + FLAT + REPEATS <= self.context]
        deepest = attempt(lambda: next(filter(self.passes.deepen, depths), 1))
        depth = deepest if isinstance(deepest, int) else 1  # 1: no deep cache
        most = min(depth // SHALLOW, self.context - depth)
        over_deep = partial(self.passes.chunk, deep=True)
        deep = self._time([n for n in DEEP_WIDTHS if n in short and n <= most], over_deep)
        if len(short) < 2:
            return short, UNMEASURED
        first = min(slower, default=0.0)
        curve = Curve.through(short, deep, depth)
        return short, replace(curve, first=first if first >= LITTLE else 0.0)

    def _time_rows(self, probe: Probe, many: Sequence[int]) -> tuple[Probe, Seconds]:
        """Time rows, and choose the layout in which steps of several are fastest. Returns the probe
        with this layout, and the times in it. `many`: numbers of rows to time only in it."""

        def run(name: str, sizes: Sequence[int] = ROWS) -> Seconds:
            return self._time(sizes, lambda count: self.passes.rows(self._lengths(count), name))

        grouped = run("grouped")
        if not (probe.padded and grouped):
            return probe, grouped
        best, fastest = "grouped", grouped
        apart = {n: n * grouped[1] for n in grouped}  # the pass of one row, n times
        for name, other in (("padded", run("padded", ROWS[1:])), ("solo", apart)):
            both = [n for n in other if n in fastest and n > 1]
            if sum(other[n] for n in both) < CLEARLY * sum(fastest[n] for n in both):
                best, fastest = name, other
        if best == "solo":
            return replace(probe, layout=best), {1: grouped[1]}
        return replace(probe, layout=best), {1: grouped[1], **fastest, **run(best, many)}

    def _lengths(self, count: int) -> list[int]:
        """Tokens of each row, from short to the longest."""
        longest = min(self.longest_row, self.context - REPEATS - MOST_DRAFTS)
        return [max(REPEATS, longest * (i + 1) // count) for i in range(count)]

    def _time(self, sizes: Sequence[int], run: Callable[[int], Took]) -> Seconds:
        """The fastest time for each of the ascending sizes. Stops if too little memory or time is
        left, a pass fails, or a wider pass would take as long for each token, or too long."""
        spent, fastest = 0.0, Seconds()
        for size in sizes:
            # the two largest sizes so far, with their seconds. Linear: a token of the larger takes
            # nearly as long as one of the smaller
            (small, less), (large, more) = [(1, inf), (1, 0.0), *fastest.items()][-2:]
            linear = large > FLAT and more >= CLEARLY * less * large / small
            late = spent > ENOUGH or self.seconds_left <= 0
            wasted = size > FLAT and (linear or more * size / large > LONGEST_GAP)
            took = () if late or wasted else attempt(partial(run, size))
            if isinstance(took, Fault):
                log.warning("passes could not be timed: %s", took.summary)
            if isinstance(took, Fault) or not took:
                break
            spent += sum(took[1:])
            self.seconds_left -= sum(took[1:])
            fastest[size] = min(took[1:])
        return fastest


def compile_kernels(model: LoadedModel, make_cache: MakeCache, reserve: Reserve) -> None:
    """Run each kind of pass and the usual sampling, so that no request waits for their kernels, on
    CUDA up to 40 s each. Never raises: the probe reports what fails."""
    passes = OnDevice(model, make_cache, reserve, 1, SAMPLED)
    most = min(COMPILED, model.info.context_length - MIXED)
    lengths = [*range(1, MIXED + 1)]  # unlike, so that the merged cache has padding
    shapes = (1,), (1, 0, MOST_DRAFTS), (MIXED,), (MIXED, most)  # rows, chunk, drafts
    chunks = [partial(passes.chunk, width) for width in WIDTHS if width <= most]
    rows = [partial(passes.rows, lengths[:n], "grouped", *more) for n, *more in shapes]
    for run in (*chunks, *rows):
        attempt(run)


def calibrate(
    model: LoadedModel, make_cache: MakeCache, probe: Probe, reserve: Reserve = unlimited
) -> Measured:
    """Time passes of `model` on the engine thread. Never raises; a pass that fails is not measured.
    `reserve`: a pass for whose memory it returns `False` is not run."""
    gpu, context = mx.default_device() == mx.gpu, model.info.context_length
    depths, longest = (DEPTHS, LONGEST_ROW) if gpu else (SLOW_DEPTHS, SLOW_ROW)
    passes = OnDevice(model, make_cache, reserve)
    measured = Times(passes, context, depths, longest).measure(probe)
    shared, prefix = SHARED_UNMEASURED, SHARED_DEPTH if gpu else SLOW_SHARED_DEPTH
    if probe.shares and measured.curve.depths and prefix + TAIL + REPEATS <= context:
        shared = least_shared(passes, prefix)
    return replace(measured, passes=passes.nbytes, least_shared=shared)


def least_shared(passes: OnDevice, prefix: int) -> int:
    """Tokens from which on rows share a prefix, from a trial with two rows. A shared prefix is read
    once, but attention in two parts launches more kernels in each layer."""
    alike = [prefix + TAIL] * 2
    took = attempt(lambda: [passes.rows(alike, "grouped", shared=n) for n in (0, prefix)])
    if isinstance(took, Fault) or not all(took):
        return SHARED_UNMEASURED
    copies, shared = (min(seconds[1:]) for seconds in took)
    return prefix if copies >= SHARED_GAIN * shared else NOT_FASTER


@dataclass
class OnDevice:
    """Runs passes of a model, `repeats` of each shape. `chunk(1)` goes first: it sizes a row."""

    model: LoadedModel
    make_cache: MakeCache
    reserve: Reserve
    repeats: int = REPEATS
    draws: Sequence[SamplingParams] = ()  # after a pass of rows, they draw with each of these
    _memory: MemoryProfile = field(default_factory=partial(MemoryProfile, 0, 0))
    _deep: list[Any] = field(default_factory=list)
    _depth: int = 0  # tokens of the deep cache
    _deep_bytes: int = 0  # bytes of the deep cache
    _over_empty: dict[int, int] = field(default_factory=dict)
    _over_deep: dict[int, int] = field(default_factory=dict)
    """Peak temporary bytes of passes over the empty and the deep cache, by tokens of the pass."""

    def chunk(self, tokens: int, *, deep: bool = False, repeats: int | None = None) -> Took:
        """Run a chunk of so many tokens over an empty cache, or over the deep one."""
        if tokens == 1 and not deep:
            timed_pass(self.model, first := self.make_cache(), 0, 1)
            self._memory = profile(first)
        peaks, took = self._over_deep if deep else self._over_empty, list[float]()
        repeats = self.repeats if repeats is None else repeats
        for _ in range(repeats if self._has_room(self._deep_bytes, tokens) else 0):
            cache = self._deep if deep else self.make_cache()
            if not deep:
                grow_by(cache, tokens)
            start = self._depth if deep else 0
            seconds, peaks[tokens] = timed_pass(self.model, cache, start, tokens)
            took.append(seconds)
            self._depth += deep and tokens == 1  # one token may stay, others are taken back
            for layer in layers_of(cache) if deep and tokens > 1 else ():
                if hasattr(layer, "update_and_fetch"):
                    take_back(layer, tokens)
        return took

    def deepen(self, depth: int) -> bool:
        """Make the deep cache. Returns whether there is memory for it."""
        more = depth // SHALLOW + self.repeats
        nbytes = self._memory.row_bytes(depth + more)
        if not self._has_room(nbytes, 1):
            return False
        self._deep = deep_cache(self.model, self.make_cache, depth, more)
        self._depth, self._deep_bytes = depth, nbytes
        for tokens in SCORED:
            self.chunk(tokens, deep=True, repeats=1)
            if tokens not in self._over_empty:  # no time was left for it
                self.chunk(tokens)
        return True

    def rows(
        self, lengths: Sequence[int], name: str, chunk: int = 0, drafts: int = 0, shared: int = 0
    ) -> Took:
        """Decode rows with `lengths` cached tokens in the layout `name`, also with a chunk, or with
        drafts of each row. `shared`: tokens of their common prefix. Frees the deep cache."""
        self._deep, self._deep_bytes = [], 0
        more, width = self.repeats + drafts, len(lengths) * (1 + drafts)
        cache_bytes = 2 * len(lengths) * self._memory.row_bytes(max(lengths) + more)
        if not self._has_room(cache_bytes, chunk + width):
            return ()
        trial, took, cache = Trial(self.model, name), [], list[Any]()
        tokens = some_tokens(self.model, max(*lengths, chunk) + more, 0)
        for length in lengths:
            if not (cache and shared):
                cache = deep_cache(self.model, self.make_cache, length, more)
                share_prefix(cache, shared)
            trial.add(tokens[:length], deepcopy(cache) if shared else cache)
        kept = dict.fromkeys(trial.logits, 1) if drafts else NO_WIDTHS
        for _ in range(self.repeats):
            grow_by(cache := self.make_cache(), chunk)
            along = MixedChunk(tokens[:chunk], range(chunk), cache) if chunk else None
            began = perf_counter()
            logits = trial.step(along, kept, wrong=drafts)
            took.append(perf_counter() - began)
            for params in self.draws:
                mx.eval(trial.draw(logits[: len(lengths)], params).arrays)
        return took

    @property
    def nbytes(self) -> PassBytes:
        """The bytes of passes, by the peaks of those that have run."""
        empty, deep = self._over_empty, self._over_deep
        one, widest = empty.get(1, 0), max((n for n in empty if n <= WIDE), default=1)
        token = max(0, empty.get(widest, 0) - one) / max(1, widest - 1)
        if not all(n in deep and n in empty for n in SCORED):
            return PassBytes(one, token)
        # (tokens of a pass, bytes that it takes more over the deep cache)
        (few, less), (many, more) = ((n, max(0, deep[n] - empty[n])) for n in SCORED)
        pair = max(0, more - less) / (many - few) / self._depth
        return PassBytes(one, token, pair, max(0.0, less / self._depth - few * pair))

    def _has_room(self, cache_bytes: int, width: int) -> bool:
        """Reserve `cache_bytes`, a row of `width` tokens, and the most of a pass over `width`, by
        the last passes. Scores of attention over an empty cache grow with the square of the width.
        Returns whether all of this is free."""
        last, peak = [(1, 0), *self._over_empty.items()][-1]
        last_deep, deep_peak = [(1, 0), *(self._over_deep.items() if self._deep else ())][-1]
        over_empty = peak * max(width / last, (width / last) ** 2)
        over_deep = deep_peak * width / last_deep * (1 + 1 / SHALLOW)
        row_bytes = self._memory.row_bytes(width)
        return self.reserve(cache_bytes + row_bytes + int(max(over_empty, over_deep)))


def deep_cache(model: LoadedModel, make_cache: MakeCache, depth: int, more: int) -> list[Any]:
    """A row cache that appears to hold `depth` tokens, with capacity for `more` tokens. Only its
    first token is computed."""
    cache = make_cache()
    grow_by(cache, depth + more)
    model.prefill(PrefillChunk(Prompt([0]), 0, 1, cache))
    for layer in layers_of(cache):
        if isinstance(layer, QuantizedKVCache):
            for array in (*layer.keys, *layer.values):
                array[:, :, 1:depth] = array[:, :, :1]
            layer.offset = depth
        elif all(isinstance(getattr(layer, name, None), mx.array) for name in ("keys", "values")):
            first = [mx.contiguous(array[:, :, :1]) for array in (layer.keys, layer.values)]
            rest = [mx.broadcast_to(a, (*a.shape[:2], depth - 1, a.shape[3])) for a in first]
            mx.eval(rest)  # so that the buffers of the layer are filled in place
            layer.update_and_fetch(*rest)
    mx.eval(arrays(cache))
    return cache
