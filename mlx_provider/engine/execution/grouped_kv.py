"""Joins the caches of several groups of rows, the *parts*, into one cache per layer.

Attention runs group by group (needs `upstream.attention.route`). Recurrent layers run over all rows
at once, and separately over the tokens of a chunk (needs `upstream.recurrent.route`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx

from ...isolation import CircuitBreaker
from ...upstream.attention import Parts, Run
from ...upstream.batch_caches import RowCache, columns
from ...upstream.cache_classes import ArraysCache, by_layer, layers_of, take_back
from ...upstream.recurrent import StateParts, StateRun
from ..request import PrefillJob
from ..scheduling.step import Chunk

Count = int | Sequence[int] | mx.array
"""Rotary offsets of a part: of its only row, of each token of a `WideRow`, or (rows,) int32."""


@dataclass(frozen=True)
class MixedChunk:
    """Text tokens of a prompt, which the pass of the decoding rows appends to its row cache. To the
    model, each token is a row. Only attention and recurrent layers treat the tokens as one row."""

    tokens: Sequence[int]
    positions: Sequence[int]
    cache: list[Any]
    ends_prompt: bool = True  # whether logits are wanted after its last token
    sparse: bool = False  # whether tokens between these were left out, so positions have gaps

    @classmethod
    def of(cls, chunk: Chunk) -> MixedChunk:
        job, start, stop = chunk.job, chunk.start, chunk.stop
        positions: Sequence[int] = range(start, stop)
        if job.positions is not None:
            positions = job.positions[start:stop]
        elif job.prompt.positions is not None:
            positions = job.prompt.positions[0, start:stop].tolist()
        ends_prompt, sparse = stop == len(job.tokens), job.positions is not None
        return cls(job.tokens[start:stop], positions, job.row_cache(), ends_prompt, sparse)

    @property
    def wide(self) -> WideRow:
        positions = self.positions if self.sparse else None
        return WideRow(self.cache, len(self.tokens), positions=positions)


class MixedBatches:
    """Whether passes may be mixed, and the prompts to restart if a pass fails."""

    def __init__(self, possible: bool) -> None:
        """`possible`: result of the probe."""
        self._possible = possible
        self._breaker = CircuitBreaker(
            "mixed passes failed %d times: chunks run in passes of their own now",
            "chunks share the passes of rows that decode again",
        )
        self._passes = 0
        self._jobs: list[tuple[int, PrefillJob, bool]] = []
        """Jobs whose error may show now: (number of a pass, job, whether its chunk was in that
        pass). `False`: the chunk had its own pass, launched just before that one."""

    @property
    def allowed(self) -> bool:
        return self._possible and self._breaker.closed

    def begin_pass(self, chunk: Chunk | None) -> MixedChunk | None:
        """Count a pass of the rows. Returns the chunk that it will run, if any."""
        self._passes += 1
        self._jobs = [job for job in self._jobs if job[0] >= self._passes - 1]
        if chunk is None:
            return None
        self._jobs.append((self._passes, chunk.job, True))
        return MixedChunk.of(chunk)

    def may_fail_later(self, job: PrefillJob) -> None:
        """A chunk was launched in its own pass without a wait. The next pass may show its error."""
        self._jobs.append((self._passes + 1, job, False))

    def restart_prompts(self) -> bool:
        """Restart the prompts that a failed pass may have corrupted. Returns whether any was in a
        mixed pass, which counts as a failure of mixed passes."""
        for job in [job for _, job, _ in self._jobs if job.cache is not None]:
            job.restart()
        mixed = any(mixed for _, _, mixed in self._jobs)
        self._jobs = []
        if mixed:
            self._breaker.record_failure()
        return mixed

    def record_success(self) -> None:
        """The latest pass worked: counts for mixed passes if it was one, or if they are off."""
        mixed = any(mixed for at, _, mixed in self._jobs if at == self._passes)
        self._breaker.record_success(used=mixed)


@dataclass
class WideRow:
    """Several tokens of one row, each in the place of a row."""

    cache: list[Any]
    tokens: int
    drafts: bool = False  # whether the last tokens may be rejected, see `settle`
    states: list[StateRun] = field(default_factory=list)
    """Of recurrent layers. The pass fills them."""
    positions: Sequence[int] | None = None  # positions of the tokens, if they are not consecutive
    kept: int | None = None  # tokens that stay in the cache, at least one. `None`: unknown yet

    def settle(self) -> None:
        """Remove the tokens after the first `kept` from the cache."""
        kept = self.kept or 1
        for layer in layers_of(self.cache):
            if hasattr(layer, "update_and_fetch"):
                take_back(layer, self.tokens - kept)
        for state in self.states:
            state.keep(kept)
        self.states = []


class ChunkKV:
    """Attention cache of one row and layer, which the model sees as one cache per token."""

    def __init__(self, inner: Any, row: WideRow) -> None:
        self.inner, self.tokens, self._positions = inner, row.tokens, row.positions

    @property
    def offset(self) -> Sequence[int]:
        if self._positions is not None:
            return self._positions
        return range(self.inner.offset, self.inner.offset + self.tokens)

    def make_mask(self, N: int, *args: Any, **kwargs: Any) -> Any:
        return self.inner.make_mask(self.tokens, *args, **kwargs)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        append: Callable[..., tuple[Any, Any]] = self.inner.update_and_fetch
        if self._positions is not None:
            append = partial(self.inner.append_at, positions=self._positions)
        return append(keys.swapaxes(0, 2), values.swapaxes(0, 2))


class FillerKV:
    """Attention cache of a layer for filler rows (padding of a pass): each sees only its token."""

    offset = 0

    def make_mask(self, *args: Any, **kwargs: Any) -> None: ...

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values


def fillers(layer: Any) -> Any:
    """A cache like `layer` for filler rows. An empty recurrent state stands for zeros."""
    return FillerKV() if hasattr(layer, "update_and_fetch") else type(layer)(len(layer.cache))


def can_share_a_pass(cache: Sequence[Any]) -> bool:
    """Whether every layer of a row cache is attention with a token count, or recurrent."""
    return all(
        isinstance(layer.offset, int)
        if hasattr(layer, "update_and_fetch")
        else isinstance(layer, ArraysCache)
        for layer in layers_of(cache)
    )


def join(caches: Sequence[RowCache], sizes: Sequence[int], *, apart: bool = False) -> RowCache:
    """Join the groups' caches layer by layer. `sizes`: rows of each group. The result uses the
    groups' attention caches. Recurrent states move to it until `split` returns them. `apart`: the
    rows of each group are attended as if no other group existed."""
    counted = Offsets()

    def join_layer(*parts: Any) -> Any:
        if hasattr(parts[0], "update_and_fetch"):
            return GroupedKV(parts, sizes, counted, apart=apart)
        together = type(parts[0])(len(parts[0].cache))
        states = zip(*(part.cache for part in parts), strict=True)
        together.cache = [_stack(parts, sizes) for parts in states]
        for part in parts:  # otherwise the groups would hold a second copy
            part.cache = [None] * len(part.cache)
        return together

    return [by_layer(join_layer, *parts) for parts in zip(*caches, strict=True)]


def with_wide_rows(
    together: RowCache | None,
    caches: Sequence[RowCache],
    sizes: Sequence[int],
    wide: Sequence[WideRow],
) -> RowCache:
    """Join the caches of groups and of `wide` rows. `together`: what `join` made of the groups'
    `caches`, or the only one of these; `None` or empty: no group. `sizes`: rows of each group."""
    together = together or wide[0].cache
    counted = Offsets(early=any(row.drafts for row in wide))
    tokens, groups = [row.tokens for row in wide], len(sizes)

    def join_layer(layer: Any, *parts: Any) -> Any:
        """`layer`: of `together`. `parts`: of the groups, then of the wide rows."""
        own = list(zip(parts[groups:], wide, strict=True))
        if hasattr(parts[-1], "update_and_fetch"):
            chunks = [ChunkKV(cache, row) for cache, row in own]
            return GroupedKV([*parts[:groups], *chunks], [*sizes, *tokens], counted)
        found = [StateRun(layer, slice(0, sum(sizes)))] if sizes else []
        for cache, row in own:
            start = found[-1].rows.stop if found else 0
            at = slice(start, start + row.tokens)
            found.append(StateRun(cache, at, turned=True, drafts=row.drafts))
            if row.drafts:
                row.states.append(found[-1])
        return StateParts(found)

    layers = zip(together, *caches, *(row.cache for row in wide), strict=True)
    return [by_layer(join_layer, *parts) for parts in layers]


def split(together: RowCache, caches: Sequence[RowCache], sizes: Sequence[int]) -> None:
    """Return the recurrent state of `together` to the groups' `caches` of which `join` made it."""
    for layer, *parts in zip(layers_of(together), *map(layers_of, caches), strict=True):
        if not isinstance(layer, GroupedKV):
            for part, run in zip(parts, runs(parts, sizes), strict=True):
                part.cache = [None if a is None else a[run.rows] for a in layer.cache]


