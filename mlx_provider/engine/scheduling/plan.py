"""What one step runs, as a value; and how large a chunk should be. Imports no mlx."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..request import PrefillJob, Row

TILE = 32
"""Sizes above it are multiples: matrix kernels take as long for a part of a tile, and those of
Metal have 32 rows, of others 8 or 16."""
SMALL = (1, 2, 4, 8, 16)
"""Sizes below a tile: kernels for few rows take less than those for a whole one."""
NEARLY = 0.9
"""Share of the best rate that is good enough for a prompt where a smaller chunk has it."""
LITTLE_MORE = 1.5
"""Times the stall of the smallest chunk that a larger one may take, whatever the target: with one
token for each reading of the weights, a long prompt would take hours."""

GRID = 32
"""Where passes of a prompt with recurrent state may end, counted from its beginning: what its
state is must not depend on how long passes happened to take. Recurrent rules compute tokens in
chunks of their own, of which this is a multiple, and round otherwise where those lie otherwise."""
TAIL = 32
"""Tokens of a prompt's last pass there, at the least: kernels for fewer round otherwise, too."""


@dataclass(frozen=True)
class Chunk:
    """Prefill tokens `start .. stop` of `job`."""

    job: PrefillJob
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def due(self) -> bool:
        """Whether its prompt stands where it did: it has neither ended nor started again."""
        return self.job.cache is not None and self.job.done == self.start


@dataclass(frozen=True)
class StepPlan:
    """One step: who decodes, what is prefilled, and whether they share a forward pass."""

    rows: tuple[Row, ...] = ()
    """They decode one token each; empty: nobody does, or all wait for a brief prompt."""
    chunk: Chunk | None = None
    mixed: bool = False
    """The chunk is in the pass of the rows, not in one of its own."""
    pass_seconds: float = 0.0
    """What the pass of the rows is expected to take, with the chunk if that is mixed in."""
    chunk_seconds: float = 0.0
    """What the chunk's own pass is expected to take."""
    scored: PrefillJob | None = None
    """Whose prompt is scored behind the rows' pass, before any of it is prefilled,"""
    scoring_seconds: float = 0.0
    """until so many have passed, but a piece of it at the least."""


def widths(rows: int, most: int) -> list[int]:
    """Sizes of chunks with which a pass of `rows` fills whole tiles, ascending, at most `most`."""
    totals = [*SMALL, *range(TILE, rows + most + 1, TILE)]
    return [n - rows for n in totals if 0 < n - rows <= most]


def in_tiles(width: int) -> int:
    """The width that takes as long as `width` does: whole tiles, beyond the first."""
    return width if width <= TILE else -(-width // TILE) * TILE


def grid_sizes(start: int, end: int, total: int, grid: int, most: int) -> list[int]:
    """Sizes of chunks from `start` that end on the grid, or at `end`, ascending.

    `end`: where the next chunk must end at the latest; `total`: tokens of the prompt. The first
    one may be larger than `most`, where nothing smaller ends there.
    """
    stops = range((start // grid + 1) * grid, end, grid)
    sizes = [stop - start for stop in stops if total - stop >= min(TAIL, grid)]
    sizes.append(end - start)
    return [n for n in sizes if n <= most] or sizes[:1]


def best_size(sizes: Sequence[int], seconds: Callable[[int], float], target: float) -> int:
    """The smallest size with nearly the best rate among those within `target` seconds.

    Where next to nothing keeps to the target, those that take little more than the smallest:
    whoever decodes waits that long anyway.
    """
    return _nearly_best(within(sizes, seconds, target), seconds)[0]


def within(sizes: Sequence[int], seconds: Callable[[int], float], target: float) -> list[int]:
    """Sizes within `target` seconds, or that take little more than the smallest."""
    longest = max(target, LITTLE_MORE * seconds(sizes[0]))
    return [n for n in sizes if seconds(n) <= longest]


def worthwhile(sizes: Sequence[int], seconds: Callable[[int], float]) -> int:
    """The smallest size with nearly the best rate of all: a larger one gains next to nothing."""
    return _nearly_best(sizes, seconds)[0]


def largest_size(sizes: Sequence[int], seconds: Callable[[int], float], longest: float) -> int:
    """The largest size with nearly the best rate among those within `longest` seconds."""
    return _nearly_best([n for n in sizes if seconds(n) <= longest], seconds)[-1]


def _nearly_best(sizes: Sequence[int], seconds: Callable[[int], float]) -> list[int]:
    """Sizes with nearly the best rate, ascending."""
    rates = {n: n / seconds(n) for n in sizes}
    enough = NEARLY * max(rates.values())
    return [n for n, rate in rates.items() if rate >= enough]
