"""Finds a prompt in prefill that will soon provide most of another prompt. Imports no mlx.

The plan of one step, as a value, and functions for chunk sizes. Imports no mlx.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..prefix_cache.tree import common
from ..request import PrefillJob, Row

WORTH_WAITING = 256
"""Least tokens that the other prompt must be about to provide."""


def awaits(job: PrefillJob, others: Iterable[PrefillJob]) -> bool:
    """Whether `job` should wait, because a started prompt will store its prefix soon."""
    return any(provides(leader, job) for leader in others if leader.admitted)


def provides(leader: PrefillJob, job: PrefillJob) -> bool:
    """Whether `leader` will soon provide much of `job`'s prompt."""
    if leader is job or not leader.uses_prefix_cache or leader.request.salt != job.request.salt:
        return False
    if leader.ids is None or job.ids is None:
        return False
    shared = min(common(leader.ids, job.ids), len(leader.tokens), len(job.tokens) - 1)
    return shared - job.estimated_cached > WORTH_WAITING


SMALLEST = 16
"""Passes of a prompt end at multiples of this, of twice as many tokens, and so on. So there are few
shapes, of which a GPU may have to plan or compile each."""
NEARLY = 0.9
"""A smaller chunk with this share of the best rate is good enough."""
LITTLE_MORE = 1.5
"""A larger chunk may take this multiple of the time of the smallest, whatever the target. With one
token per reading of the weights, a long prompt would take hours."""

GRID = 32
"""Passes of a prompt with recurrent state end at multiples of this, counted from its beginning, so
that the state does not depend on the time of passes. Recurrent rules compute tokens in chunks of
their own, and round differently if these chunks start elsewhere. This is a multiple of their
size."""
TAIL = 32
"""Least tokens of the last pass of such a prompt, because kernels for fewer round differently,
too."""


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
        """Whether its prompt is still at `start`: it has neither ended nor started again."""
        return self.job.cache is not None and self.job.done == self.start


@dataclass(frozen=True)
class StepPlan:
    """The rows that decode in a step, the chunk, and whether they share a forward pass."""

    rows: tuple[Row, ...] = ()
    """Rows that decode one token each. Empty: none decodes, or all wait for a brief prompt."""
    chunk: Chunk | None = None
    mixed: bool = False
    """Whether the chunk is in the pass of the rows, not in its own pass."""
    pass_seconds: float = 0.0
    """Expected seconds of the rows' pass, including a mixed chunk."""
    chunk_seconds: float = 0.0
    """Expected seconds of the chunk's own pass."""
    scored: PrefillJob | None = None
    """The prompt to score behind the rows' pass, before any of it is prefilled."""
    scoring_seconds: float = 0.0
    """Time limit for the scoring in this step. At least one piece runs."""
    embedded: PrefillJob | None = None
    """The prompt whose media run through the vision tower behind the rows' pass."""
    embedding_seconds: float = 0.0
    """Time limit for the tower in this step. At least one slice of it runs."""


def chunk_sizes(start: int, end: int, total: int, most: int, grid: int = 1) -> list[int]:
    """Sizes of a chunk from `start`, ascending: to the next multiple of each of the fixed sizes up
    to `most`, or to `end`.

    `end`: the latest end of the next chunk; `total`: tokens of the prompt; `grid`: the smallest of
    the fixed sizes, if it matters to the model. The first size may exceed `most` if no smaller
    chunk ends on the grid.
    """
    found, size = set(), grid if grid > 1 else min(SMALLEST, most)
    while size <= most:
        stop = (start // size + 1) * size
        if stop < end and total - stop >= min(TAIL, grid):
            found.add(stop - start)
        size *= 2
    if end - start <= most or not found:
        found.add(end - start)
    return sorted(found)


def fixed_sizes(most: int) -> list[int]:
    """The fixed sizes up to `most`, ascending."""
    return chunk_sizes(0, 2 * most, 4 * most, most)


def best_size(sizes: Sequence[int], seconds: Callable[[int], float], target: float) -> int:
    """The smallest size with nearly the best rate among those within `target` seconds.

    If almost no size is within the target, it chooses among those that take little more than the
    smallest, because decoding rows wait that long anyway.
    """
    return _nearly_best(within(sizes, seconds, target), seconds)[0]


def within(sizes: Sequence[int], seconds: Callable[[int], float], target: float) -> list[int]:
    """Sizes within `target` seconds, or that take little more time than the smallest."""
    longest = max(target, LITTLE_MORE * seconds(sizes[0]))
    return [n for n in sizes if seconds(n) <= longest]


def worthwhile(sizes: Sequence[int], seconds: Callable[[int], float]) -> int:
    """The smallest size with nearly the best rate of all. Larger sizes gain almost nothing."""
    return _nearly_best(sizes, seconds)[0]


def largest_size(sizes: Sequence[int], seconds: Callable[[int], float], longest: float) -> int:
    """The largest size with nearly the best rate among those within `longest` seconds."""
    return _nearly_best([n for n in sizes if seconds(n) <= longest], seconds)[-1]


def _nearly_best(sizes: Sequence[int], seconds: Callable[[int], float]) -> list[int]:
    """Sizes with nearly the best rate, ascending."""
    rates = {n: n / seconds(n) for n in sizes}
    enough = NEARLY * max(rates.values())
    return [n for n, rate in rates.items() if rate >= enough]