def offsets(cache: RowCache) -> list[mx.array]:
    """Rotary offsets on the device. Evaluate them with the pass: if the model gets its positions
    from outside, nothing else does, and each step would add an unevaluated sum to every layer."""
    parts = [p for x in layers_of(cache) for p in (x.parts if isinstance(x, GroupedKV) else [x])]
    counts = (getattr(part, "offset", None) for part in parts)
    return [count for count in counts if isinstance(count, mx.array)]


class Offsets:
    """Rotary offsets of all rows, computed once per step for all layers whose parts have the same
    numbers or the same arrays. `merge_rows` makes these arrays, and `advance` keeps them common."""

    def __init__(self, *, early: bool = False) -> None:
        """`early`: see `start_layer`."""
        self._early = early
        self._layers = 0
        self._made: tuple[list[Count], mx.array] | None = None
        self._followed: tuple[list[Count], list[Count]] | None = None
        """Offsets of the parts before and after a layer appended its tokens."""

    def start_layer(self, keys: mx.array) -> None:
        """Let the device begin a pass with drafts while the host still builds it, at each layer
        whose number is a power of two."""
        self._layers += 1
        if self._early and self._layers & (self._layers - 1) == 0:
            mx.async_eval(keys)  # type: ignore[no-untyped-call]

    def of(self, counts: list[Count], sizes: Sequence[int]) -> mx.array:
        """Offsets of all rows, (rows,) int32, from `counts` of the parts. `sizes`: their rows."""
        if self._made is None or not _alike(counts, self._made[0]):
            arrays = [
                count
                if isinstance(count, mx.array)
                else mx.array([count] * size if isinstance(count, int) else list(count))
                for count, size in zip(counts, sizes, strict=True)
            ]
            self._made = counts, mx.concatenate(arrays)
        return self._made[1]

    def advance(self, parts: Sequence[Any], before: list[Count]) -> None:
        """After the parts of a layer appended tokens: let them use the new arrays of an earlier
        layer, if their offsets `before` were the same."""
        after = [part.offset for part in parts]
        if any(isinstance(a, mx.array) and a is b for a, b in zip(after, before, strict=True)):
            self._made = self._followed = None  # changed in place: the same array keeps counting
        elif self._followed is None or not _alike(before, self._followed[0]):
            self._followed = before, after
        else:
            for part, count in zip(parts, self._followed[1], strict=True):
                if isinstance(count, mx.array):
                    part.offset = count


def _alike(some: Sequence[Count], others: Sequence[Count]) -> bool:
    return all(
        a is b if isinstance(a, mx.array) or isinstance(b, mx.array) else a == b
        for a, b in zip(some, others, strict=True)
    )


class GroupedKV:
    """The attention caches of one layer, one per group, as one cache for the model."""

    def __init__(
        self, parts: Sequence[Any], sizes: Sequence[int], counted: Offsets, *, apart: bool = False
    ) -> None:
        self.parts, self.sizes, self.apart = parts, sizes, apart
        self.runs = runs(parts, sizes)
        self._counted = counted

    @property
    def offset(self) -> mx.array:
        return self._counted.of([part.offset for part in self.parts], self.sizes)

    @property
    def _offset(self) -> int:
        """Tokens of the longest row, padding included. mlx-vlm reads this name and reads `offset`
        back from the device if it is missing (`cache_position_offset`, models/base.py 0.7.10)."""
        return max(columns(run.cache) for run in self.runs)

    def make_mask(self, *args: Any, **kwargs: Any) -> list[Any]:
        return [part.make_mask(*args, **kwargs) for part in self.parts]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Parts, Parts]:
        self._counted.start_layer(keys)
        before = [part.offset for part in self.parts]
        pairs = [
            part.update_and_fetch(keys[run.rows], values[run.rows])
            for part, run in zip(self.parts, self.runs, strict=True)
        ]
        self._counted.advance(self.parts, before)
        arrays = zip(*pairs, strict=True)
        found = (Parts(list(both), self.runs, isolated=self.apart) for both in arrays)
        return next(found), next(found)


def runs(parts: Sequence[Any], sizes: Sequence[int]) -> list[Run]:
    """The `Run` of each part: its cache and its rows, of which it has as many as in `sizes`."""
    slices = [slice(*edges) for edges in pairwise(accumulate(sizes, initial=0))]
    return [
        Run(part.inner, rows, turned=True) if isinstance(part, ChunkKV) else Run(part, rows)
        for part, rows in zip(parts, slices, strict=True)
    ]


def _stack(states: Sequence[Any], sizes: Sequence[int]) -> Any:
    """One state of all groups. Zeros replace missing states."""
    known = next((state for state in states if state is not None), None)
    if known is None:
        return None
    rows = [
        mx.zeros((size, *known.shape[1:]), known.dtype) if state is None else state
        for state, size in zip(states, sizes, strict=True)
    ]
    return mx.concatenate(rows)
